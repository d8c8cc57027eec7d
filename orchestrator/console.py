"""Everything a person sees: one line per step, progress while it works, tables, log bytes, errors.

Text that comes from a container is shown without its control characters: a terminal must not obey it. rich is
imported where a terminal is: it would take a fifth of the time of a short command in a script.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from orchestrator.errors import OrchestratorError

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress, TaskID

_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_ONE_LINE = str.maketrans("\r\n", "  ")
_PLAIN_PROGRESS_EVERY_S = 5.0


def safe(text: str) -> str:
    """``text`` without terminal escapes and control characters other than newline, tab and carriage return.

    Half a surrogate pair, which no encoding can write, becomes a question mark.
    """
    return _CONTROL.sub("", text).encode("utf-8", errors="replace").decode("utf-8")


def size_text(count: int | None) -> str:
    """A number of bytes for a person; nothing for None."""
    if count is None:
        return ""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


class StepReport:
    """One step's line: what it is doing now, and at the end what came of it."""

    def __init__(self, console: Console, name: str, progress: Progress | None, task: TaskID | None) -> None:
        self._console = console
        self._name = name
        self._progress = progress
        self._task = task
        self._last_plain = time.monotonic()
        self.outcome = ""

    def update(self, message: str, done: int | None = None, total: int | None = None) -> None:
        """Show what is going on; ``done`` of ``total`` in any unit moves the bar."""
        message = safe(message).translate(_ONE_LINE)[:200]
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task, description=f"{self._name:<7} {message}", completed=done or 0, total=total
            )
        elif time.monotonic() - self._last_plain >= _PLAIN_PROGRESS_EVERY_S:
            self._last_plain = time.monotonic()
            share = f" ({100 * done // total}%)" if done is not None and total else ""
            self._console.line(f"  {self._name:<7} … {message}{share}")

    def part_of(self, message: str, before: int, total: int) -> Callable[[int, int], None]:
        """Progress of one part, as (bytes done, bytes of the part), of ``total`` bytes of which ``before`` are done."""
        return lambda done, _: self.update(message, before + done, total)

    def note(self, message: str) -> None:
        """A line that stays."""
        self._console.line(f"  {self._name:<7} {message}")

    def on_event(self, event: dict[str, Any]) -> None:
        """Show an agent's event."""
        if event["event"] == "progress":
            counts = [event.get(name) for name in ("done", "total")]
            counted = all(type(count) is int and 0 <= count < 1 << 63 for count in counts)
            self.update(str(event.get("message", "")), *(counts if counted else ()))
        elif event["event"] == "note":
            self.note(str(event.get("message", "")))


class Console:
    """The terminal, or a plain stream when there is none."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet

    @cached_property
    def out(self) -> RichConsole:
        """Standard output as a terminal."""
        from rich.console import Console as RichConsole

        return RichConsole(highlight=False, soft_wrap=True)

    @cached_property
    def err(self) -> RichConsole:
        """Standard error as a terminal."""
        from rich.console import Console as RichConsole

        return RichConsole(stderr=True, highlight=False, soft_wrap=True)

    def line(self, text: str, style: str | None = None) -> None:
        """A line for a person, on standard error so that standard output stays data."""
        if not self.quiet:
            _print(sys.stderr, lambda: self.err, (text, style))

    def say(self, text: str, style: str | None = None) -> None:
        """A line of the answer itself, on standard output."""
        _print(sys.stdout, lambda: self.out, (text, style))

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[StepReport]:
        """Show a step while it runs, then one line with its outcome and seconds."""
        started = time.monotonic()
        if self.quiet or not _is_terminal(sys.stderr):
            report = StepReport(self, name, None, None)
            yield report
        else:
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(20),
                TimeElapsedColumn(),
            )
            with Progress(*columns, console=self.err, transient=True) as progress:
                report = StepReport(self, name, progress, progress.add_task(name, total=None))
                yield report
        outcome = report.outcome.translate(_ONE_LINE)
        self.line(f"✓ {name:<7} {outcome} ({time.monotonic() - started:.1f} s)")

    def error(self, error: OrchestratorError) -> None:
        """An error as one paragraph: what happened, and what to do next."""
        _print(sys.stderr, lambda: self.err, ("error: ", "bold red"), (error.message, None))
        if error.hint:
            _print(sys.stderr, lambda: self.err, (error.hint, None))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Rows under headings; in a pipe or file as tab-separated lines, so that nothing is cut to a width."""
        texts = [_cells(row) for row in rows]
        widths = [max(len(cell) for cell in column) for column in zip(columns, *texts, strict=False)]
        show = self.open_table(dict(zip(columns, widths, strict=False)))
        for row in texts:
            show(row)

    def open_table(self, columns: Mapping[str, int]) -> Callable[[Sequence[object]], None]:
        """A table whose rows are shown as they come: ``columns`` are headings with their widths in characters.

        Returns what shows a row. In a pipe or file the cells are separated by tabs, and of any length.
        """
        if not _is_terminal(sys.stdout):

            def write(row: Sequence[object]) -> None:
                sys.stdout.write("\t".join(" ".join(cell.split()) for cell in _cells(row)) + "\n")
                sys.stdout.flush()

            write(list(columns))
            return write
        widths = list(columns.values())

        def show(row: Sequence[object]) -> None:
            cells = _cells(row)
            padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
            self.say("  ".join([*padded, *cells[len(widths) :]]).rstrip())

        self.say("  ".join(f"{name:<{width}}" for name, width in columns.items()).rstrip(), "bold")
        return show

    def json(self, value: object) -> None:
        """One JSON value on standard output; a number that JSON has no word for (NaN, an infinity) is null."""
        sys.stdout.write(json.dumps(_finite(value), indent=2, ensure_ascii=True, allow_nan=False) + "\n")
        sys.stdout.flush()


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _cells(row: Sequence[object]) -> list[str]:
    return [safe("" if cell is None else str(cell)) for cell in row]


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def _print(stream: TextIO, terminal: Callable[[], RichConsole], *parts: tuple[str, str | None]) -> None:
    """A line of styled parts, each made :func:`safe` and unable to write over its line; plain without a terminal."""
    harmless = [(safe(text).replace("\r", " "), style or "") for text, style in parts]
    if not _is_terminal(stream):
        stream.write("".join(text for text, _ in harmless) + "\n")
        return
    from rich.text import Text

    terminal().print(Text.assemble(*harmless))


class LogWriter:
    """Writes a job's output to a stream as it comes: raw into a file or pipe, made harmless for a terminal.

    A line that is still being written (a progress bar with carriage returns) is shown as far as it goes.
    """

    def __init__(self, stream: BinaryIO, *, is_terminal: bool) -> None:
        self._stream = stream
        self._is_terminal = is_terminal
        self._pending = b""

    def write(self, data: bytes) -> None:
        if self._is_terminal:
            data = self._pending + data
            cut = _incomplete_tail(data)
            data, self._pending = data[: len(data) - cut], data[len(data) - cut :]
            data = safe(data.decode("utf-8", errors="replace")).encode()
        self._stream.write(data)
        self._stream.flush()


def _incomplete_tail(data: bytes) -> int:
    """How many bytes at the end may belong to a character or an escape sequence that is not whole yet."""
    escape = data.rfind(b"\x1b", max(0, len(data) - 64))
    if escape >= 0 and not re.search(rb"[@-~]", data[escape + 2 :]):
        return len(data) - escape
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        width = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if width > back else 0
    return 0
