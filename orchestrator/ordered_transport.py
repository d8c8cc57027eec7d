"""An SSH transport that sends nothing on a channel after its end.

paramiko builds a channel's messages under the channel's lock and sends them after it has let go of it. When a command
ends while another thread sends its input, or the end of it, that message can follow the channel's CLOSE. A server
takes it for a message on a channel that does not exist and ends the whole connection, under all other commands (RFC
4254, 5.3).
"""

from __future__ import annotations

from paramiko import Message, Transport
from paramiko.common import (
    MSG_CHANNEL_CLOSE,
    MSG_CHANNEL_FAILURE,
    MSG_CHANNEL_REQUEST,
    MSG_CHANNEL_WINDOW_ADJUST,
)

_TO_A_CHANNEL = range(MSG_CHANNEL_WINDOW_ADJUST, MSG_CHANNEL_FAILURE + 1)
"""Messages whose first field is the number that the server gave to the channel."""


class OrderedTransport(Transport):
    """Drops messages to channels that this side has closed."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self._closed_channels: set[int] = set()
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def _send_message(self, data: Message) -> None:
        # All messages to channels come here one at a time: the caller holds paramiko's lock of the sending side.
        head = bytes(data.packet.getbuffer()[:5])
        if head[0] in _TO_A_CHANNEL:
            channel = int.from_bytes(head[1:], "big")
            if head[0] == MSG_CHANNEL_REQUEST:
                # The first message on a new channel: servers use the numbers of closed ones again.
                self._closed_channels.discard(channel)
            elif channel in self._closed_channels:
                return
            elif head[0] == MSG_CHANNEL_CLOSE:
                self._closed_channels.add(channel)
        super()._send_message(data)  # type: ignore[misc]
