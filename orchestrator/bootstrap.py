"""Make the desk's own .venv, from nothing but Python >= 3.10. Standard library only: nothing is installed yet.

pip does the work, because it knows the desk's mirrors, certificates and proxies by itself. Where Python came
without pip (Debian packs it apart, as python3-venv), PyPA's own installer brings it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

OLDEST_PYTHON = (3, 10)
GET_PIP_URL = os.environ.get("GET_PIP_URL", "https://bootstrap.pypa.io/get-pip.py")


def main(arguments: list[str]) -> int:
    """Build the venv named on the command line with the given requirement files; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bootstrap", description=__doc__)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--requirements", type=Path, action="append", required=True)
    parser.add_argument(
        "--project", type=Path, required=True, help="installed as editable, without dependencies"
    )
    parser.add_argument("--compile", action="store_true", help="write bytecode of everything in the venv")
    options = parser.parse_args(arguments)
    if sys.version_info < OLDEST_PYTHON:
        return _fail(
            f"Python {sys.version.split()[0]} is too old: {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed.",
            "Name another: make PYTHON=/path/to/python3.12 …",
        )
    started = time.monotonic()
    try:
        python = make_venv(options.venv)
        count = sum(_count(path) for path in options.requirements)
        say(f"installing {count} pinned packages into {options.venv} (a minute or two the first time)")
        files = [part for path in options.requirements for part in ("-r", str(path))]
        pip(python, ["install", *files])
        pip(python, ["install", "--no-deps", "--editable", str(options.project)])
        if options.compile:
            write_bytecode(python, [options.venv / "lib", options.project / "orchestrator"])
    except subprocess.CalledProcessError as error:
        return _fail(
            f"`{' '.join(map(str, error.cmd))}` failed (exit status {error.returncode}).",
            "Its words are above.",
        )
    except OSError as error:
        return _fail(
            f"{options.venv} could not be built: {error}.", "Correct that, then run the same command again."
        )
    say(f"{options.venv} is ready ({time.monotonic() - started:.0f} s)")
    return 0


def make_venv(folder: Path) -> Path:
    """A venv with pip in ``folder``; one that is there and works is kept. Returns its python."""
    python = folder / "bin" / "python"
    if python.exists() and _works(python, "-m", "pip", "--version"):
        return python
    say(f"making {folder} with Python {sys.version.split()[0]}")
    with_pip = _works(Path(sys.executable), "-c", "import ensurepip")
    subprocess.run(
        [sys.executable, "-m", "venv", "--clear", *([] if with_pip else ["--without-pip"]), str(folder)],
        check=True,
    )
    if not with_pip:
        say("this Python has no ensurepip: fetching pip's own installer")
        installer = folder / "get-pip.py"
        with urllib.request.urlopen(GET_PIP_URL, timeout=60) as answer:
            installer.write_bytes(answer.read())
        subprocess.run([str(python), str(installer), "--quiet"], check=True)
    return python


def pip(python: Path, arguments: list[str]) -> None:
    """Run the venv's pip, errors only. Raises CalledProcessError; pip has said why on standard error."""
    subprocess.run(
        [
            str(python),
            "-m",
            "pip",
            "--quiet",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
            *arguments,
        ],
        check=True,
    )


def write_bytecode(python: Path, folders: list[Path]) -> None:
    """Compile every module below ``folders``; those that are not meant for this Python are passed over.

    Not every installer and environment does it, and without it a command of the desk takes half as long again.
    """
    subprocess.run(
        [str(python), "-m", "compileall", "-q", "-q", "-j", "0", *map(str, folders)],
        stdout=subprocess.DEVNULL,
        check=False,
    )


def say(message: str) -> None:
    sys.stderr.write(f"· {message}\n")
    sys.stderr.flush()


def _works(python: Path, *arguments: str) -> bool:
    done = subprocess.run(
        [str(python), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )
    return done.returncode == 0


def _count(requirements: Path) -> int:
    return sum(
        1 for line in requirements.read_text(encoding="utf-8").splitlines() if line and line[0] not in "#-"
    )


def _fail(message: str, hint: str) -> int:
    sys.stderr.write(f"error: {message}\n{hint}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
