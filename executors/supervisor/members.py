"""The processes of a replica that has several, as their supervisor sees them; see `executors.worker.process_group`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from executors.attempt import Attempt
from executors.attempt.outcome import MAX_OUTCOME_BYTES, parse_outcome
from executors.errors import CorruptObjectError
from executors.process import SHARES_PORTS, openable_file, path_of_descriptor, remove_openable, signal_name
from executors.protocol import MemberEnd, Outcome, ReplicaStatus
from executors.replica.shared_page import SharedPage
from executors.settings.procs import BY_GPU, BY_GPU_OR_ONE, gpus_asked
from executors.supervisor.watchdog import Watchdog
from executors.worker.process_group import MemberPlace

LAST_CALL_S = 0.3
"""After a member has failed, the others continue for this time, because the member that caused the failure may end a
moment later.
"""
NEVER = float("inf")


class NoGpuToCountError(OSError):
    """The number of processes is the number of GPUs, and the replica sees none."""


def count_members(procs: str | None, gpu: str | None, devices: str | None) -> int:
    """Return the number of processes of each replica.

    The GPUs are never counted by torch: a process that has initialized CUDA must not fork.

    Args:
        procs: the setting. None: 1.
        gpu: the GPU of each replica, as in "H100:8". None: no GPU.
        devices: the value of `CUDA_VISIBLE_DEVICES` for the replica. None: the value in the environment of this
            process, or all GPUs if it has none.

    Raises:
        NoGpuToCountError: `procs` is "gpu", and the replica sees no GPU.

    Example:
        count_members("gpu", "H100:8", None)  # 8
    """
    if procs is None:
        return 1
    if procs not in (BY_GPU, BY_GPU_OR_ONE):
        return int(procs)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if devices is None else devices
    if (asked := gpus_asked(gpu)) is not None:
        return asked
    n = _gpus_of_this_machine() if visible is None else len([each for each in visible.split(",") if _is_gpu(each)])
    if n == 0 and procs == BY_GPU:
        raise NoGpuToCountError("procs=gpu: this replica sees no GPU; give a number (--procs 2), or auto")
    return max(1, n)


def _is_gpu(device: str) -> bool:
    return device.strip() not in ("", "-1")


def _gpus_of_this_machine() -> int:
    import subprocess  # not at the top: it imports `threading`, whose hook runs at every fork

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30)
        return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    return 0


def reserve_port() -> socket.socket:
    """Return a socket that is bound to a free port and never listens.

    As long as it is open, the kernel gives the port to no other program. Torch's store binds it as well, because both
    sockets have `SO_REUSEADDR` and only torch's listens. macOS would refuse the second socket; see `MemberGroup`.

    Raises:
        OSError: this machine has no free port.
    """
    # An IPv6 socket that also takes IPv4 reserves the port for both. Some containers have no IPv6.
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            reserved = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            reserved.bind((address, 0))
            return reserved
        except OSError:
            reserved.close()
    raise OSError("no port is free for the process group of a replica")


class MemberGroup:
    """The port and the end files that the supervisor keeps open for the members of one attempt.

    Args:
        n: the number of members, at least 2.

    Raises:
        OSError: there is no free port, or no descriptor.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._reserved = reserve_port()
        self.port: int = self._reserved.getsockname()[1]
        if not SHARES_PORTS:
            self._reserved.close()  # from now on another program could take the port, as between torchrun's two steps
        self.end_files: list[int] = []
        try:
            for _ in range(n):
                self.end_files.append(openable_file(b""))
        except OSError:
            self.close()
            raise

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that a forked process must close, except for the file of its own member."""
        reserved = [self._reserved.fileno()] if SHARES_PORTS else []
        return [*reserved, *self.end_files] if self.end_files else []

    def place_of(self, number: int, leader_page: SharedPage) -> MemberPlace:
        """Return the place of one member.

        Args:
            number: the number of the member.
            leader_page: the page of member 0.
        """
        file = self.end_files[number]
        # The member opens the file again by its path if the user's code has closed the descriptor.
        path, inode = path_of_descriptor(file), os.fstat(file).st_ino
        return MemberPlace(number, self.n, self.port, file, leader_page, path, inode)

    def close(self) -> None:
        """Release the port and the files, when the attempt has ended."""
        self._reserved.close()
        while self.end_files:
            file = self.end_files.pop()
            remove_openable(file)
            os.close(file)


@dataclass
class Member:
    """One process of a replica."""

    number: int
    pid: int
    page: SharedPage
    watchdog: Watchdog
    exit_code: int | None = None
    """The exit code of the member, or -N if signal N ended it. None: it runs."""
    ended_at: float = NEVER
    """The time at which the supervisor saw the member's end, by `time.monotonic`."""
    left_with: int | None = None
    """The exit code with which the process wanted to exit, if the supervisor killed it because its exit functions took
    too long. None: it was not killed for that.
    """
    was_asked: bool = False
    """True if the supervisor has sent SIGTERM to the member."""
    was_killed: bool = False
    """True if the supervisor has sent SIGKILL to the member."""
    end: Outcome | None = field(default=None, repr=False)
    """The outcome that the member left. None: it left none."""

    @property
    def is_alive(self) -> bool:
        """True if the supervisor has not seen the end of the member yet."""
        return self.exit_code is None

    @property
    def left_as_announced(self) -> bool:
        """True if the member ended because of a notice or a stop, which is not a failure."""
        return self.page.ending_at is not None and self.exit_code == 128 + signal.SIGTERM

    @property
    def has_failed(self) -> bool:
        """True if the member ended with an error."""
        return self.exit_code not in (None, 0) and not self.left_as_announced

    @property
    def has_vanished(self) -> bool:
        """True if the member ended without an exception and without a signal of the supervisor: by a foreign signal, or
        by `os._exit`.

        SIGABRT does not count, because libraries abort a process after it has lost another member.
        """
        was_ended_by_us = self.was_asked or self.was_killed
        return self.has_failed and not self.page.raised_at and not was_ended_by_us and self.exit_code != -signal.SIGABRT

    def read_end(self, file: int, attempt: Attempt) -> None:
        """Read the outcome that the member left in its file.

        Args:
            file: the descriptor of the member's file.
            attempt: the attempt, for the check of the record.
        """
        size = os.fstat(file).st_size
        data = os.pread(file, size, 0) if 0 < size <= MAX_OUTCOME_BYTES + 1 else b""
        with contextlib.suppress(CorruptObjectError, ValueError):  # the member was killed while it wrote its outcome
            found = parse_outcome(data)
            if (found.rank, found.attempt) == (attempt.rank, attempt.number):
                self.end = found

    def to_record(self) -> MemberEnd:
        """Return the end of the member, for the outcome of the replica."""
        code = self.exit_code
        name = signal_name(-code) if code is not None and code < 0 else None
        return MemberEnd(self.pid, code, name, None if self.end is None else self.end.error_line)


