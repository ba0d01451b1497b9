"""A proxy on loopback that passes a number of bytes per second in each direction, for all connections together.

It prints its port, and ends when stdin ends: `python -m servers.slow_link PORT BYTES_PER_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

from executors.testing.helpers import environment

PIECE_BYTES = 256 << 10


class Direction:
    """One direction of the link. Pieces of all connections pass one after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at = bytes_per_s, 0.0

    async def take(self, n_bytes: int) -> None:
        now = asyncio.get_running_loop().time()
        # An idle link does not save up capacity. A late wakeup does not lose any.
        self._free_at = max(self._free_at, now - 0.01) + n_bytes / self._bytes_per_s
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(PIECE_BYTES):
            await direction.take(len(data))
            writer.write(data)
            await writer.drain()
    writer.close()


async def _serve(port: int, bytes_per_s: float) -> None:
    up, down = Direction(bytes_per_s), Direction(bytes_per_s)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", port, limit=PIECE_BYTES)
        await asyncio.gather(_pump(reader, their_writer, up), _pump(their_reader, writer, down))

    server = await asyncio.start_server(connect, "127.0.0.1", 0, limit=PIECE_BYTES)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


@contextlib.contextmanager
def slow_link(url: str, bytes_per_s: float) -> Iterator[str]:
    """Start the proxy in a new process, and yield the URL of the same server behind it.

    Args:
        url: the URL of a server on loopback.
        bytes_per_s: the speed of each direction.
    """
    command = [sys.executable, "-m", "servers.slow_link", str(urlsplit(url).port), str(bytes_per_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
