"""The same step on many containers at once: one connection a host, a bounded number of commands on each.

A host that does not answer costs its own containers only, and no longer than it takes to say so.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from orchestrator.connection import MOST_SESSIONS, Connection
from orchestrator.container import Container
from orchestrator.errors import OrchestratorError
from orchestrator.inventory import Destination

MOST_HOSTS = 32
"""Hosts that are worked on at a time."""
SILENT_HOST_S = 5.0
"""How long a host may stay silent while one connects, in a command that has others to ask."""

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a step came to on one container: its result or its error, and the seconds that it took."""

    destination: Destination
    result: T | None
    error: OrchestratorError | None
    seconds: float


class FleetError(OrchestratorError):
    """Some of several containers failed; the exit status is the worst among theirs."""

    def __init__(self, message: str, hint: str, exit_status: int) -> None:
        super().__init__(message, hint)
        self.exit_status = exit_status


def on_each(
    destinations: Sequence[Destination],
    work: Callable[[Container], T],
    notify: Callable[[str], None] = lambda _: None,
) -> Iterator[Outcome[T]]:
    """Run ``work`` on each container and yield the outcomes as they come.

    At most :data:`MOST_HOSTS` hosts at a time, each over one connection with at most eight commands on it, so within
    what sshd allows by default (MaxStartups 10:30:100, MaxSessions 10). A caller that stops early leaves nobody
    behind but what is under way.
    """
    by_host: dict[str, list[Destination]] = {}
    for destination in destinations:
        by_host.setdefault(destination.host_name, []).append(destination)
    outcomes: queue.SimpleQueue[Outcome[T] | BaseException] = queue.SimpleQueue()
    hosts: queue.SimpleQueue[list[Destination]] = queue.SimpleQueue()
    for group in by_host.values():
        hosts.put(group)
    stopped = threading.Event()

    def serve_hosts() -> None:
        while not stopped.is_set():
            try:
                group = hosts.get_nowait()
            except queue.Empty:
                return
            try:
                _on_host(group, work, notify, outcomes.put, stopped)
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                outcomes.put(error)

    for _ in range(min(MOST_HOSTS, len(by_host))):
        threading.Thread(target=serve_hosts, name="host", daemon=True).start()
    try:
        for _ in destinations:
            outcome = outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome
    finally:
        stopped.set()


def _on_host(
    group: list[Destination],
    work: Callable[[Container], T],
    notify: Callable[[str], None],
    report: Callable[[Outcome[T] | BaseException], None],
    stopped: threading.Event,
) -> None:
    """Do the work on all containers of one host, over one connection."""
    began = time.monotonic()
    settings = group[0].host
    patient = dataclasses.replace(settings, connect_timeout_s=min(settings.connect_timeout_s, SILENT_HOST_S))
    with Connection(group[0].host_name, patient, notify) as connection:
        try:
            connection.open()
        except OrchestratorError as error:
            for destination in group:
                report(Outcome(destination, None, error, time.monotonic() - began))
            return
        waiting: queue.SimpleQueue[Destination] = queue.SimpleQueue()
        for destination in group:
            waiting.put(destination)

        def serve() -> None:
            while not stopped.is_set():
                try:
                    destination = waiting.get_nowait()
                except queue.Empty:
                    return
                report(_on_container(Container(connection, destination), work))

        workers = [
            threading.Thread(target=serve, name=f"{connection.name} {number}", daemon=True)
            for number in range(min(MOST_SESSIONS, len(group)))
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


def _on_container(container: Container, work: Callable[[Container], T]) -> Outcome[T] | BaseException:
    began = time.monotonic()
    try:
        return Outcome(container.destination, work(container), None, time.monotonic() - began)
    except OrchestratorError as error:
        return Outcome(container.destination, None, error, time.monotonic() - began)
    except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
        return error


def failure(outcomes: Sequence[Outcome[T]], what: str) -> FleetError | None:
    """The error that says which of several containers failed, and why; None when none did."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if not failed:
        return None
    places: dict[tuple[str, str], list[str]] = {}
    for outcome in failed:
        assert outcome.error is not None
        places.setdefault((outcome.error.message, outcome.error.hint), []).append(str(outcome.destination))
    shown = [f"{message} ({_places(where)})" for (message, _), where in list(places.items())[:3]]
    rest = len(places) - len(shown)
    hints = dict.fromkeys(hint for _, hint in places if hint)
    return FleetError(
        f"{what} failed on {len(failed)} of {len(outcomes)} containers: {' '.join(shown)}"
        + (f" And {rest} more reasons." if rest > 0 else ""),
        "\n".join(list(hints)[:3]),
        max(outcome.error.exit_status for outcome in failed if outcome.error is not None),
    )


def _places(where: list[str]) -> str:
    return ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
