"""Nobody is trusted unasked: not a host key, not a name or path, not an answer; and no secret is where others look."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.errors import RemoteError, TransportError, UsageError
from tests.faulty_link import FaultyLink
from tests.lxc import sshd
from tests.lxc.bed import PRIVILEGED, Bed
from tests.lxc.desk import Desk
from tests.lxc.jobs import until
from tests.lxc.lxc import Lxc

TOKEN = "hf_a7c0de5ecre7"
PASSWORD = "pa55w0rd"
# An agent that may answer anything: `mode` says what, and the request's own nonce is $NONCE.
HOSTILE = r"""#!/usr/bin/python3
import json, sys
nonce = json.loads(sys.stdin.readline())["nonce"]
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
mode, verb = open("/opt/hostile/mode").read().strip(), sys.argv[-1]
def say(**fields):
    print(json.dumps({"nonce": nonce, **fields}), flush=True)
if mode == "escapes":
    say(event="note", message="\x1b]0;owned\x07\x1b[2J\x9b31mnote")
    say(error={"kind": "failed", "message": "\x1b[2J\x1b[1;1Hno error", "hint": "\x1b]52;c;b3duZWQ=\x07\x1bPhint"})
elif mode == "one endless line":
    while True:
        sys.stdout.write("x" * 65536)
elif mode == "noise":
    for _ in range(200_000):
        print("noise", file=sys.stderr)
elif mode == "another nonce":
    nonce = "0" * 32
    say(result={"runs": [], "release": "forged", "venv": "forged", "files": []})
elif mode == "nothing":
    pass
elif mode == "half an answer":
    sys.stdout.write(json.dumps({"nonce": nonce, "result": {"runs": []}})[:-5])
elif mode == "an empty answer":
    say(result={})
elif mode == "no log":
    say(event="log", offset=0, data="%%% no base64")
    say(result={"run_id": "x", "state": "finished", "offset": 0})
elif mode == "paths":
    files = [{"path": path, "size": 1, "sha256": "0" * 64} for path in ("../../../escaped",)]
    say(result={"files": files, "runs": [{"run_id": "20260101-000000-abcdef", "state": "finished"}]})
elif mode == "run ids":
    files = [{"path": "authorized_keys", "size": 0, "sha256": EMPTY}]
    say(result={"files": files, "runs": [{"run_id": "../../opt/hostile", "state": "finished"}]})
"""


@pytest.fixture
def ssh(home: Path) -> Path:
    """The person's own ~/.ssh."""
    return home / ".ssh"


def person(bed: Bed, home: Path, inventory: Callable[..., Path], **host: object) -> Desk:
    """A desk whose inventory names no key and no known_hosts: all is in ~/.ssh, as with ssh itself."""
    unset: dict[str, object] = {"identity_file": None, "known_hosts": None}
    return Desk(home, inventory(host={**unset, **host}), PRIVILEGED)


