"""What comes from a container is not believed: an answer that is none of what was asked is an error in words.

Real answers of the embedded node are replayed to whole commands, each with one part of it replaced or taken out.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator import cli_build, cli_cache, cli_estimate, cli_evaluate, cli_fleet, cli_run, cli_script
from orchestrator.agent import ISOLATED, LINE_LIMIT_BYTES, Agent, _Replies
from orchestrator.answers import NotUnderstood
from orchestrator.command import Completed
from orchestrator.connection import Connection
from orchestrator.console import Console
from orchestrator.container import Container
from orchestrator.deploy import Archive, deploy
from orchestrator.errors import OrchestratorError, TransportError
from orchestrator.inventory import Destination, load_inventory
from orchestrator.localnode.node import NodeInfo
from payload.recipe import load_recipe
from tests.program_runs import VENV, spec

RUN = "20260101-000000-abcdef"
CACHE = "0123456789abcdef"
SCRIPT = b64encode(b"#!/bin/sh\necho hi\n").decode()
Answers = dict[str, list[Any]]
"""By what was asked, the messages that came: events, then the final one."""
Command = Callable[[str, Answers], tuple[set[str], OrchestratorError | None]]

# Those that need torch or a warm cache, as they were once.
FROM_TORCH: Answers = {
    "venv": [
        {"event": "progress", "message": "verifying", "done": 1, "total": 2},
        {"result": {"venv": VENV, "present": True, "created": True, "torch": {"version": "2.13.0+cpu", "git": "5811"}}},
    ],
    "payload.probe": [
        {"result": {"python": {"version": "3.12.3"}, "torch": {"cuda": None, "flags": [1, 2]}, "devices": []}}
    ],
    "payload.compile.warmup": [
        {"event": "note", "message": "compiling"},
        {
            "result": {
                "compiled": True,
                "warm": True,
                "reason": "by the C++ compiler /usr/bin/g++",
                "fingerprint": CACHE,
                "seconds": 45.9,
                "hits": 2,
                "misses": 0,
                "programs": [],
                "artifact": {"path": f"/opt/dflash/cache/{CACHE}/artifact.bin", "bytes": 5, "sha256": "0" * 64},
                "source": "compiled",
            }
        },
    ],
    "payload.evaluate": [
        {"event": "progress", "message": "decoding the prompts", "done": 1, "total": 16},
        {
            "result": {
                "accepted_length": 4.05,
                "accepted_by_position": [0.9, 0.7],
                "prompts": 16,
                "tokens": 512,
                "target_forwards": 126,
                "seconds": 1.5,
                "plain_seconds": 1.9,
                "speedup": 1.24,
                "identical": 16,
                "drafter": f"/opt/dflash/runs/{RUN}/checkpoints/step-000300/drafter",
                "temperature": 0.0,
            }
        },
    ],
    "payload.compile.manage verify": [
        {"result": {"fingerprint": CACHE, "whole": False, "wrong": ["artifact.bin is missing"]}}
    ],
    "payload.compile.manage list": [
        {
            "result": {
                "caches": [
                    {
                        "fingerprint": CACHE,
                        "bytes": 5000,
                        "warm": True,
                        "problem": "",
                        "pinned_by": [RUN],
                        "created_at": 1764513000.5,
                        "facts": {"torch": "2.13.0"},
                    }
                ]
            }
        }
    ],
}  # fmt: skip

# Nobody holds a lock, and no GPU is there, when the others are recorded.
LOCK = {"name": "venv", "age_s": 3.5, "verb": "venv", "holder": "ann@desk", "pid": 77}
GPU = {"index": 0, "name": "H200", "memory_used_mib": 5.0, "power_w": None}

COMMANDS: dict[str, Callable[..., object]] = {
    "deploy": cli_fleet.deploy,
    "status": cli_fleet.status,
    "status --json": lambda **place: cli_fleet.status(as_json=True, **place),
    "status of many": lambda **place: cli_fleet.status(everything=True, **place),
    "doctor": cli_fleet.doctor,
    "venv": lambda **place: cli_build.venv(force=True, **place),
    "warmup": cli_build.warmup,
    "train": lambda **place: cli_run.train(detach=True, **place),
    "train --resume": lambda **place: cli_run.train(detach=True, resume=RUN, **place),
    "logs": lambda **place: cli_run.logs(follow=True, **place),
    "stop": lambda **place: cli_run.stop(run=RUN, **place),
    "fetch": lambda **place: cli_run.fetch(to=Path("home"), **place),
    "evaluate": cli_evaluate.evaluate,
    "estimate": cli_estimate.estimate,
    "probe": cli_build.probe,
    "script": lambda **place: cli_script.script(file=Path("script"), **place),
    "prune": lambda **place: cli_build.prune(keep_runs=0, data=["all"], apply=True, **place),
    "locks": cli_build.locks,
    "cache list": cli_cache.cache_list,
    "cache show": lambda **place: cli_cache.cache_show(CACHE, **place),
    "cache verify": lambda **place: cli_cache.cache_verify(CACHE, **place),
    "cache prune": cli_cache.cache_prune,
}


class Recorder(Container):
    """A container whose agent's messages are kept."""

    def __init__(self, connection: Connection, destination: Destination) -> None:
        super().__init__(connection, destination)
        self.answers: Answers = {}

    def run(self, argv: Sequence[str | bytes], **options: Any) -> Completed:
        came = bytearray()
        on_stdout = options.pop("on_stdout", None)
        if on_stdout is None:
            return super().run(argv, **options)

        def take(data: bytes) -> None:
            came.extend(data)
            on_stdout(data)

        done = super().run(argv, on_stdout=take, **options)
        if ISOLATED[0] in argv:
            messages = [json.loads(line) for line in came.splitlines()]
            self.answers[asked(argv, options["stdin"])] = [
                {name: part for name, part in message.items() if name != "nonce"} for message in messages
            ]
        return done


