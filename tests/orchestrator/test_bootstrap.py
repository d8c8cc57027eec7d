"""The desk's own venv, from nothing but a Python: with ensurepip, without it, and again after an interruption."""

from __future__ import annotations

import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import bootstrap

GET_PIP = """
import pathlib, sysconfig
pip = pathlib.Path(sysconfig.get_path("purelib"), "pip")
pip.mkdir()
(pip / "__init__.py").touch()
(pip / "__main__.py").write_text("print('pip from its own installer')")
"""


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "get-pip.py").write_text(GET_PIP)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def without_ensurepip(monkeypatch: pytest.MonkeyPatch) -> None:
    works = bootstrap._works
    monkeypatch.setattr(
        bootstrap, "_works", lambda python, *args: "ensurepip" not in " ".join(args) and works(python, *args)
    )


def test_a_python_without_ensurepip_gets_pip_from_its_own_installer(
    tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ensurepip(monkeypatch)
    monkeypatch.setattr(bootstrap, "GET_PIP_URL", f"{web}/get-pip.py")
    python = bootstrap.make_venv(tmp_path / "venv")
    assert bootstrap._works(python, "-m", "pip", "--version")


def test_a_venv_that_works_is_kept_and_a_broken_one_is_made_anew(
    tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ensurepip(monkeypatch)
    monkeypatch.setattr(bootstrap, "GET_PIP_URL", f"{web}/get-pip.py")
    python = bootstrap.make_venv(tmp_path / "venv")
    (tmp_path / "venv" / "mark").touch()
    assert bootstrap.make_venv(tmp_path / "venv") == python
    assert (tmp_path / "venv" / "mark").exists()
    python.unlink()
    python.symlink_to("/nonexistent/python3")
    assert bootstrap._works(bootstrap.make_venv(tmp_path / "venv"), "-m", "pip", "--version")
    assert not (tmp_path / "venv" / "mark").exists()


def test_an_installer_that_cannot_be_fetched_is_an_error_in_words(
    tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_ensurepip(monkeypatch)
    monkeypatch.setattr(bootstrap, "GET_PIP_URL", f"{web}/none.py")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("")
    arguments = [
        "--venv",
        str(tmp_path / "venv"),
        "--requirements",
        str(requirements),
        "--project",
        str(tmp_path),
    ]
    assert bootstrap.main(arguments) == 1
    words = capsys.readouterr().err
    assert "could not be built" in words
    assert "404" in words


def test_a_python_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "OLDEST_PYTHON", (99, 0))
    assert bootstrap.main(["--venv", "v", "--requirements", "r", "--project", "."]) == 1
    assert "99.0 or newer is needed" in capsys.readouterr().err


def test_bytecode_is_written_whatever_the_environment_says_and_what_is_no_python_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for folder, text in (("venv/lib/package", "x = 1\n"), ("orchestrator", "y = 2\n")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "module.py").write_text(text)
    (tmp_path / "orchestrator" / "template.py").write_text("{% not python %}\n")
    bootstrap.write_bytecode(Path(sys.executable), [tmp_path / "venv" / "lib", tmp_path / "orchestrator"])
    written = {path.name.split(".")[0] for path in tmp_path.rglob("*.pyc")}
    assert written == {"module"}
    assert len(list(tmp_path.rglob("*.pyc"))) == 2
