"""One process of a replica that has several: its environment, its output and the file with its outcome.

The supervisor forks the processes, which are called members. Member 0 leads: it claims the attempt, and its heartbeats
and measurements are the replica's. The supervisor alone writes the outcome, when all members have ended.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from executors.replica import MEMBER, MEMBERS
from executors.replica.shared_page import SharedPage

LEADER_PAUSE_S = 0.005
MASTER_ADDRESS = "localhost"


@dataclass(frozen=True)
class MemberPlace:
    """The place of a process among the processes of its replica."""

    number: int
    """The number of the process, from 0."""
    of: int
    """The number of processes of the replica."""
    port: int
    """The port that the supervisor has reserved for the store of torch's process group."""
    end_file: int
    """The descriptor of the file into which the process writes its outcome."""
    leader_page: SharedPage
    """The page of member 0."""
    end_path: str
    """A path by which this process can open the file again."""
    end_inode: int
    """The number of the file in its file system, by which this process knows whether the descriptor still is this file.
    """

    @property
    def is_leader(self) -> bool:
        """True for member 0, whose records are the replica's."""
        return self.number == 0

    def environment(self, run_id: str, rank: int, attempt: int) -> dict[str, str]:
        """Return the variables that torchrun sets in a process, and the variables of this project.

        `TORCHELASTIC_USE_AGENT_STORE` is not set, because member 0 of torch's process group listens on the port itself.

        Args:
            run_id: the run.
            rank: the rank of the replica.
            attempt: the number of the attempt.
        """
        own, n = str(self.number), str(self.of)
        return {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK", MEMBER), own),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", MEMBERS), n),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": MASTER_ADDRESS,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": f"{run_id}-{rank}",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }

    def to_json(self) -> dict[str, Any]:
        """Return the values that a new Python process needs beside its descriptors."""
        file = {"end_path": self.end_path, "end_inode": self.end_inode}
        return {"number": self.number, "of": self.of, "port": self.port, **file}

    def shares(self) -> dict[str, int]:
        """Return the descriptors that a new process needs, by name. The caller closes the one of the leader's page."""
        return {"end": self.end_file, "leader": self.leader_page.share()}

    @classmethod
    def received(cls, message: Mapping[str, Any] | None, shares: Mapping[str, int]) -> MemberPlace | None:
        """Return the place that `to_json` and `shares` have passed to this process. None: the replica has one process.

        Args:
            message: the values of `to_json`. None: the replica has one process.
            shares: the descriptors, by name.
        """
        if message is None:
            return None
        return cls(**message, end_file=shares["end"], leader_page=SharedPage.open(shares["leader"]))

    def await_claim(self, supervisor_pid: int | None) -> int:
        """Wait until member 0 has claimed an attempt, and return the number of that attempt.

        Args:
            supervisor_pid: the supervisor. If it ends, the wait ends with an error.

        Raises:
            SystemExit: the supervisor has ended.
        """
        while not self.leader_page.claimed:
            if supervisor_pid is not None and os.getppid() != supervisor_pid:
                raise SystemExit(1)
            time.sleep(LEADER_PAUSE_S)
        return int(self.leader_page.claimed) - 1

    def leave_end(self, data: bytes) -> None:
        """Write the outcome of this member into its file, for the supervisor.

        Args:
            data: the encoded outcome.
        """
        with self._end_file() as file:
            written = 0
            while written < len(data):
                written += os.pwrite(file, data[written:], written)

    @contextlib.contextmanager
    def _end_file(self) -> Iterator[int]:
        """Return a descriptor of the file for the outcome within the block.

        The user's code may have closed all descriptors, as programs that become daemons do. A file of the user may have
        the number by now, and the outcome must not be written into it.
        """
        with contextlib.suppress(OSError):
            if os.fstat(self.end_file).st_ino == self.end_inode:
                yield self.end_file
                return
        opened = os.open(self.end_path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield opened
        finally:
            os.close(opened)


class LineWriter(io.BufferedIOBase):
    """Writes whole lines, each with a prefix, so that lines of several processes in one log stay whole.

    Args:
        write: writes bytes to the log.
        prefix: the beginning of each line. Default: none.
        descriptor: the descriptor of the log, for libraries that write to it themselves. Default 1, which is stdout.
    """

    def __init__(self, write: Callable[[bytes], Any], prefix: bytes = b"", descriptor: int = 1) -> None:
        self._write, self._prefix, self._descriptor = write, prefix, descriptor
        self._pending = b""
        self._is_at_start = True

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the log."""
        return self._descriptor

    def write(self, data: Any) -> int:
        """Keep the data, and write all lines that are complete.

        Args:
            data: the bytes.
        """
        size = memoryview(data).nbytes
        lines, newline, rest = (self._pending + bytes(data)).rpartition(b"\n")
        self._pending = rest
        if newline:
            self._emit(lines + newline)
        return size

    def flush(self) -> None:
        """Write a line that is not complete, as a progress bar prints it."""
        pending, self._pending = self._pending, b""
        if pending:
            self._emit(pending)

    def _emit(self, data: bytes) -> None:
        # Not `splitlines`, which would also split at the returns of a progress bar.
        parts = data.removesuffix(b"\n").split(b"\n")
        begun = b"\n".join(
            part if n == 0 and not self._is_at_start else self._prefix + part for n, part in enumerate(parts)
        )
        ending = b"\n" * data.endswith(b"\n")
        self._is_at_start = data.endswith(b"\n")
        self._write(begun + ending)


def write_whole_lines(member: int) -> None:
    """Make this process print whole lines, which begin with `[m] ` in member m > 0.

    Lines of C code and of other programs have no prefix.

    Args:
        member: the number of this process in its replica.
    """
    prefix = f"[{member}] ".encode() if member else b""
    for descriptor, name in enumerate(("stdout", "stderr"), 1):
        buffer: Any = LineWriter(_writer_to(getattr(sys, name)), prefix, descriptor)
        stream = io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _writer_to(stream: Any) -> Callable[[bytes], None]:
    """Return a function that writes to the buffer of a stream. The function also holds the stream itself, because a
    deleted stream would close its buffer.
    """

    def write(data: bytes) -> None:
        sink = stream.buffer
        sink.write(data)
        sink.flush()

    return write
