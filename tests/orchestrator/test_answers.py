"""What comes from a container is not believed: an answer that is broken or lacks something is an error in words."""

from __future__ import annotations

from typing import Any, cast

import pytest

from orchestrator.agent import LINE_LIMIT_BYTES, Agent, _Replies
from orchestrator.errors import RemoteError, TransportError
from orchestrator.logs import show_logs


def replies_to(*lines: bytes) -> _Replies:
    replies = _Replies("n1", lambda _: None)
    for line in lines:
        replies.feed(line + b"\n")
    return replies


def test_what_an_answer_lacks_is_named() -> None:
    answer = replies_to(b'{"nonce": "n1", "result": {"runs": []}}').result
    assert answer is not None
    assert answer["runs"] == []
    with pytest.raises(RemoteError, match="lacks 'venv'"):
        answer["venv"]


def test_only_the_first_answer_with_the_requests_nonce_counts() -> None:
    replies = replies_to(
        b'{"nonce": "n2", "result": {"from": "another"}}',
        b"\xff not JSON",
        b'{"nonce": "n1", "result": {"from": "this"}}',
        b'{"nonce": "n1", "error": {"message": "too late"}}',
    )
    assert replies.result == {"from": "this"}
    assert replies.error is None


def test_a_line_without_end_is_given_up() -> None:
    replies = _Replies("n1", lambda _: None)
    replies.feed(b"x" * LINE_LIMIT_BYTES)
    with pytest.raises(TransportError, match="a line of more than 8 MiB"):
        replies.feed(b"x")


@pytest.mark.parametrize(
    "event", [{"offset": 0, "data": "%%%"}, {"offset": "x", "data": ""}, {"offset": 0}, {"data": ""}]
)
def test_a_piece_of_a_log_that_is_none_is_an_error_in_words(event: dict[str, Any]) -> None:
    class Forger:
        def call(self, verb: str, request: object, *, on_event: Any, **_: object) -> None:
            on_event({"event": "log", **event})

    with pytest.raises(RemoteError, match="A piece of the log cannot be read"):
        show_logs(cast(Agent, Forger()), lambda _: None)
