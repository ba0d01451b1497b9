"""The jobs of the local Hub: they wait for hardware, run as local processes, and end in one of the vendor's stages.

The vendor's documentation leaves one point open. Here, a cancelled job is CANCELED at once, and its process gets
SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import secrets
import subprocess
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from servers.hub.hardware import FLAVORS
from servers.isolation.process import IsolatedProcess, container_environment
from servers.isolation.python import shared_python

TERMINAL = ("COMPLETED", "ERROR", "CANCELED", "DELETED")


@dataclass(eq=False)
class Job:
    """One job. Any code may read it, but only `Jobs` changes it."""

    namespace: str
    spec: dict[str, Any]
    initiator: dict[str, str]
    labels: dict[str, str]
    id: str = field(default_factory=lambda: f"{int(time.time()):08x}{secrets.token_hex(8)}")
    stage: str = "SCHEDULING"
    message: str | None = None
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    started: datetime | None = None
    finished: datetime | None = None
    lines: list[tuple[datetime, str]] = field(default_factory=list)
    log_ended: bool = False
    """True if no more lines will be added to the log."""
    process: IsolatedProcess | None = None
    killed_for: str = ""
    """The reason that Kubernetes would give for the end of the process, if the process did not end by itself."""

    @property
    def is_over(self) -> bool:
        return self.stage in TERMINAL

    @property
    def flavor(self) -> str:
        return str(self.spec["flavor"])

    def has(self, labels: list[str]) -> bool:
        """Return True if the job has all these labels. Each label is `key=value` or `key`."""
        own = {text for key, value in self.labels.items() for text in (key, f"{key}={value}")}
        return own.issuperset(labels)


class Jobs:
    """All jobs of a server, and the threads that run them.

    `changed` guards every job, and is notified when one changes.
    """

    def __init__(self, folder: Path) -> None:
        self.changed = threading.Condition()
        self.held: set[str] = set()
        """The flavors without free hardware. Their jobs stay in SCHEDULING."""
        self.term_grace_s = 1.0
        self.closing = False
        self._folder = folder
        self._jobs: list[Job] = []
        self._threads: list[threading.Thread] = []
        self._processes: list[IsolatedProcess] = []

    def create(self, namespace: str, spec: dict[str, Any], initiator: dict[str, str]) -> Job:
        job = Job(namespace, spec, initiator, dict(spec.get("labels", {})))
        with self.changed:
            self._jobs.append(job)
            self._start_thread(self._run, job)
        return job

    def find(self, job_id: str, namespace: str | None = None) -> Job | None:
        with self.changed:
            found = [job for job in self._jobs if job.id == job_id and namespace in (None, job.namespace)]
        return found[0] if found else None

    def newest_first(self) -> list[Job]:
        with self.changed:
            return self._jobs[::-1]

    def cancel(self, job: Job) -> None:
        """Cancel a job. A job that has ended stays as it is."""
        self._end_early(job, "CANCELED")

    def delete(self, job: Job) -> None:
        """End a job and show it as DELETED."""
        self._end_early(job, "DELETED", also_if_over=True)

    def forget(self, job: Job) -> None:
        """End a job, and remove it from the server."""
        self.delete(job)
        with self.changed:
            self._jobs.remove(job)

    def kill(self, job: Job, reason: str) -> None:
        """Kill a running job's process with SIGKILL, as the kernel or the cluster would for `reason`."""
        with self.changed:
            job.killed_for = reason
            if job.process:
                job.process.kill()

    def stop_streams(self) -> None:
        """Start no more jobs, and end all streams."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def close(self) -> None:
        """End every process, and wait for it."""
        self.stop_streams()
        with self.changed:
            for process in self._processes:
                process.kill()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _end_early(self, job: Job, stage: str, *, also_if_over: bool = False) -> None:
        with self.changed:
            if job.is_over and not also_if_over:
                return
            was_over = job.is_over
            self._end(job, stage, None)
            if job.process is None:
                job.log_ended = True
            elif not was_over:
                self._start_thread(job.process.stop, self.term_grace_s)

    def _start_thread(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _end(self, job: Job, stage: str, message: str | None) -> None:
        job.stage, job.message = stage, message
        job.finished = job.finished or datetime.now(UTC)
        self.changed.notify_all()

    def _run(self, job: Job) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.closing or job.is_over or job.flavor not in self.held)
            if self.closing or job.is_over:
                return
            job.stage, job.started = "RUNNING", datetime.now(UTC)
            self.changed.notify_all()
        message = self._execute(job)
        with self.changed:
            job.log_ended = True
            self.changed.notify_all()
            if not job.is_over:
                self._end(job, "ERROR" if message else "COMPLETED", message)

    def _execute(self, job: Job) -> str | None:
        """Run the command. Return the vendor's message about its end. None: it ended without an error."""
        with self.changed:
            if job.is_over or self.closing:
                return None
            directory = self._folder / job.id
            environment = {
                **container_environment(shared_python(), directory),
                **job.spec.get("environment", {}),
                **job.spec.get("secrets", {}),
                "JOB_ID": job.id,
                **FLAVORS[job.flavor].environment(),
            }

            def keep(line: str) -> None:
                with self.changed:
                    job.lines.append((datetime.now(UTC), line))
                    self.changed.notify_all()

            try:
                job.process = process = IsolatedProcess(job.spec["command"], environment, directory, on_line=keep)
                self._processes.append(process)
            except OSError as error:  # the exit code and the reason that Kubernetes would report
                keep(str(error))
                code, reason = 128, "StartError"
                process = None
        if process is not None:
            try:
                code = process.wait(job.spec["timeoutSeconds"])
            except subprocess.TimeoutExpired:
                process.stop(self.term_grace_s)
                return "Job timeout"
            reason = job.killed_for or "Error"
        return None if code == 0 else f"Job failed with exit code: {code}. Reason: {reason}"