class Player(Container):
    """A container whose agent answers as was recorded; files reach it and come from it as they should."""

    answers: Answers
    questions: set[str]

    def run(self, argv: Sequence[str | bytes], **options: Any) -> Completed:
        output = b""
        if ISOLATED[0] in argv:
            question = asked(argv, options["stdin"])
            self.questions.add(question)
            nonce = json.loads(options["stdin"])["nonce"]
            for message in self.answers[question]:
                whole = {"nonce": nonce, **message} if isinstance(message, dict) else message
                options["on_stdout"](json.dumps(whole).encode() + b"\n")
        elif argv[0] == "cat":
            output = json.dumps({"recipe": load_recipe("tiny-cpu").to_dict()}).encode()
        return Completed("", 0, output, b"")

    def upload(self, *_: Any, **__: Any) -> None: ...

    def send(self, *_: Any, **__: Any) -> None: ...

    def download(self, *_: Any, **__: Any) -> None: ...

    def sha256(self, *_: Any, **__: Any) -> None: ...


def asked(argv: Sequence[str | bytes], stdin: bytes) -> str:
    """The verb, or the module with its action."""
    request = json.loads(stdin)
    action = request["request"].get("action") if "module" in request else None
    return " ".join(filter(None, (str(request.get("module", argv[-1])), action)))


