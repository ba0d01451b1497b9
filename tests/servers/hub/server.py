"""The Hugging Face Hub's jobs API on loopback, for the real `huggingface_hub` client.

    with hub_server() as server:
        api = HfApi(endpoint=server.endpoint, token=server.token)
        job = api.run_job(image="python:3.12", command=["python", "-c", "print(1)"], namespace=server.namespace)

Jobs run as local processes (`servers.hub.jobs`). `HubServer.fail` adds faults. The end of the block ends every process.
The block fails at its end if the client sent a request that this server does not support.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from servers.hub.faults import Fault, Faults, Misconduct, Request
from servers.hub.hardware import FLAVORS
from servers.hub.http import HttpServer
from servers.hub.jobs import Job, Jobs
from servers.hub.wire import (
    Refusal,
    checked_spec,
    job_on_wire,
    log_events,
    owner_id,
)

JOB = "/api/jobs/(?P<namespace>[^/]+)/(?P<job_id>[^/]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", "whoami"),
    ("GET", "/api/jobs/hardware", "hardware"),
    ("POST", "/api/jobs/(?P<namespace>[^/]+)", "create"),
    ("GET", "/api/jobs/(?P<namespace>[^/]+)", "list"),
    ("GET", JOB, "inspect"),
    ("GET", f"{JOB}/logs", "logs"),
    ("POST", f"{JOB}/cancel", "cancel"),
]


@dataclass
class Reply:
    """An answer without faults: a JSON value, or a stream of events."""

    value: Any = None
    events: Iterator[str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class HubServer:
    """The server and its controls for tests.

    `requests` has every request so far, and `complaints` has the requests that this server does not support. A test may
    set `jobs.term_grace_s`, and `latency_s`, the delay of every answer, at any time.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.token = f"hf_{secrets.token_hex(17)}"
        self.requests: list[Request] = []
        self.complaints: list[str] = []
        self.latency_s = 0.0
        self.may_speak = threading.Event()
        self.may_speak.set()
        self.page_size: int | None = None
        """The number of jobs on one page of a list. None: all jobs."""
        self.faults = Faults()
        self._folder = Path(tempfile.mkdtemp(prefix="hub-"))
        self.jobs = Jobs(self._folder)
        self._http = HttpServer(self)
        self.endpoint = self._http.endpoint

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which a client in another process uses only this server."""
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": self.token, "HF_HUB_DISABLE_TELEMETRY": "1"}

    def fail(
        self,
        route: str,
        answer: Misconduct = 500,
        *,
        times: int | None = 1,
        after_applying: bool = False,
        when: Callable[[Request], bool] | None = None,
        headers: Mapping[str, str] | None = None,
        after_lines: int | None = None,
    ) -> None:
        """Plan a fault for the next requests for a route.

        Args:
            route: One of `servers.hub.faults.ROUTES`.
            answer: An error status, or a fault of the connection, as `Misconduct` lists them.
            times: The number of requests that the fault hits. None: all until `forgive`.
            after_applying: True: execute the request first, so that only the answer is lost.
            when: A condition. Only requests that fulfill it are hit.
            headers: More headers of an error, such as `Retry-After`.
            after_lines: The number of lines of a log before the fault, after the line about the start of the job.
        """
        if answer == "silent":
            self.may_speak.clear()
        fault = Fault(answer, times, after_applying, when, headers or {}, after_lines)
        self.faults.add(route, fault)

    def forgive(self) -> None:
        """Remove all planned faults, and close the connections that wait for an answer."""
        self.faults.clear()
        self.may_speak.set()

    def hold(self, flavor: str) -> None:
        """Take away the hardware of a flavor. Its jobs wait in SCHEDULING until `release`."""
        assert flavor in FLAVORS, flavor
        self.jobs.held.add(flavor)

    def release(self, flavor: str) -> None:
        with self.jobs.changed:
            self.jobs.held.discard(flavor)
            self.jobs.changed.notify_all()

    def job(self, job_id: str) -> Job:
        """Return the server's own record of a job: its process, its lines and its stage."""
        job = self.jobs.find(job_id)
        assert job is not None, f"there is no job {job_id}"
        return job

    def until(self, ready: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Wait until a condition on the jobs is true."""
        with self.jobs.changed:
            assert self.jobs.changed.wait_for(ready, timeout_s), f"the condition was not true within {timeout_s} s"

    def kill(self, job_id: str, reason: str = "Error") -> None:
        """Kill a job's process with SIGKILL; the job's message names the reason, such as "OOMKilled"."""
        self.jobs.kill(self.job(job_id), reason)

    def delete(self, job_id: str) -> None:
        """End a job and show it as DELETED."""
        self.jobs.delete(self.job(job_id))

    def forget(self, job_id: str) -> None:
        """End a job, and answer 404 to all later requests for it."""
        self.jobs.forget(self.job(job_id))

    def count(self, route: str) -> int:
        """Return the number of requests for a route so far."""
        return sum(request.route == route for request in self.requests)

    def places_of(self, value: str) -> list[str]:
        """Return the requests that contain a value anywhere except in the secrets of a new job."""
        return [
            f"{request.method} {request.path}"
            for request in self.requests
            if any(value in text for text in request.texts_beside_secrets())
        ]

    def close(self) -> None:
        """Close all connections, end every process, and remove the files of the jobs."""
        self.forgive()
        self.jobs.stop_streams()
        self._http.close()
        self.jobs.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def route_of(self, request: Request) -> dict[str, str] | None:
        """Set the route of a request, and return the values in its path. None: the server has no such route."""
        for method, pattern, name in ROUTES:
            if request.method == method and (match := re.fullmatch(pattern, request.path)):
                request.route = name
                return match.groupdict()
        self.complaints.append(f"no such route: {request.method} {request.path}")
        return None

    def apply(self, request: Request, token: str | None, path: dict[str, str]) -> Reply:
        """Execute a request, and return the answer.

        Raises:
            Refusal: The vendor would answer with an error.
        """
        if token != self.token and (token is not None or request.route != "hardware"):
            raise Refusal(401, "Invalid username or password.")
        if path.get("namespace", self.namespace) != self.namespace:
            raise Refusal(403, f"You don't have the required permissions for {path['namespace']}'s jobs")
        if "job_id" not in path:
            return getattr(self, f"_{request.route}")(request)  # type: ignore[no-any-return]
        job = self.jobs.find(path["job_id"], path["namespace"])
        if job is None:
            raise Refusal(404, "Job not found")
        return getattr(self, f"_{request.route}")(request, job)  # type: ignore[no-any-return]

    def _whoami(self, _request: Request) -> Reply:
        access = {"type": "access_token", "accessToken": {"displayName": "tests", "role": "write"}}
        user = {"type": "user", "id": owner_id(self.namespace), "name": self.namespace, "fullname": self.namespace}
        return Reply({**user, "isPro": True, "orgs": [], "auth": access})

    def _hardware(self, _request: Request) -> Reply:
        return Reply([flavor.to_wire() for flavor in FLAVORS.values()])

    def _create(self, request: Request) -> Reply:
        user = {"type": "user", "id": owner_id(self.namespace), "name": self.namespace}
        return self._shown(self.jobs.create(self.namespace, checked_spec(request.json), user))

    def _list(self, request: Request) -> Reply:
        """Answer with the jobs that have the labels, the newest first, and with the link to the next page that
        `paginate` follows.
        """
        query = parse_qsl(request.query, keep_blank_values=True)
        labels = [value for key, value in query if key == "label"]
        found = [job for job in self.jobs.newest_first() if job.has(labels)]
        begin = int(dict(query).get("cursor", 0))
        end = begin + (self.page_size or len(found))
        more = urlencode([*((key, value) for key, value in query if key != "cursor"), ("cursor", end)])
        link = {"Link": f'<{self.endpoint}{request.path}?{more}>; rel="next"'} if end < len(found) else {}
        with self.jobs.changed:
            return Reply([job_on_wire(job) for job in found[begin:end]], headers=link)

    def _inspect(self, _request: Request, job: Job) -> Reply:
        return self._shown(job)

    def _logs(self, request: Request, job: Job) -> Reply:
        tail = dict(parse_qsl(request.query)).get("tail")
        if tail is not None and not tail.isdigit():
            raise Refusal(400, "tail must be a number of lines")
        return Reply(events=log_events(self.jobs, job, None if tail is None else int(tail)))

    def _cancel(self, _request: Request, job: Job) -> Reply:
        self.jobs.cancel(job)
        return self._shown(job)

    def _shown(self, job: Job) -> Reply:
        with self.jobs.changed:
            return Reply(job_on_wire(job))


@contextlib.contextmanager
def hub_server(*, namespace: str = "ada") -> Iterator[HubServer]:
    """Start a server on a free port of loopback. At the end of the block, stop the server and every process of its
    jobs.

    Raises:
        AssertionError: At the end of the block, if a request was not supported, or the server itself had an error.
    """
    server = HubServer(namespace)
    try:
        yield server
    finally:
        server.close()
    assert not server.complaints, "\n".join(server.complaints)
