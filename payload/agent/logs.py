"""Verb ``logs``: a run's output, byte-exact, from any place, and onwards while it grows."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import BinaryIO, Optional

from payload.agent import state
from payload.agent.layout import Layout
from payload.agent.protocol import Events, Json, Request
from payload.agent.state import FINAL
from payload.errors import PayloadError

_CHUNK_BYTES = 64 * 1024
_POLL_S = 0.1
_STATE_EVERY_S = 0.5


def logs(request: Request, events: Events) -> Json:
    """Verb: send a run's log from ``offset`` (bytes), or its last ``tail`` lines, or the last ``since_s`` seconds.

    Without any of them: from the beginning. With ``follow``: until the run is over and all of it was sent.
    Every ``log`` event bears the byte offset of its data. If the log became shorter than what was read (somebody
    truncated or replaced it), a note says so and it is sent from its beginning.
    """
    layout = Layout.at(request.root)
    offset, tail, since_s = (
        request.get("offset", int),
        request.get("tail", int),
        request.get("since_s", float),
    )
    for name, value in (("offset", offset), ("tail", tail), ("since_s", since_s)):
        if value is not None and value < 0:
            raise PayloadError(f"the request's {name} is negative: {value}", kind="usage")
    follow = bool(request.get("follow", bool))
    run_id = state.resolve(layout, request.get("run_id", str))
    run_dir = layout.run(run_id)
    path = run_dir / state.OUTPUT_FILE
    if offset is None:
        offset = _place(path, run_dir / state.INDEX_FILE, tail, since_s)
    offset, now = _send(layout, run_id, path, offset, follow, events)
    return {"run_id": run_id, "offset": offset, "state": now}


def _send(
    layout: Layout, run_id: str, path: Path, offset: int, follow: bool, events: Events
) -> tuple[int, str]:
    """Send the log from ``offset``; returns (offset after the last byte sent, the run's state)."""
    file: Optional[BinaryIO] = None
    now, judged_at = state.current(layout, run_id).state, time.monotonic()
    try:
        while True:
            # The state is read before the log: what a run that is over has written is all there then.
            if time.monotonic() - judged_at >= _STATE_EVERY_S:
                now, judged_at = state.current(layout, run_id).state, time.monotonic()
            over = now in FINAL
            if file is None and path.exists():
                file = path.open("rb")
            if file is not None:
                offset = _send_rest(run_id, file, offset, events)
                if _was_replaced(path, file):
                    events.note(f"the log of run {run_id} was replaced; it is sent from its beginning")
                    file.close()
                    file, offset = None, 0
                    continue
            if over or not follow:
                return offset, now
            time.sleep(_POLL_S)
    finally:
        if file is not None:
            file.close()


def _send_rest(run_id: str, file: BinaryIO, offset: int, events: Events) -> int:
    size = os.fstat(file.fileno()).st_size
    if size < offset:
        events.note(
            f"the log is shorter than before ({size} < {offset} bytes); it is sent from its beginning"
        )
        offset = 0
    file.seek(offset)
    while offset < size:
        data = file.read(min(_CHUNK_BYTES, size - offset))
        if not data:
            break
        events.log(run_id, offset, data)
        offset += len(data)
    return offset


def _was_replaced(path: Path, file: BinaryIO) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return not os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _place(path: Path, index: Path, tail: Optional[int], since_s: Optional[float]) -> int:
    """The offset at which to begin: the later of the two that were asked for."""
    if not path.exists():
        return 0
    offset = 0
    with path.open("rb") as file:
        if since_s is not None:
            offset = _line_start(file, offset_at(index, time.time() - since_s))
        if tail is not None:
            offset = max(offset, tail_offset(file, tail))
    return offset


def offset_at(index: Path, moment: float) -> int:
    """A size that the log had by ``moment`` (seconds since the epoch): what came later begins there or after."""
    offset = 0
    with contextlib.suppress(FileNotFoundError), index.open("rb") as file:
        for line in file:
            try:
                entry = json.loads(line)
                if entry["t"] > moment:
                    break
                offset = int(entry["offset"])
            except (ValueError, KeyError, TypeError):
                # A line that a full disk cut off.
                continue
    return offset


def _line_start(file: BinaryIO, offset: int) -> int:
    """The beginning of the line that holds ``offset``, if it is within one chunk before; else ``offset``."""
    begin = max(0, offset - _CHUNK_BYTES)
    file.seek(begin)
    newline = file.read(offset - begin).rfind(b"\n")
    return begin + newline + 1 if newline >= 0 else (0 if begin == 0 else offset)


def tail_offset(file: BinaryIO, lines: int) -> int:
    """The offset of the last ``lines`` lines; a last line without its newline counts as one."""
    end = file.seek(0, os.SEEK_END)
    if lines == 0 or end == 0:
        return end
    file.seek(end - 1)
    # The newline that ends the last line begins no further one.
    wanted = lines + (1 if file.read(1) == b"\n" else 0)
    position = end
    while position > 0:
        begin = max(0, position - _CHUNK_BYTES)
        file.seek(begin)
        block = file.read(position - begin)
        count = block.count(b"\n")
        if count >= wanted:
            found = len(block)
            for _ in range(wanted):
                found = block.rfind(b"\n", 0, found)
            return begin + found + 1
        wanted -= count
        position = begin
    return 0
