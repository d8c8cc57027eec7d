"""An SSH transport on which threads may share a connection: two faults of paramiko's that would end it for all of them.

paramiko builds a channel's messages under the channel's lock and sends them after it has let go of it. When a command
ends while another thread sends its input, or the end of it, input can follow the channel's EOF, and anything its CLOSE.
A server takes that for a breach of the protocol and ends the whole connection, under all other commands (RFC 4254,
5.3).

While keys are exchanged anew, after some 512 MB, the thread that reads from the host answers a channel's end, and waits
for the exchange, which only itself can finish.
"""

from __future__ import annotations

import contextlib
import threading

from paramiko import Message, SSHException, Transport
from paramiko.common import (
    MSG_CHANNEL_CLOSE,
    MSG_CHANNEL_DATA,
    MSG_CHANNEL_EOF,
    MSG_CHANNEL_EXTENDED_DATA,
    MSG_CHANNEL_FAILURE,
    MSG_CHANNEL_REQUEST,
    MSG_CHANNEL_WINDOW_ADJUST,
)

_TO_A_CHANNEL = range(MSG_CHANNEL_WINDOW_ADJUST, MSG_CHANNEL_FAILURE + 1)
"""Messages whose first field is the number that the server gave to the channel."""


class OrderedTransport(Transport):
    """Drops input to channels whose input has ended, and all messages to channels that this side has closed."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self._closed_channels: set[int] = set()
        self._ended_inputs: set[int] = set()
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def _send_user_message(self, data: Message) -> None:
        if threading.current_thread() is not self:
            super()._send_user_message(data)  # type: ignore[misc]
            return
        with self.clear_to_send_lock:
            if self.clear_to_send.is_set():
                self._send_message(data)
                return
        # The reader must go on reading, or the keys are never exchanged.
        threading.Thread(target=self._send_when_clear, args=(data,), daemon=True).start()

    def _send_when_clear(self, data: Message) -> None:
        with contextlib.suppress(SSHException, EOFError, OSError):
            super()._send_user_message(data)  # type: ignore[misc]

    def _send_message(self, data: Message) -> None:
        # All messages to channels come here one at a time: the caller holds paramiko's lock of the sending side.
        head = bytes(data.packet.getbuffer()[:5])
        if head[0] in _TO_A_CHANNEL and not self._may_follow(head[0], int.from_bytes(head[1:], "big")):
            return
        super()._send_message(data)  # type: ignore[misc]

    def _may_follow(self, kind: int, channel: int) -> bool:
        """Whether such a message may come after what this side has sent on the channel; takes note of it."""
        if kind == MSG_CHANNEL_REQUEST:
            # The first message on a new channel: servers use the numbers of closed ones again.
            self._closed_channels.discard(channel)
            self._ended_inputs.discard(channel)
        elif channel in self._closed_channels:
            return False
        elif kind in (MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA):
            return channel not in self._ended_inputs
        elif kind == MSG_CHANNEL_EOF:
            self._ended_inputs.add(channel)
        elif kind == MSG_CHANNEL_CLOSE:
            self._closed_channels.add(channel)
        return True
