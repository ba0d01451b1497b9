"""Sandboxes as local processes: each command runs in a session and an empty directory of its own.

A container ends as a whole: when its command ends, or is ended, everything it has started is killed with it. There is
no isolation beyond that: the file system and the loopback network belong to the machine.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modal_proto import api_pb2

from servers.isolation.gpu import write_torch

SUCCESS = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
FAILURE = api_pb2.GenericResult.GENERIC_STATUS_FAILURE
TIMEOUT = api_pb2.GenericResult.GENERIC_STATUS_TIMEOUT
TERMINATED = api_pb2.GenericResult.GENERIC_STATUS_TERMINATED
INIT_FAILURE = api_pb2.GenericResult.GENERIC_STATUS_INIT_FAILURE
# Releases of the SDK before 1.6.3 have no name for this number, and the service sends it all the same.
KERNEL_OOM_KILL: Any = 10

# With this program, even a test process that is killed leaves no sandboxes behind. It is part of util-linux, which
# macOS does not have.
ENDS_WITH_THE_SERVER = [setpriv, "--pdeathsig", "KILL"] if (setpriv := shutil.which("setpriv")) else []


@dataclasses.dataclass(frozen=True)
class LogEntry:
    """A piece of the output of a process, as the vendor keeps it: a line, or a part of a line."""

    timestamp_ns: int
    file_descriptor: int
    text: str

    def message(self) -> api_pb2.TaskLogs:
        return api_pb2.TaskLogs(
            data=self.text,
            timestamp=self.timestamp_ns / 1e9,
            timestamp_ns=self.timestamp_ns,
            file_descriptor=self.file_descriptor,  # type: ignore[arg-type]  # numbers of the enumeration
        )


@dataclasses.dataclass
class Sandbox:
    """One sandbox: its definition, its process, its output, and its end."""

    sandbox_id: str
    task_id: str
    is_v2: bool
    app_id: str
    created_at: float
    definition: api_pb2.Sandbox
    tags: dict[str, str]
    environment: dict[str, str]
    """The variables of the request, of its secrets and of the vendor, without PATH and HOME."""
    folder: Path
    """The directory that stands for the sandbox's file system, empty when its command starts."""
    is_scheduled: bool = False
    process: asyncio.subprocess.Process | None = None
    result: api_pb2.GenericResult | None = None
    logs: list[LogEntry] = dataclasses.field(default_factory=list)
    _news: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _verdict: api_pb2.GenericResult | None = None
    _life: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def gpus(self) -> int:
        """The number of GPUs of the sandbox."""
        return int(self.definition.resources.gpu_config.count)

    def start(self, bin_folder: Path) -> None:
        """Start the command. The time limit counts from now."""
        self.is_scheduled = True
        self._life = asyncio.create_task(self._live(bin_folder))

    async def end(self, verdict: api_pb2.GenericResult) -> None:
        """Begin to end the sandbox, and return before it has ended, as the vendor does.

        A sandbox that has ended does not change.
        """
        if self.result or self._verdict:
            return
        self._verdict = verdict
        if self._life is None:
            self._finish(verdict)
        else:
            self._kill_everything()

    async def running(self) -> asyncio.subprocess.Process:
        """Wait until the command runs, and return its process."""
        until = time.monotonic() + 10
        while self.process is None and self.result is None and await self.news(until):
            pass
        assert self.process is not None, f"{self.sandbox_id} did not start: {self.result}"
        return self.process

    async def gone(self) -> None:
        """Wait until no process of the sandbox runs."""
        if self._life:
            await self._life

    async def news(self, until: float) -> bool:
        """Wait for more output, the start or the end. Return False at a given time."""
        left_s = until - time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), max(left_s, 0))
            return True
        return False

    async def _live(self, bin_folder: Path) -> None:
        surroundings = {"PATH": f"{bin_folder}:/usr/local/bin:/usr/bin:/bin", "HOME": str(self.folder)}
        if self.gpus:
            surroundings["PYTHONPATH"] = str(write_torch(self.folder.parent / "gpu", sees_gpu=True))
        arguments = list(self.definition.entrypoint_args) or ["sleep", str(self.definition.timeout_secs + 60)]
        try:
            environment = surroundings | self.environment
            program = shutil.which(arguments[0], path=environment["PATH"])
            if program is None:
                raise FileNotFoundError(f"no such command: {arguments[0]}")
            self.process = await asyncio.create_subprocess_exec(
                *ENDS_WITH_THE_SERVER,
                program,
                *arguments[1:],
                cwd=self.folder,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._finish(api_pb2.GenericResult(status=INIT_FAILURE, exitcode=128, exception=str(error)))
            return
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        readers = [
            asyncio.create_task(self._read(1, self.process.stdout)),
            asyncio.create_task(self._read(2, self.process.stderr)),
        ]
        self._tell()
        if self._verdict:  # the sandbox was ended before it was started
            self._kill_everything()
        timer = asyncio.get_running_loop().call_later(self.definition.timeout_secs, self._time_out)
        code = await self.process.wait()
        timer.cancel()
        n_looks_in_vain = 0
        while n_looks_in_vain < 2:  # a process that is just being started has no environment for a moment
            n_looks_in_vain = 0 if self._kill_everything() else n_looks_in_vain + 1
            await asyncio.sleep(0.005)
        await asyncio.gather(*readers)
        exit_code = code if code >= 0 else 128 - code
        ended_by_itself = api_pb2.GenericResult(status=FAILURE if exit_code else SUCCESS, exitcode=exit_code)
        self._finish(self._verdict or ended_by_itself)

    def _time_out(self) -> None:
        self._verdict = self._verdict or api_pb2.GenericResult(status=TIMEOUT)
        self._kill_everything()

    async def _read(self, file_descriptor: int, pipe: asyncio.StreamReader) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while chunk := await pipe.read(65536):
            self._log(file_descriptor, decoder.decode(chunk))
        self._log(file_descriptor, decoder.decode(b"", final=True))

    def _log(self, file_descriptor: int, text: str) -> None:
        self.logs += [LogEntry(time.time_ns(), file_descriptor, line) for line in lines_of(text)]
        self._tell()

    def _finish(self, result: api_pb2.GenericResult) -> None:
        self.result = result
        self._tell()

    def _tell(self) -> None:
        """Wake all waiting calls. Later calls wait for the next change."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _kill_everything(self) -> bool:
        """Kill the command's process group, and each other process with this sandbox's mark.

        Return True if there was any.
        """
        if self.process is None:
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        others = pids_with({"MODAL_SANDBOX_ID": self.sandbox_id})
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(others)


def lines_of(text: str) -> list[str]:
    """Divide a text after every newline, and nowhere else."""
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return [line for line in lines if line]


def pids_with(variables: Mapping[str, str]) -> list[int]:
    """Return the live processes that were started with these variables in their environment."""
    marks = {f"{name}={value}".encode() for name, value in variables.items()}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marks <= set((folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
    return found
