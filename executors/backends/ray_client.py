"""RayClient: makes the requests of Ray's Jobs REST API that this project needs. Ray's own client has 380 MB.

Answers are not trusted: their size is limited, and they are parsed field by field. The token is only sent to the
address that the user gave, so no redirect is followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executors.backends.jobs.sdk import call_with_timeout
from executors.backends.jobs.service import JobKey, JobServiceError, JobState, Kind
from executors.errors import CorruptObjectError
from executors.protocol import Reason
from executors.store.records import Check, Fields, Record, checked, integer, json_object, nullable, text
from executors.view.report.text import one_line

NAME = re.compile(r"[a-z0-9-]{1,100}")
TOKEN = re.compile(r"[!-~]{1,8192}")
TOKEN_ADVICE = "Set RAY_AUTH_TOKEN_PATH to a file that has the cluster's token (or --option token_file=PATH)."
CALL_LIMIT_S = 60.0
MAX_ANSWER_BYTES = 4 << 20
MAX_LIST_BYTES = 32 << 20  # some 20,000 jobs
MAX_LOG_BYTES = 64 << 20
MAX_REFUSAL_BYTES = 64 << 10
SCRIPT = "replicas_bootstrap.py"
PACKAGE_STAYS_S = 60.0  # after this time a package is checked again; Ray keeps an unused one for ten minutes
WAITS = {"RUNNING": "", "PENDING": "waiting for room, or for its environment"}  # instead of Ray's long texts
LOST = ("JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE")
LOST_WORDS = ("supervisor actor died", "nexpected")  # in messages of older releases, which name no error types
RAYS_LINES = re.compile(
    r"\A[^\n]*Runtime env is setting up\.[^\n]*\n|^Running entrypoint for job [a-z0-9-]+: exec [^\n]*\n", re.MULTILINE
)


@dataclass(frozen=True)
class RayJob(Record):
    """Ray's answer about a job.

    Example:
        client.job("brave-otter-7f3a-0a1b2c3d-r0000-a0").state
    """

    submission_id: str = checked(text(100, NAME))
    status: str = checked(text(40))
    message: str | None = checked(nullable(text(1 << 20)), None)
    error_type: str | None = checked(nullable(text(100)), None)
    driver_exit_code: int | None = checked(nullable(integer(-255, 255)), None)
    metadata: Mapping[str, Any] | None = checked(nullable(json_object), None)

    def is_of(self, key: JobKey) -> bool:
        """Return True if the job runs an attempt.

        Args:
            key: the run, the rank and the attempt.
        """
        return key.labels.items() <= (self.metadata or {}).items()

    @property
    def state(self) -> JobState:
        """The state of the job as a JobState."""
        code, message = self.driver_exit_code, self.message or ""
        if self.status == "STOPPED":
            return JobState(True, "cancelled")
        if self.status == "SUCCEEDED" or (self.status == "FAILED" and code is not None):
            return JobState(True, None, 128 - code if code and code < 0 else code or 0)
        lines = message.strip().splitlines() or [""]
        summary = one_line(lines[-1 if "Traceback" in message else 0])
        if self.status != "FAILED":
            return JobState(False, message=WAITS.get(self.status, summary))
        is_lost = any(word in summary for word in LOST_WORDS) if self.error_type is None else self.error_type in LOST
        reason: Reason = "lost" if is_lost else "start_failed"
        return JobState(True, reason, None, summary)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, because a redirected request would send the token to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class RayClient:
    """Makes requests to the head of one cluster. Calls may come from several threads, and may raise JobServiceError.

    Args:
        address: the url of the dashboard.
        token_file: a file with the cluster's token. None: no token, unless $RAY_AUTH_TOKEN has one.

    Example:
        RayClient("http://head:8265", None).check()
    """

    def __init__(self, address: str, token_file: str | None) -> None:
        self.address = address
        self._token_file = token_file
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._provided: dict[str, float] = {}
        """The time of the last check of each package."""
        self._providing = threading.Lock()

    def check(self) -> None:
        """Check that a head answers and accepts the token.

        Raises:
            JobServiceError: no head answers at the address, or it refuses the token.
        """
        self._take(self._need("GET", "/api/version"), "/api/version", "ray_version", text(100))

    def job(self, name: str) -> RayJob | None:
        """Return Ray's answer about a job. None if Ray does not know the job.

        Args:
            name: the name of the job.
        """
        path = f"/api/jobs/{name}"
        if (answer := self._ask("GET", path)) is None:
            return None
        with self._reading():
            return RayJob.parse(answer, path, self.address)

    def jobs(self, names: Collection[str]) -> dict[str, RayJob]:
        """Return Ray's answers about several jobs, from its list of jobs. A list that is too large has none of them.

        Args:
            names: the names of the jobs.
        """
        return {job.submission_id: job for job in self._listed(lambda each: str(each.get("submission_id")) in names)}

    def jobs_with(self, labels: Mapping[str, str]) -> list[RayJob]:
        """Return the jobs in Ray's list that have these labels as metadata.

        Args:
            labels: the labels.
        """
        return self._listed(
            lambda each: isinstance(its := each.get("metadata"), dict) and labels.items() <= its.items()
        )

    def _listed(self, is_wanted: Callable[[Mapping[str, Any]], bool]) -> list[RayJob]:
        answer, found = self._need("GET", "/api/jobs/", max_bytes=MAX_LIST_BYTES), list[RayJob]()
        with contextlib.suppress(ValueError, RecursionError):
            listed = json.loads(answer)
            for each in listed if isinstance(listed, list) else ():
                if isinstance(each, dict) and is_wanted(each):
                    with contextlib.suppress(CorruptObjectError):
                        found.append(RayJob.parse(each))
        return found

    def submit(self, request: Mapping[str, Any]) -> None:
        """Start a job. If its name is taken, the message of the error has "already exists".

        Args:
            request: the body of the request.
        """
        path = "/api/jobs/"
        answer = self._need("POST", path, json.dumps(request).encode(), lost="unknown")
        self._take(answer, path, "submission_id", text(100, NAME), "unknown")

    def stop(self, name: str) -> None:
        """End a job. A job that has ended or that Ray does not know is not an error.

        Args:
            name: the name of the job.
        """
        self._ask("POST", f"/api/jobs/{name}/stop", b"")

    def log(self, name: str) -> str:
        """Return the whole log of a job. It is empty if Ray does not know the job, or its node is gone.

        Args:
            name: the name of the job.
        """
        path = f"/api/jobs/{name}/logs"
        answer = self._ask("GET", path, max_bytes=MAX_LOG_BYTES, none_at=(404, 500))
        if answer is None:
            return ""
        if len(answer) > MAX_LOG_BYTES:
            problem = f"The log of {name} has more than {MAX_LOG_BYTES >> 20} MiB, and Ray can only send whole logs."
            raise JobServiceError(f"{problem} Read it with: ray job logs {name}", "rejected")
        return RAYS_LINES.sub("", self._take(answer, path, "logs", text(MAX_LOG_BYTES)), count=2)

    def provide(self, script: str) -> None:
        """Send the package of a script to Ray if Ray does not have it, so that the next job can use it.

        Args:
            script: the script.
        """
        package, data = package_of(script)
        with self._providing:
            if time.monotonic() - self._provided.get(package, float("-inf")) > PACKAGE_STAYS_S:
                path = f"/api/packages/gcs/{package}"
                if self._ask("GET", path) is None:
                    self._need("PUT", path, data)
                self._provided[package] = time.monotonic()

    def _take(self, answer: bytes, path: str, name: str, check: Check[str], lost: Kind = "unavailable") -> str:
        """Return one field of an answer."""
        with self._reading(lost):
            return Fields(answer, path, self.address).take(name, check)

    @contextlib.contextmanager
    def _reading(self, lost: Kind = "unavailable") -> Iterator[None]:
        try:
            yield
        except CorruptObjectError as error:
            raise JobServiceError(f"This is not an answer of Ray: {error}", lost) from error

    def _need(self, method: str, path: str, body: bytes | None = None, **more: Any) -> bytes:
        if (answer := self._ask(method, path, body, **more)) is None:
            raise self._no_ray(path)
        return answer

    def _no_ray(self, path: str) -> JobServiceError:
        return JobServiceError(
            f"{self.address} is not the dashboard of a Ray cluster: it has no {path}. Give the url of the dashboard: "
            "--option address=…",
            "unavailable",
        )

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        lost: Kind = "unavailable",
        max_bytes: int = MAX_ANSWER_BYTES,
        none_at: tuple[int, ...] = (404,),
    ) -> bytes | None:
        """Make a request, and return the body of the answer. None if the answer has a status in `none_at`.

        Args:
            method: the HTTP method.
            path: the path of the url.
            body: the body of the request. Default: none.
            lost: the kind of the error if the answer is lost, so that Ray may have acted.
            max_bytes: the largest body. One byte more is read, so that the caller sees that a body is too large.
            none_at: the HTTP statuses for which None is returned.

        Raises:
            JobServiceError: the request failed.
        """
        try:
            status, answer = call_with_timeout(CALL_LIMIT_S, lambda: self._send(method, path, body, max_bytes))
        except (OSError, http.client.HTTPException) as error:
            why = error.reason if isinstance(error, urllib.error.URLError) else error
            kind = "unavailable" if isinstance(why, (ConnectionRefusedError, socket.gaierror)) else lost
            problem = one_line(str(why)) or type(why).__name__
            raise JobServiceError(f"Ray at {self.address} cannot be reached: {problem}.", kind) from error
        if status < 300:
            return answer
        if status in none_at and (status != 404 or b"does not exist" in answer):
            return None
        if status == 404:  # not from Ray, but for example from a proxy, so Ray has not acted
            raise self._no_ray(path)
        lines = answer.decode(errors="replace").strip(" .\n").splitlines() or [""]
        problem = f"Ray at {self.address}: {one_line(lines[-1]).rstrip('.') or 'it gave no reason'} (HTTP {status})."
        if status >= 500 or status in (408, 429):
            raise JobServiceError(problem, lost if status >= 500 else "unavailable")
        if status < 400:
            problem += " It redirects to another address. Give the final address, because the token is sent there."
        raise JobServiceError(f"{problem} {TOKEN_ADVICE}" if status in (401, 403) else problem, "rejected")

    def _send(self, method: str, path: str, body: bytes | None, max_bytes: int) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json", **self._authorization()}
        request = urllib.request.Request(f"{self.address}{path}", body, headers, method=method)
        try:
            with self._opener.open(request, timeout=CALL_LIMIT_S) as answer:
                return answer.status, answer.read(max_bytes + 1)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(MAX_REFUSAL_BYTES)

    def _authorization(self) -> dict[str, str]:
        token, file = os.environ.get("RAY_AUTH_TOKEN", ""), self._token_file
        if not token and file is not None:
            try:
                with Path(file).open("rb") as opened:
                    token = opened.read(10_000).decode(errors="replace").strip()
            except OSError as error:
                problem = f"Ray's token cannot be read from {file!r}: {error.strerror}."
                raise JobServiceError(f"{problem} {TOKEN_ADVICE}", "rejected") from error
        if not token:
            return {}
        if not TOKEN.fullmatch(token):  # the message must not show the token
            raise JobServiceError(f"Ray's token has a character that no token can have. {TOKEN_ADVICE}", "rejected")
        return {"Authorization": f"Bearer {token}"}


def package_of(script: str) -> tuple[str, bytes]:
    """Return the name and the bytes of a zip file with a script. They are the same on every machine.

    Args:
        script: the script.

    Example:
        name, data = package_of("print('hello')")
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(SCRIPT), script)
    data = file.getvalue()
    return f"_ray_pkg_{hashlib.sha256(data).hexdigest()[:16]}.zip", data
