"""A container's root in a temporary folder, and its agent asked as the controller asks it: by stdin and stdout."""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from payload.agent.release import build_archive, tree_hash

PAYLOAD = Path(__file__).resolve().parents[3] / "payload"
VENV = "0" * 16
DEADLINE_S = 30.0

# Modules for `call`: what a payload module may do, well or badly.
MODULES = {
    "echo": """
        import sys
        from payload.agent.protocol import serve

        def handler(request, events):
            print("a chatty library")
            events.progress("working", done=1, total=2)
            return {"fields": dict(request.fields), "root": request.root}

        sys.exit(serve(handler))
    """,
    "refuses": """
        import os, sys
        from payload.agent.protocol import serve
        from payload.errors import PayloadError

        def handler(request, events):
            os.system("echo written past Python")
            raise PayloadError("the message", "the hint", kind="refused")

        sys.exit(serve(handler))
    """,
    "dies": """
        import sys
        sys.stderr.write("".join(f"line {number}\\n" for number in range(30)))
        sys.exit(7)
    """,
    "hangs": """
        import os, sys, time
        from pathlib import Path
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path(os.environ["PIDS"] + ".grandchild").write_text(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
        Path(os.environ["PIDS"] + ".module").write_text(str(os.getpid()))
        time.sleep(600)
    """,
    "talks": """
        import json, os, signal, sys, time
        from pathlib import Path
        nonce = json.loads(sys.stdin.readline())["nonce"]
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.setsid()
            Path(os.environ["PIDS"]).write_text(str(os.getpid()))
            time.sleep(600)
        while True:
            print(json.dumps({"nonce": nonce, "event": "progress", "message": "still here"}), flush=True)
            time.sleep(0.01)
    """,
    "forges": """
        import json, sys
        line = json.loads(sys.stdin.readline())
        print("not JSON", flush=True)
        print(json.dumps({"nonce": "another", "result": {"forged": True}}), flush=True)
        print(json.dumps({"nonce": line["nonce"], "result": {"first": True}}), flush=True)
        print(json.dumps({"nonce": line["nonce"], "result": {"second": True}}), flush=True)
    """,
}


@dataclass
class Reply:
    """What came back: the events, and either the result or the error."""

    status: int
    events: list[dict[str, Any]]
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    stderr: str

    def log(self) -> bytes:
        """The bytes of all log events; they must follow one another without a gap."""
        data, expected = b"", None
        for event in self.events:
            if event["event"] == "log":
                assert expected is None or event["offset"] == expected
                piece = base64.b64decode(event["data"])
                data, expected = data + piece, event["offset"] + len(piece)
        return data


def parse(
    stdout: bytes, nonce: str
) -> tuple[list[dict[str, Any]], dict[str, Any] | None, dict[str, Any] | None]:
    """Split the agent's output: every line is JSON with the nonce, and the last one alone is final."""
    messages = [json.loads(line) for line in stdout.splitlines()]
    assert all(message.pop("nonce") == nonce for message in messages)
    if not messages or "event" in messages[-1]:
        return messages, None, None
    *events, final = messages
    assert all("event" in event for event in events)
    return events, final.get("result"), final.get("error")


