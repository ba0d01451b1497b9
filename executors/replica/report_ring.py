"""A ring of the last reports in the page of a rank: its supervisor judges the rules of the run from them.

The rank writes a row for each report, and never waits. A row has the numbers that rules are about. The supervisor reads
the new rows about once a second. The ring has 8,192 rows, so the supervisor misses none unless a rank reports more
often than that between two looks. `ReportRing.read` then returns how many are missing.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from time import monotonic

CAPACITY = 8192
"""The reports that a ring holds."""
NAME_BYTES = 64
N_NAMES, N_REPORTS, GPU_USE, GPU_AT = range(4)
HEAD_BYTES, BYTES = 64, 8
MISSING_BITS = 0x7FF8_5EED_0000_0000
"""The bits of a nan that stands for a number that a report does not have. No computation makes these bits."""
(MISSING,) = struct.unpack("=d", struct.pack("=Q", MISSING_BITS))


def ring_bytes(names: Sequence[str]) -> int:
    """Return the bytes that the ring of some numbers needs.

    Args:
        names: the names of the numbers.

    Example:
        ring_bytes(["loss"])
    """
    return HEAD_BYTES + len(names) * (NAME_BYTES + CAPACITY * BYTES)


class ReportRing:
    """The last reports of the numbers that the rules of a run are about.

    Args:
        memory: the part of the page with the ring. It is shared with another process.

    Example:
        ring = ReportRing.make(memoryview(bytearray(ring_bytes(["loss"]))), ["loss"])
        ring.note({"loss": 2.5})
        ring.read(0)  # ({"loss": [2.5]}, 1, 0)
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._head = memory[:HEAD_BYTES].cast("d")
        n = min(int(self._head[N_NAMES]), (len(memory) - HEAD_BYTES) // (NAME_BYTES + CAPACITY * BYTES))
        names = [memory[HEAD_BYTES + index * NAME_BYTES :][:NAME_BYTES] for index in range(n)]
        self.names = [bytes(name).rstrip(b"\0").decode(errors="replace") for name in names]
        """The names of the numbers."""
        self._rows_at = HEAD_BYTES + n * NAME_BYTES
        self._row_bytes = n * BYTES
        self._pack_into = struct.Struct(f"={n}d").pack_into

    @classmethod
    def make(cls, memory: memoryview, names: Sequence[str]) -> ReportRing:
        """Return a new ring in empty memory.

        Args:
            memory: at least `ring_bytes(names)` bytes of zeros.
            names: the names of the numbers, each at most 64 bytes long.
        """
        for index, name in enumerate(names):
            at = HEAD_BYTES + index * NAME_BYTES
            memory[at : at + NAME_BYTES] = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        memory[:HEAD_BYTES].cast("d")[N_NAMES] = len(names)
        return cls(memory)

    # -- written by the rank

    def note(self, reported: Mapping[str, float]) -> None:
        """Write the row of one report.

        Args:
            reported: the reported numbers by name.
        """
        head, get = self._head, reported.get
        n = head[N_REPORTS]
        at = self._rows_at + int(n) % CAPACITY * self._row_bytes
        self._pack_into(self._memory, at, *[get(name, MISSING) for name in self.names])
        head[N_REPORTS] = n + 1  # after the row, so that the supervisor reads no row that is not there yet

    def note_gpu(self, use: float) -> None:
        """Note a measured utilization of the GPU.

        Args:
            use: the share, from 0 to 1.
        """
        self._head[GPU_USE] = use
        self._head[GPU_AT] = monotonic()

    # -- read by the supervisor

    @property
    def n_reports(self) -> int:
        """The number of reports so far."""
        return int(self._head[N_REPORTS])

    @property
    def gpu(self) -> tuple[float, float]:
        """The last measured utilization of the GPU, from 0 to 1, and the time of the measurement by `time.monotonic`.

        The time is 0 if none was measured.
        """
        return self._head[GPU_USE], self._head[GPU_AT]

    def read(self, n_read: int) -> tuple[dict[str, list[float]], int, int]:
        """Return the new values of each number, the number of all reports, and how many new reports are lost.

        Args:
            n_read: the number of reports that were read before.
        """
        n = self.n_reports
        first = max(n_read, n - CAPACITY)
        if first >= n:
            return {}, n, 0
        begin, end = (self._rows_at + each % CAPACITY * self._row_bytes for each in (first, n))
        last = self._rows_at + CAPACITY * self._row_bytes
        memory = self._memory
        data = (
            bytes(memory[begin:end]) if begin < end else bytes(memory[begin:last]) + bytes(memory[self._rows_at : end])
        )
        # The rank may have written over the oldest of these rows while they were read.
        n_over = min(max(0, self.n_reports - CAPACITY - first), n - first)
        data, width = data[n_over * self._row_bytes :], len(self.names)
        numbers, bits = array("d", data), array("Q", data)
        values = {
            name: [
                value
                for value, each in zip(numbers[index::width], bits[index::width], strict=True)
                if each != MISSING_BITS
            ]
            for index, name in enumerate(self.names)
        }
        return values, n, first - n_read + n_over

    def clear(self) -> None:
        """Forget all reports, for the next attempt of the same process. Only the supervisor calls this."""
        for slot in (N_REPORTS, GPU_USE, GPU_AT):
            self._head[slot] = 0.0