@pytest.fixture(scope="module")
def recorded(destination: Destination, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What the agent of the embedded node really answers, in a root of its own."""
    root = tmp_path_factory.mktemp("recorded") / "root"
    there = replace(destination, container=replace(destination.container, root=str(root)))
    with Connection("local", there.host) as connection, Console(quiet=True).step("deploy") as report:
        recorder = Recorder(connection, there)
        agent = Agent.of_release(recorder, deploy(recorder, report).release)
        venv = root / "venvs" / VENV
        venv.mkdir(parents=True)
        for part in Path(sys.prefix).iterdir():
            (venv / part.name).symlink_to(part)
        (root / "venv").symlink_to(f"venvs/{VENV}")
        program = "print('said'); open('metrics.jsonl', 'w').write('{\"loss\": 1.5, \"step\": 7}\\n')"
        recipe = load_recipe("tiny-cpu").to_dict()
        agent.call("start", {"run_id": RUN, "spec": spec(RUN, program, recipe=recipe)})
        agent.call("logs", {"run_id": RUN, "follow": True})
        (root / f"runs/{RUN}/checkpoints/step-000100").mkdir()
        (root / f"runs/{RUN}/checkpoints/step-000100/manifest.json").touch()
        (root / "cache" / CACHE).mkdir(parents=True)
        (root / "packed/x").mkdir(parents=True)
        (root / f"runs/{RUN}/data.json").write_text('{"names": {"packed": "x"}, "complete": true}')
        for verb, request in (
            ("hello", {}),
            ("facts", {"paths": ["data/x"]}),
            ("status", {}),
            ("stop", {"run_id": RUN}),
            ("files", {"run_id": RUN}),
            ("locks", {}),
            ("script", {"name": "x", "content": SCRIPT, "sha256": hashlib.sha256(b64decode(SCRIPT)).hexdigest()}),
            ("remove_runs", {"keep": 0, "apply": False}),
            ("remove_data", {"kinds": ["packed"], "apply": False}),
            ("prune", {"keep": 9}),
            *(
                ("call", {"module": "payload.compile.manage", "request": {"action": action, "fingerprint": CACHE}})
                for action in ("show", "prune")
            ),
            ("call", {"module": "payload.estimate", "request": {"recipe": recipe}}),
        ):  # fmt: skip
            agent.call(verb, request)
    answers = {**recorder.answers, **FROM_TORCH}
    answers["locks"][-1]["result"]["locks"].append(LOCK)
    answers["status"][-1]["result"]["gpus"].append(GPU)
    return answers


@pytest.fixture
def command(local_node: NodeInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command of :data:`COMMANDS` with these answers, and returns what it asked for, and its error in words."""
    known = load_inventory(local_node.inventory)
    (tmp_path / "script").write_text("#!/bin/sh\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr("orchestrator.cli_options.load_inventory", lambda _: known)
    monkeypatch.setattr("orchestrator.cli_fleet.load_inventory", lambda _: known)
    monkeypatch.setattr("orchestrator.deploy.tree_hash", lambda _: "0" * 16)
    monkeypatch.setattr("orchestrator.deploy.Payload.archive", lambda _: Archive("0" * 16, b"", ""))
    # What the desk has none of for a machine of that name would be fetched.
    monkeypatch.setattr("orchestrator.venv.download_uv", lambda *_: tmp_path / "script")

    @contextlib.contextmanager
    def connection(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(
            name="local",
            notify=lambda _: None,
            open=lambda: None,
            run=lambda *_, **__: Completed("", 0, b"status: running", b""),
        )

    def run(name: str, answers: Answers) -> tuple[set[str], OrchestratorError | None]:
        questions: set[str] = set()

        def player(link: Any, destination: Destination) -> Player:
            made = Player(link, destination)
            made.answers, made.questions = answers, questions
            return made

        for module in ("cli_options", "fleet"):
            monkeypatch.setattr(f"orchestrator.{module}.Connection", connection)
            monkeypatch.setattr(f"orchestrator.{module}.Container", player)
        try:
            COMMANDS[name](host="local", ct="200", inventory=local_node.inventory)
        except OrchestratorError as error:
            return questions, error
        return questions, None

    return run


TAKEN_OUT = object()
ODD = [
    *(None, True, False, 0, -1, 1.5, math.nan, math.inf, -math.inf, 1e300, 10**30, 10**400, -(10**400)),
    *("", "x", "7", "..", "../../x", "/etc/x", "a\0b", "a\nb", "\ud800", "%%%", "x" * 5000),
    *([], [[]], [None], [7], ["x"], [{}], {}, {"": {}}, {"a": {"b": [1]}}, {"\ud800": None}),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of a value."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*above, key)
        if isinstance(part, dict | list):
            yield from places(part, (*above, key))


def changed(answers: Answers, place: tuple[Any, ...], odd: Any) -> Answers:
    whole = copy.deepcopy(answers)
    *way, last = place
    part: Any = whole
    for key in way:
        part = part[key]
    if odd is TAKEN_OUT:
        del part[last]
    else:
        part[last] = odd
    return whole


@pytest.mark.parametrize("name", COMMANDS)
def test_whatever_part_of_an_answer_is_another_a_command_ends_well_or_with_an_error_in_words(
    recorded: Answers, command: Command, name: str
) -> None:
    questions, error = command(name, recorded)
    # That of a damaged cache: what it is to tell.
    assert error is None or name == "cache verify", error
    asked_for = {question: recorded[question] for question in sorted(questions)}

    # Each message, and every part of it: not the list of messages itself.
    parts = [place for place in places(asked_for) if len(place) > 1]

    @given(st.sampled_from(parts), st.just(TAKEN_OUT) | st.sampled_from(ODD) | JSON)
    @settings(max_examples=60, deadline=2000, suppress_health_check=list(HealthCheck), database=None)
    def check(place: tuple[Any, ...], odd: Any) -> None:
        command(name, changed(recorded, place, odd))

    check()


@pytest.mark.parametrize(
    ("name", "place", "odd", "told"),
    [
        ("status", ("status", "runs"), {}, "its answer to `status` is not understood: runs is an object, not a list"),
        ("status", ("status", "runs", 0, "started_at"), [], "runs[0].started_at is a list, not a number"),
        ("status", ("status", "runs", 0, "log_bytes"), 1.5, "runs[0].log_bytes is no whole number"),
        ("status", ("status", "runs", 0, "state"), TAKEN_OUT, "runs[0].state is missing"),
        ("estimate", ("payload.estimate", "estimates", 0, "terms", "x\n"), "7", "terms['x\\n'] is text, not a number"),
        ("prune", ("prune", "removed", 0), None, "removed[0] is null, not text"),
        ("cache list", ("payload.compile.manage list", "caches", 0, "bytes"), 10**30, "bytes is a number of too many"),
        ("cache list", ("payload.compile.manage list", "caches", 0, "created_at"), 1e300, "is no moment since 1970"),
        ("fetch", ("files", "files", 0, "sha256"), "../x", "files[0].sha256 is no SHA-256: '../x'"),
        ("venv", ("facts", "machine"), "../x", "machine is no name of a machine: '../x'"),
        ("script", ("script", "exit_status"), True, "exit_status is true or false, not a number"),
    ],
)  # fmt: skip
def test_the_part_that_is_not_understood_is_named_and_what_to_type(
    recorded: Answers, command: Command, name: str, place: tuple[Any, ...], odd: Any, told: str
) -> None:
    question, *way = place
    answers = copy.deepcopy(recorded)
    answers["prune"][-1]["result"]["removed"].append("releases/x")
    _, error = command(name, changed(answers, (question, -1, "result", *way), odd))
    assert isinstance(error, NotUnderstood)
    assert told in error.message
    assert error.message.startswith("container 200 on local: ")
    assert error.hint.startswith("make deploy HOST=local CT=200")
    assert error.exit_status == 1


@pytest.mark.parametrize(
    ("name", "question", "event"),
    [
        ("logs", "logs", {"offset": 0, "data": "%%%"}),
        ("logs", "logs", {"offset": "x", "data": ""}),
        ("logs", "logs", {"offset": 0}),
        ("script", "script", {"stream": "stdout", "data": "a"}),
    ],
)
def test_a_piece_of_output_that_is_none_is_an_error_in_words(
    recorded: Answers, command: Command, name: str, question: str, event: dict[str, Any]
) -> None:
    answers = copy.deepcopy(recorded)
    answers[question][0] = {"event": answers[question][0]["event"], "run_id": RUN, **event}
    assert isinstance(command(name, answers)[1], NotUnderstood)


def test_an_agent_of_another_version_that_tells_more_is_understood(
    recorded: Answers, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = copy.deepcopy(recorded)
    for message in answers["status"]:
        message["more"] = message["result"]["more"] = message["result"]["runs"][0]["more"] = [{"deep": 1}]
    assert command("status --json", answers)[1] is None
    assert json.loads(capsys.readouterr().out)["runs"][0]["more"] == [{"deep": 1}]


def test_an_older_agent_that_tells_of_a_run_only_its_state_is_understood(
    recorded: Answers, command: Command
) -> None:
    runs = [{"run_id": RUN, "state": "finished"}]
    assert command("status", {**recorded, "status": [{"result": {"runs": runs}}]})[1] is None


def replies_to(*lines: bytes) -> _Replies:
    replies = _Replies("n1", lambda _: None)
    for line in lines:
        replies.feed(line + b"\n")
    return replies


def test_only_the_first_answer_with_the_requests_nonce_counts() -> None:
    replies = replies_to(
        b'{"nonce": "n2", "result": {"from": "another"}}',
        b"\xff not JSON",
        b'{"nonce": "n1", "result": {"from": "this"}}',
        b'{"nonce": "n1", "error": {"message": "too late"}}',
    )
    assert replies.result == {"from": "this"}
    assert replies.error is None


@pytest.mark.parametrize("opening", ['{"a": ', "["])
def test_an_answer_that_nests_deeper_than_any_is_none(opening: str) -> None:
    closing = "}" if opening[0] == "{" else "]"
    deep = f'{{"nonce": "n1", "result": {{"a": {opening * 100}1{closing * 100}}}}}'
    assert replies_to(deep.encode()).result is None


def test_a_line_without_end_is_given_up() -> None:
    replies = _Replies("n1", lambda _: None)
    replies.feed(b"x" * LINE_LIMIT_BYTES)
    with pytest.raises(TransportError, match="a line of more than 8 MiB"):
        replies.feed(b"x")