@dataclass
class FakeContainer:
    """One root, with one release of the payload in it and a venv that is just a Python."""

    root: Path
    release: str
    python: str = sys.executable
    environment: Mapping[str, str] = field(
        default_factory=lambda: {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "LANG": "C.UTF-8",
        }
    )

    @property
    def agent(self) -> Path:
        return self.root / "releases" / self.release / "payload" / "agent"

    def envelope(self, nonce: str, **fields: Any) -> bytes:
        request = {"protocol": 1, "nonce": nonce, "root": str(self.root), **fields}
        return json.dumps(request).encode() + b"\n"

    def ask(self, verb: str, program: Path | None = None, **fields: Any) -> Reply:
        """Ask and wait for the answer."""
        nonce = secrets.token_hex(8)
        done = subprocess.run(
            [self.python, "-I", "-B", str(program or self.agent), verb],
            input=self.envelope(nonce, **fields),
            capture_output=True,
            timeout=DEADLINE_S * 2,
            env=dict(self.environment),
            umask=0,
        )
        events, result, error = parse(done.stdout, nonce)
        assert done.returncode == (0 if result is not None else 1)
        return Reply(done.returncode, events, result, error, done.stderr.decode())

    def result(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Ask, and take only success for an answer."""
        reply = self.ask(verb, **fields)
        assert reply.result is not None, reply
        return reply.result

    def error(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Ask, and take only an error for an answer."""
        reply = self.ask(verb, **fields)
        assert reply.error is not None, reply
        return reply.error

    def open(self, verb: str, **fields: Any) -> subprocess.Popen[bytes]:
        """Ask without waiting."""
        process = subprocess.Popen(
            [self.python, "-I", "-B", str(self.agent), verb],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(self.environment),
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(self.envelope("ab", **fields))
        process.stdin.close()
        process.stdin = None
        return process

    def spec(self, code: str, *args: str, **changes: Any) -> dict[str, Any]:
        """A run's spec whose job is Python ``code``."""
        return {
            "release": self.release,
            "venv": VENV,
            "cache": None,
            "command": ["-c", code, *args],
            "env": {},
            "recipe": {},
            "created_at": time.time(),
            "nproc": 1,
            **changes,
        }

    def start(self, run_id: str, code: str, *args: str, **changes: Any) -> dict[str, Any]:
        return self.result("start", run_id=run_id, spec=self.spec(code, *args, **changes))

    def state(self, run_id: str) -> dict[str, Any]:
        found = self.result("status", run_id=run_id)["runs"][0]
        assert isinstance(found, dict)
        return found

    def wait_for_state(self, run_id: str, *states: str) -> dict[str, Any]:
        for _ in until():
            found = self.state(run_id)
            if found["state"] in states:
                return found
        raise AssertionError(f"run {run_id} did not become {states}")

    def state_file(self, run_id: str) -> dict[str, Any]:
        content = json.loads((self.root / "runs" / run_id / "state.json").read_text())
        assert isinstance(content, dict)
        return content


def until(deadline_s: float = DEADLINE_S, every_s: float = 0.05) -> Iterator[None]:
    """Repeat a loop's body until it leaves the loop, for at most ``deadline_s``."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        yield
        time.sleep(every_s)


def wait_until_written(path: Path) -> str:
    for _ in until():
        if path.exists() and path.read_text():
            return path.read_text()
    raise AssertionError(f"{path} was not written")


def is_running(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def make_payload(folder: Path, modules: Sequence[str] = ()) -> Path:
    """A small payload tree: the agent as it is, and the named test modules."""
    tree = folder / "payload"
    tree.mkdir(parents=True)
    for name in ("__init__.py", "errors.py"):
        shutil.copy(PAYLOAD / name, tree / name)
    shutil.copytree(PAYLOAD / "agent", tree / "agent", ignore=shutil.ignore_patterns("__pycache__"))
    for name in modules:
        lines = MODULES[name].splitlines()
        (tree / f"{name}.py").write_text("\n".join(line[8:] for line in lines) + "\n")
    return tree


def make_container(folder: Path, python: str = sys.executable) -> FakeContainer:
    """A container that has a release and a venv."""
    root = folder / "opt" / "dflash"
    (root / "incoming").mkdir(parents=True)
    tree = make_payload(folder / "desk", tuple(MODULES))
    release = tree_hash(tree)
    shutil.copytree(tree, root / "releases" / release / "payload")
    (root / "current").symlink_to(f"releases/{release}")
    bin_folder = root / "venvs" / VENV / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").symlink_to(Path(sys.executable).resolve())
    (root / "venv").symlink_to(f"venvs/{VENV}")
    return FakeContainer(root, release, python)


def upload(container: FakeContainer, tree: Path, name: str = "upload.zip") -> tuple[Path, dict[str, Any]]:
    """Put an archive of ``tree`` where the controller puts it; returns it with the fields of `receive`."""
    archive = container.root / "incoming" / name
    release, sha256, size = build_archive(tree, archive)
    return archive, {"release": release, "sha256": sha256, "size": size}
