"""Where a venv's packages come from: indexes, pages of links and folders; what is secret of them stays so."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uv

from payload.agent.pins import TorchPin, requirement_lines
from payload.agent.redaction import redact
from payload.errors import PayloadError
from tests.payload.agent.container import VENV, FakeContainer
from tests.payload.agent.venvs import PIN, in_use, is_clean, request
from tests.payload.agent.wheels import make_index, make_torch, make_wheel


def test_a_package_that_cannot_be_had_leaves_the_venv_in_use(container: FakeContainer, wheels: Path) -> None:
    error = container.error("venv", **request(wheels, requirements="absent==1.0"))
    assert error["kind"] == "failed"
    assert "absent" in error["message"]
    assert in_use(container) == VENV
    assert is_clean(container)


def test_torch_comes_from_its_own_index_and_from_no_other(container: FakeContainer, tmp_path: Path) -> None:
    own = make_index(tmp_path / "own" / "cu128", [make_torch(tmp_path / "1")])
    tempting = make_torch(tmp_path / "2", version="2.11.0", cuda="13.0", git="bad")
    newer = make_torch(tmp_path / "3", version="2.11.0+cu130", cuda="13.0", git="bad")
    needy = make_wheel(tmp_path / "4", "needy", "1.0", {"needy.py": "import torch\n"}, requires=("torch>=2",))
    common = make_index(tmp_path / "common", [tempting, newer, needy])
    asked = request(None, torch={"version": "2.11.0", "index_url": own}, index={"index_url": common})
    built = container.result("venv", **asked)
    assert built["torch"] == {"version": "2.11.0+cu128", "cuda": "12.8", "git": "70d99e998b" + "0" * 30}


def test_extra_indexes_and_find_links_are_honoured(container: FakeContainer, tmp_path: Path) -> None:
    main = make_index(tmp_path / "main", [make_wheel(tmp_path / "1", "needy", "0.9", {"needy.py": ""})])
    extra = make_index(tmp_path / "extra", [make_wheel(tmp_path / "2", "needy", "1.0", {"needy.py": ""})])
    make_torch(tmp_path / "links")
    index = {"index_url": main, "extra_index_urls": [extra], "find_links": [str(tmp_path / "links")]}
    assert container.result("venv", **request(None, index=index))["packages"]["needy"] == "1.0"


@pytest.fixture
def private_links(tmp_path: Path) -> Iterator[str]:
    """The URL, with its password, of a page on the loopback that lists the wheels only to who has the password."""
    folder = tmp_path / "private"
    make_torch(folder)
    make_wheel(folder, "needy", "1.0", {"needy.py": ""})

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def do_GET(self) -> None:
            if self.headers["Authorization"] == f"Basic {base64.b64encode(b'ann:pa55').decode()}":
                super().do_GET()
            else:
                self.send_error(401)

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://ann:pa55@127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def recording_uv(folder: Path) -> Path:
    """A uv that writes its arguments to ``folder/argv`` before it does its work."""
    program = folder / "recording-uv"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/argv"\nexec "{uv.find_uv_bin()}" "$@"\n')
    program.chmod(0o755)
    return program


def test_the_password_of_a_page_of_links_is_in_no_argument_and_in_no_file(
    container: FakeContainer, tmp_path: Path, private_links: str
) -> None:
    index = {"index_url": make_index(tmp_path / "empty", []), "find_links": [private_links]}
    reply = container.ask("venv", **request(None, uv=str(recording_uv(tmp_path)), index=index))
    assert reply.result is not None, reply
    assert reply.result["packages"]["needy"] == "1.0"
    assert "pip install" in (tmp_path / "argv").read_text()
    assert "pa55" not in (tmp_path / "argv").read_text()
    assert "pa55" not in json.dumps(reply.events)
    made = [path for path in container.root.rglob("*") if path.is_file()]
    assert not [path for path in made if b"pa55" in path.read_bytes()]


def test_the_password_of_a_requirement_s_url_is_in_no_argument_and_in_no_file(
    container: FakeContainer, tmp_path: Path, private_links: str
) -> None:
    index = {"index_url": make_index(tmp_path / "empty", []), "find_links": [private_links]}
    line = f"needy @ {private_links}needy-1.0-py3-none-any.whl\n"
    asked = request(None, uv=str(recording_uv(tmp_path)), requirements=line, index=index)
    reply = container.ask("venv", **asked)
    assert reply.result is not None, reply
    assert reply.result["packages"]["needy"] == "1.0"
    assert "pa55" not in (tmp_path / "argv").read_text()
    assert "pa55" not in json.dumps(reply.events)
    made = [path for path in container.root.rglob("*") if path.is_file()]
    assert not [path for path in made if b"pa55" in path.read_bytes()]
    changed = container.ask("venv", **{**asked, "requirements": line.replace("pa55", "other"), "check": True})
    assert changed.result is not None
    assert changed.result["venv"] == reply.result["venv"], "a new password is no new venv"


def test_folders_of_wheels_may_have_any_name(container: FakeContainer, tmp_path: Path) -> None:
    first, second = tmp_path / "a, b%2C c", tmp_path / "d,é"
    make_torch(first)
    make_wheel(second, "needy", "1.0", {"needy.py": ""})
    index = {"find_links": [str(first), str(second)], "offline": True}
    assert container.result("venv", **request(None, index=index))["packages"]["needy"] == "1.0"
    make_wheel(first, "needy", "1.1", {"needy.py": ""})
    newer = container.result("venv", **request(first, requirements="needy==1.1"))
    assert newer["packages"]["needy"] == "1.1"


def test_a_new_password_of_torch_s_index_is_neither_stored_nor_a_new_venv(
    container: FakeContainer, wheels: Path
) -> None:
    def asked(password: str) -> dict[str, Any]:
        return request(wheels, torch={**PIN, "index_url": f"https://ann:{password}@wheels.test/cu128"})

    first = container.result("venv", **asked("pa55"))
    again = container.result("venv", **asked("w@rd"))
    assert not again["created"]
    assert again["venv"] == first["venv"]
    container.result("venv", **{**asked("w@rd"), "force": True})
    record = (container.root / "venvs" / first["venv"] / "venv.json").read_text()
    assert "https://***@wheels.test/cu128" in record
    assert "pa55" not in record
    assert "rd@" not in record


def test_passwords_in_urls_are_not_shown() -> None:
    assert redact("error: https://me:pa55@host/simple/x failed") == "error: https://***@host/simple/x failed"
    assert redact("https://me:p@55@host https://host/x@1") == "https://***@host https://host/x@1"
    with pytest.raises(PayloadError) as raised:
        TorchPin.from_request({"version": "", "index_url": "https://me:pa55@host/"})
    assert "pa55" not in raised.value.message


@pytest.mark.parametrize("text", ["-r other.txt", "--index-url x\nneedy==1"])
def test_options_among_the_requirements_are_refused(text: str) -> None:
    with pytest.raises(PayloadError, match="option"):
        requirement_lines(text)