def fingerprint(key: Path) -> str:
    done = subprocess.run(["ssh-keygen", "-lf", str(key)], capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


def test_an_unknown_host_key_is_shown_and_the_command_to_accept_it_is_the_right_one(
    bed: Bed, home: Path, ssh: Path, inventory: Callable[..., Path], lxc: Lxc
) -> None:
    shutil.copy(bed.sshd.client_key, ssh / "id_ed25519")
    desk = person(bed, home, inventory)
    refused = desk.run("status")
    assert refused.status == TransportError.exit_status
    assert fingerprint(bed.sshd.folder / "host_key.pub") in refused.text
    [command] = re.findall(r"ssh-keyscan .*", refused.text)
    subprocess.run(
        ["sh", "-c", command], env={**os.environ, "HOME": str(home)}, check=True, capture_output=True
    )
    assert desk.run("deploy").status == 0


def test_a_host_key_that_changed_is_refused_with_both_and_the_command_to_forget_the_old_one(
    bed: Bed, home: Path, ssh: Path, inventory: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copy(bed.sshd.client_key, ssh / "id_ed25519")
    sshd.make_key(tmp_path / "old")
    line = bed.sshd.known_hosts_line()
    old = " ".join((tmp_path / "old.pub").read_text().split()[:2])
    (ssh / "known_hosts").write_text(line.replace(bed.sshd.host_public_key, old))
    desk = person(bed, home, inventory)
    refused = desk.run("status")
    assert refused.status == TransportError.exit_status
    assert "has CHANGED" in refused.text
    assert fingerprint(tmp_path / "old.pub") in refused.text
    assert fingerprint(bed.sshd.folder / "host_key.pub") in refused.text
    [command] = re.findall(r"ssh-keygen .*", refused.text)
    subprocess.run(
        ["sh", "-c", command], env={**os.environ, "HOME": str(home)}, check=True, capture_output=True
    )
    assert "is not known" in desk.run("status").text


def test_keys_names_and_jump_hosts_come_from_ssh_config_and_every_hop_is_strict(
    bed: Bed, home: Path, ssh: Path, inventory: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copy(bed.sshd.client_key, tmp_path / "a-key")
    with FaultyLink(bed.sshd.port) as gate:
        (ssh / "config").write_text(
            f"Host *\n HostName 127.0.0.1\n User root\n IdentityFile {tmp_path}/a-key\n"
            f"Host gate\n Port {gate.port}\n"
            f"Host inside\n Port {bed.sshd.port}\n ProxyJump gate\n"
        )
        desk = person(bed, home, inventory, address="inside", port=None)
        (ssh / "known_hosts").write_text(bed.sshd.known_hosts_line())
        refused = desk.run("status")
        assert refused.status == TransportError.exit_status
        assert f"[127.0.0.1]:{gate.port}" in refused.text, "the gate's key is the unknown one"
        (ssh / "known_hosts").write_text(bed.sshd.known_hosts_line() + bed.sshd.known_hosts_line(gate.port))
        desk.ok("deploy")
        assert gate.connections == 2


def test_a_key_that_only_the_ssh_agent_holds_is_used(
    bed: Bed, home: Path, ssh: Path, inventory: Callable[..., Path], tmp_path: Path
) -> None:
    (ssh / "known_hosts").write_text(bed.sshd.known_hosts_line())
    socket = str(tmp_path / "agent")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        until(Path(socket).exists)
        environment = {**os.environ, "SSH_AUTH_SOCK": socket}
        subprocess.run(
            ["ssh-add", "-q", str(bed.sshd.client_key)], env=environment, check=True, capture_output=True
        )
        desk = person(bed, home, inventory)
        assert "accepts none of your keys" in desk.run("status").text
        with_agent = Desk(home, desk.inventory, PRIVILEGED, {"SSH_AUTH_SOCK": socket})
        with_agent.ok("deploy")
    finally:
        agent.terminate()
        agent.wait()


class Watch:
    """Every command line on the machine, the container's among them, while the block runs."""

    def __enter__(self) -> Watch:
        self.seen: set[bytes] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen.add(path.read_bytes())
                except OSError:
                    continue
            time.sleep(0.03)

    def holds(self, word: str) -> list[bytes]:
        return [line for line in self.seen if word.encode() in line]


def files_with(folder: Path, word: str) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and word.encode() in path.read_bytes()
    ]


def test_a_token_is_only_in_the_jobs_environment_and_in_one_private_file_while_it_runs(
    bed: Bed, home: Path, inventory: Callable[..., Path], lxc: Lxc
) -> None:
    job = (
        "import os, pathlib, time\n"
        f"print(os.environ['HF_TOKEN'] == '{TOKEN[:5]}' + '{TOKEN[5:]}', flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.1)\n"
    )
    root = "/opt/secret"
    desk = Desk(home, inventory(root=root, env={"STANDIN_JOB": job, "HF_TOKEN": TOKEN}), PRIVILEGED)
    with Watch() as watch:
        said = desk.ok("train", "--cold", "--detach", "--anyway").text
        [run] = desk.status()["runs"]
        said += json.dumps(run)
        until(lambda: b"True" in desk.ok("logs", run["run_id"]).stdout)
    inside = lxc.root / root.lstrip("/")
    [secret] = files_with(inside, TOKEN)
    assert secret.parent.name == run["run_id"]
    assert secret.stat().st_mode & 0o777 == 0o600
    (inside / "runs" / run["run_id"] / "go").touch()
    desk.ok("logs", "--follow", run["run_id"])
    assert files_with(inside, TOKEN) == []
    assert files_with(home, TOKEN) == []
    assert TOKEN not in said + bed.sshd.log.read_text()
    assert watch.holds("orchestrator.cli")
    assert watch.holds(TOKEN) == []


def test_the_password_of_an_index_is_in_no_command_line_no_file_and_no_message(
    home: Path, inventory: Callable[..., Path], bed: Bed, lxc: Lxc
) -> None:
    root = "/opt/index"
    index = {"index_url": f"http://ann:{PASSWORD}@127.0.0.1:9/simple", "timeout_s": 2}
    desk = Desk(home, inventory(root=root, index=index), PRIVILEGED)
    with Watch() as watch:
        done = desk.run("venv")
    assert done.status == RemoteError.exit_status
    assert "127.0.0.1:9" in done.text
    assert PASSWORD not in done.text + bed.sshd.log.read_text()
    assert files_with(lxc.root / root.lstrip("/"), PASSWORD) == []
    assert files_with(home, PASSWORD) == []
    assert watch.holds("pip\0install")
    assert watch.holds(PASSWORD) == []


@pytest.mark.parametrize("root", ["/opt/../etc/dflash", "relative/dflash", "/", "/opt"])
def test_a_root_that_is_no_folder_of_its_own_is_refused_before_anything_is_asked(
    home: Path, inventory: Callable[..., Path], root: str
) -> None:
    desk = Desk(home, inventory(root=root), PRIVILEGED)
    done = desk.run("deploy")
    assert done.status == UsageError.exit_status
    assert re.search(r"inventory\.yaml:\d+: .*root", done.text)


def test_words_of_the_inventory_are_words_and_never_commands(
    home: Path, inventory: Callable[..., Path], lxc: Lxc
) -> None:
    root = "/opt/a $(touch /opt/owned) `touch /opt/owned`;touch /opt/owned #'\"\\ é"
    desk = Desk(home, inventory(root=root), PRIVILEGED)
    desk.ok("deploy")
    assert desk.status()["runs"] == []
    assert not Path("/opt/owned").exists()
    assert not (lxc.root / "opt/owned").exists()
    assert (lxc.root / root.lstrip("/") / "current").is_symlink()


@pytest.mark.parametrize(
    ("verb", "run"),
    [("logs", "../../etc"), ("status", "/etc/passwd"), ("stop", ".."), ("fetch", "a/b"), ("logs", "a\nb")],
)
def test_a_run_id_cannot_name_anything_outside_the_runs(desk: Desk, lxc: Lxc, verb: str, run: str) -> None:
    desk.ok("deploy")
    done = desk.run(verb, run)
    assert done.status == UsageError.exit_status, done.text
    assert "Traceback" not in done.text


@pytest.fixture
def hostile(home: Path, inventory: Callable[..., Path], lxc: Lxc) -> Iterator[Callable[[str], Desk]]:
    """A desk at a container whose agent answers as it likes: the mode says how."""
    lxc.run(["mkdir", "-p", "/opt/hostile"])
    lxc.run(["sh", "-c", "cat > /opt/hostile/python && chmod 755 /opt/hostile/python"], stdin=HOSTILE)

    def at(mode: str) -> Desk:
        (lxc.root / "opt/hostile/mode").write_text(mode)
        return Desk(home, inventory(python="/opt/hostile/python"), PRIVILEGED)

    yield at
    lxc.run(["rm", "-r", "/opt/hostile"])


@pytest.mark.parametrize(
    ("mode", "status"),
    [
        ("escapes", RemoteError.exit_status),
        ("one endless line", TransportError.exit_status),
        ("noise", TransportError.exit_status),
        ("another nonce", TransportError.exit_status),
        ("nothing", TransportError.exit_status),
        ("half an answer", TransportError.exit_status),
        ("an empty answer", RemoteError.exit_status),
    ],
)
def test_an_answer_that_is_hostile_or_broken_is_an_error_in_words(
    hostile: Callable[[str], Desk], mode: str, status: int
) -> None:
    done = hostile(mode).run("status", timeout_s=60)
    assert done.status == status, done.text
    assert "Traceback" not in done.text
    assert "forged" not in done.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", done.text)
    assert len(done.text) < 2_000
    assert done.seconds < 30


def test_a_log_that_is_none_is_an_error_in_words(hostile: Callable[[str], Desk]) -> None:
    done = hostile("no log").run("logs")
    assert done.status == RemoteError.exit_status
    assert "its answer to `logs` is not understood" in done.text


def test_a_file_that_is_listed_outside_the_run_is_not_written(
    hostile: Callable[[str], Desk], tmp_path: Path
) -> None:
    done = hostile("paths").run("fetch", "--to", str(tmp_path / "a" / "b"))
    assert done.status == RemoteError.exit_status
    assert "files[0].path is no path of a file in the run" in done.text
    assert not list(tmp_path.rglob("escaped*"))


def test_a_newest_run_whose_id_is_a_way_out_is_not_fetched(
    hostile: Callable[[str], Desk], lxc: Lxc, tmp_path: Path
) -> None:
    lxc.run(["touch", "/opt/hostile/authorized_keys"])
    done = hostile("run ids").run("fetch", "--to", str(tmp_path / "a" / "b"))
    assert done.status == RemoteError.exit_status
    assert "runs[0].run_id is no name of a run: '../../opt/hostile'" in done.text
    assert not list(tmp_path.rglob("authorized_keys"))
    assert not (tmp_path / "a").exists()


def test_nothing_that_the_tool_makes_can_be_changed_by_others(desk: Desk, lxc: Lxc) -> None:
    desk.ok("venv")
    found = lxc.run(["find", "/opt/dflash", "-perm", "/0022", "!", "-type", "l"]).stdout
    assert found == ""
