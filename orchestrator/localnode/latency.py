"""A front for a TCP server that delays every byte: how the controller feels over a long line.

The delay is per direction and does not bound the throughput: bytes are stamped when they arrive and leave when
their time has come.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

_CHUNK_BYTES = 64 * 1024
_IN_FLIGHT_CHUNKS = 256


@dataclass(frozen=True)
class Front:
    """The listening side; ``port`` is where clients connect."""

    port: int
    server: asyncio.Server

    def close(self) -> None:
        self.server.close()


async def delayed(address: str, target_port: int, latency_s: float) -> Front:
    """Listen on a free port of ``address`` and pass everything to ``target_port``, ``latency_s`` late each way."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target_writer = await asyncio.open_connection(address, target_port)
        await asyncio.gather(
            _copy_late(reader, target_writer, latency_s),
            _copy_late(target_reader, writer, latency_s),
            return_exceptions=True,
        )

    server = await asyncio.start_server(relay, address, 0)
    return Front(port=server.sockets[0].getsockname()[1], server=server)


async def _copy_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, latency_s: float) -> None:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_IN_FLIGHT_CHUNKS)

    async def receive() -> None:
        data = b"first"
        while data:
            try:
                data = await reader.read(_CHUNK_BYTES)
            except ConnectionError:
                data = b""
            await queue.put((loop.time() + latency_s, data))

    receiver = asyncio.create_task(receive())
    try:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        receiver.cancel()
        with contextlib.suppress(OSError):
            writer.close()
