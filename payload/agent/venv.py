"""Verb ``venv``: a clean venv, built beside the one in use, verified, then switched to."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

from payload.agent import durable, state
from payload.agent.child import run_child
from payload.agent.environment import base_environment
from payload.agent.layout import Layout
from payload.agent.locks import hold
from payload.agent.pins import TorchPin, check, requirement_lines, venv_name
from payload.agent.protocol import Events, Json, Request
from payload.agent.usage import unused
from payload.agent.uv import Sources, Uv
from payload.errors import PayloadError

# In each venv: what it was verified to be.
RECORD_FILE = "venv.json"
_VERIFY = Path(__file__).resolve().with_name("verify_venv.py")
_VERIFY_TIMEOUT_S = 600.0
_VERSION_TIMEOUT_S = 30.0
_LOCK_WAIT_S = 2.0
_LEAST_ROOM_BYTES = 16 * 1024 * 1024


def venv(request: Request, events: Events) -> Json:
    """Verb: the venv of these requirements, this torch and this Python, made unless it is there.

    With ``check`` nothing is made: ``present`` says whether it is there, and if so it is switched to.

    Never touches the compile cache. Raises PayloadError of kind ``refused`` when what was installed is not what is
    pinned; then, as after any failure, the venv in use stays in use and the new one is removed.
    """
    began = time.monotonic()
    layout = Layout.at(request.root)
    torch = TorchPin.from_request(request.need("torch", dict))
    lines = requirement_lines(request.need("requirements", str))
    sources = Sources.from_request(request.get("index", dict) or {}, request.get("wheelhouse", str))
    imports = [str(name) for name in request.get("imports", list) or []]
    only_check = bool(request.get("check", bool))
    program = request.get("uv", str) if only_check else request.need("uv", str)
    uv = Uv(program or "", layout, sources, bool(request.get("python_downloads", bool)))
    layout.venvs.mkdir(parents=True, exist_ok=True)
    with hold(layout, "venv", "venv", request.get("holder", str) or "", _LOCK_WAIT_S):
        for leftover in durable.leftovers(layout.venvs):
            events.progress(f"removing what an interrupted build left: {leftover.name}")
            durable.remove(leftover)
        python = uv.find_python(request.get("python", str) or sys.executable)
        version = _python_version(python)
        target = layout.venv(venv_name(lines, torch, version))
        record = None if request.get("force", bool) else _verified_record(target, version)
        if only_check and (record is None or not set(imports) <= set(record["imports"])):
            return {"venv": target.name, "present": False, "created": False}
        created = record is None
        if record is None:
            _refuse_if_in_use(layout, target)
            with unused(target) as free:
                if not free:
                    raise PayloadError(
                        f"venv {target.name} is in use, so it cannot be built anew",
                        "Wait until it is not.",
                        "busy",
                    )
                record = _build(uv, python, target, lines, torch, imports, events)
        elif not set(imports) <= set(record["imports"]):
            record = _verify(target, torch, imports, events)
            durable.write_json(target / RECORD_FILE, record)
        durable.point(layout.venv_link, target)
    return {
        "venv": target.name,
        "present": True,
        "created": created,
        "python": record["python"],
        "torch": record["torch"],
        "packages": record["packages"],
        "seconds": round(time.monotonic() - began, 3),
    }


def _build(
    uv: Uv, python: str, target: Path, lines: List[str], torch: TorchPin, imports: List[str], events: Events
) -> Dict[str, Any]:
    building = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        events.progress(f"making venv {target.name} with {python}")
        uv.create_venv(python, building, events.progress)
        # A requirement may be a URL with a password: for the builder's eyes, and only while uv reads it.
        requirements = building / "requirements.txt"
        durable.write_file(requirements, "".join(f"{line}\n" for line in lines).encode(), mode=0o600)
        requirement, backend = f"torch=={torch.version}", torch.backend
        if torch.index_url is not None and uv.sources.wheelhouse is None and not uv.sources.offline:
            uv.install_torch_from_its_index(building, torch, events.progress)
            # From here on exactly this build counts as installed, and no other index can replace it.
            requirement, backend = f"torch=={_installed_torch(building)}", None
        uv.install(building, requirements, requirement, backend, events.progress)
        requirements.unlink()
        record = _verify(building, torch, imports, events)
        _check_room(building)
        durable.write_json(building / RECORD_FILE, record)
        durable.put_in_place(building, target)
        return record
    finally:
        durable.remove(building)


def _check_room(venv_dir: Path) -> None:
    """The imports of the verification have written bytecode, which a full disk cuts off: then no later import works."""
    free_bytes = shutil.disk_usage(venv_dir).free
    if free_bytes < _LEAST_ROOM_BYTES:
        raise PayloadError(
            f"the container's disk is full: {free_bytes >> 20} MiB are left beside the new venv",
            "Free some space, then try again. The venv in use is untouched.",
        )


def _verify(venv_dir: Path, torch: TorchPin, imports: List[str], events: Events) -> Dict[str, Any]:
    """The record of a venv that is as pinned. Raises PayloadError of kind ``refused`` when it is not."""
    events.progress("verifying the venv")
    description = check(_describe(venv_dir, imports), torch)
    return {
        **{name: description[name] for name in ("python", "torch", "packages")},
        "imports": imports,
        "pin": torch.public(),
        "distributions": _distributions(venv_dir),
    }


def _describe(venv_dir: Path, imports: List[str]) -> Dict[str, Any]:
    output: List[bytes] = []
    outcome = run_child(
        [str(venv_dir / "bin" / "python"), "-I", str(_VERIFY)],
        environment=base_environment(),
        folder=venv_dir,
        request=json.dumps({"imports": imports}).encode("ascii"),
        on_stdout=output.append,
        on_stderr=lambda line: None,
        timeout_s=_VERIFY_TIMEOUT_S,
    )
    try:
        description: Dict[str, Any] = json.loads(b"".join(output))
    except ValueError:
        how = "did not end in time" if outcome.timed_out else f"ended with {outcome.returncode}"
        raise PayloadError(
            f"the new venv cannot be verified: its Python {how}", "\n".join(outcome.stderr_tail)
        ) from None
    return description


def _verified_record(target: Path, python_version: str) -> Optional[Dict[str, Any]]:
    """The record of a venv that is there, works, and has the distributions it was verified with; else None."""
    with contextlib.suppress(OSError, PayloadError, KeyError):
        record: Dict[str, Any] = durable.read_json(target / RECORD_FILE)
        same = record["distributions"] == _distributions(target) and record["python"] == python_version
        if same and _python_version(str(target / "bin" / "python")) == python_version:
            return record
    return None


def _distributions(venv_dir: Path) -> List[str]:
    """The names of the installed distributions with their versions, as site-packages lists them."""
    return sorted(entry.name for entry in venv_dir.glob("lib/python*/site-packages/*.dist-info"))


def _installed_torch(venv_dir: Path) -> str:
    for name in _distributions(venv_dir):
        found = re.fullmatch(r"torch-(.+)\.dist-info", name)
        if found:
            return found.group(1)
    raise PayloadError("torch was installed, yet it is not in the venv")


def _python_version(python: str) -> str:
    """``3.11.7``, as the interpreter itself says."""
    try:
        done = subprocess.run(
            [python, "-I", "-V"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PayloadError(f"{python} does not run: {error}") from None
    found = re.fullmatch(r"Python (\S+)", done.stdout.strip())
    if not found:
        raise PayloadError(f"{python} does not say its version: {done.stdout.strip()!r}")
    return found.group(1)


def _refuse_if_in_use(layout: Layout, target: Path) -> None:
    lost = (run for run, _ in state.lost_and_alive(layout))
    for run in itertools.chain(state.active_runs(layout), lost):
        spec = durable.read_json(layout.run(run.run_id) / state.SPEC_FILE)
        if spec.get("venv") == target.name:
            how = "lost, yet processes of it are still" if run.state == "lost" else run.state
            raise PayloadError(
                f"run {run.run_id} is {how} in venv {target.name}, so it cannot be built anew",
                "Wait for its end, or `stop` it.",
                kind="busy",
            )
