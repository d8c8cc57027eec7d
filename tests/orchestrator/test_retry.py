"""What may be done twice is tried again after a broken link, as long as it gets on, and a person is told."""

from __future__ import annotations

import pytest

from orchestrator import retry
from orchestrator.errors import LinkLost, TransportError
from orchestrator.retry import ATTEMPTS_WITHOUT_PROGRESS, repeat


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_LONGEST_WAIT_S", 0.01)


def test_it_is_tried_again_until_it_succeeds_and_each_wait_says_why() -> None:
    outcomes = [LinkLost("the link to lab broke."), LinkLost("lab fell silent."), "done"]
    told: list[str] = []

    def work() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, LinkLost):
            raise outcome
        return outcome

    assert repeat(work, "to deploy", told.append) == "done"
    assert [text.split(" Trying again to deploy in ")[0] for text in told] == [
        "the link to lab broke.",
        "lab fell silent.",
    ]


def test_without_progress_it_is_given_up_with_the_last_error() -> None:
    tries: list[int] = []

    def work() -> None:
        tries.append(1)
        raise LinkLost(f"try {len(tries)}")

    with pytest.raises(LinkLost, match=f"try {ATTEMPTS_WITHOUT_PROGRESS}"):
        repeat(work, "", lambda _: None)


def test_with_progress_it_goes_on_for_as_long_as_it_takes() -> None:
    come: list[int] = []

    def work() -> int:
        come.append(1)
        if len(come) < 20:
            raise LinkLost("again")
        return len(come)

    assert repeat(work, "", lambda _: None, progress=lambda: len(come)) == 20


def test_what_is_no_broken_link_is_not_repeated() -> None:
    tries: list[int] = []

    def work() -> None:
        tries.append(1)
        raise TransportError("the container is stopped")

    with pytest.raises(TransportError):
        repeat(work, "", lambda _: None)
    assert len(tries) == 1