def find_cause(members: Sequence[Member]) -> Member | None:
    """Return the member whose failure came first. None: no member has failed.

    A member that vanished without an exception is the cause, because the exceptions of the others follow from that:
    they lose their connection to it before the supervisor has seen its end.

    Args:
        members: all members of a replica.
    """
    failed = [member for member in members if member.has_failed]
    if vanished := [member for member in failed if member.has_vanished]:
        return min(vanished, key=lambda member: member.ended_at)
    return min(failed, key=lambda member: member.page.raised_at or member.ended_at, default=None)


def merge_ends(members: Sequence[Member], cause: Member | None) -> Outcome | None:
    """Return the outcome of a replica, merged from the outcomes that its members left. None: the member that failed
    first left none.

    Args:
        members: all members, which have ended.
        cause: the member that failed first. None: no member failed.
    """
    leader = members[0].end
    if cause is None:
        left = [member.end for member in members if member.exit_code != 0 and member.end is not None]
        return left[0] if left else leader
    end, n = cause.end, len(members)
    # the process ended in another way after it had written its outcome
    if end is None or end.status is ReplicaStatus.SUCCEEDED:
        return None
    # An exit code has no line of an error. Without a line, the reader of the table would not learn the member.
    name, line = f"Member {cause.number} of {n}", end.error_line or (end.error or "").partition("\n")[0] or None
    early = _describe_early_ends(members, cause)
    if line is not None and not line.startswith(name):  # the sentence about a hang already names the member
        line = f"{name}{f' ({early})' * bool(early)}: {line}"
    return replace(
        end,
        error=f"{name} failed first{f', {early}' * bool(early)}.\n{end.error or ''}",
        error_line=line,
        pid=members[0].pid,
        reported=None if leader is None else leader.reported,
        member=cause.number,
        **members[0].page.outcome_fields(),
    )


def _describe_early_ends(members: Sequence[Member], cause: Member) -> str:
    """Return words on the members that had ended with 0 before another one failed. Empty: there are none.

    A collective of the others fails then, and its error does not name the member that has left.
    """
    failed_at = cause.page.raised_at or cause.ended_at
    early = [each for each in members if each.exit_code == 0 and (each.page.left_at or each.ended_at) <= failed_at]
    if not early:
        return ""
    names = ", ".join(str(each.number) for each in early)
    return f"after member{'s' * (len(early) > 1)} {names} ended with exit code 0"
