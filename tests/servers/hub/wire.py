"""The bodies of the Hub's job routes, as JSON and as server-sent events."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from servers.hub.hardware import FLAVORS
from servers.hub.jobs import Job, Jobs

LABEL_KEY = re.compile(r"[A-Za-z0-9_-]{1,100}")
LABEL_VALUE = re.compile(r"[A-Za-z0-9_-]{0,100}")
TAKEN = {
    "dockerImage", "command", "arguments", "environment", "secrets", "flavor", "timeoutSeconds", "attempts", "labels",
    "volumes",
}  # fmt: skip
KEEP_ALIVE_S = 30.0


class Refusal(Exception):
    """Raised to answer a request with an error."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text or HTTPStatus(status).phrase)
        self.status = status


def checked_labels(labels: Any) -> dict[str, str]:
    """Return labels after checking them against the vendor's rules.

    Raises:
        Refusal: a label breaks a rule.
    """
    if not _is_map_of_texts(labels):
        raise Refusal(400, "labels must map strings to strings")
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            raise Refusal(400, f"label {key}={value}: only letters, digits, - and _, and at most 100 characters")
    return dict(labels)


def checked_spec(spec: Any) -> dict[str, Any]:
    """Return the body of a request to run a job, if the vendor would accept it.

    Raises:
        Refusal: the vendor would refuse it.
    """
    if not isinstance(spec, dict):
        raise Refusal(400, "the body must be a JSON object")
    if unknown := sorted(spec.keys() - TAKEN):
        raise Refusal(400, f"this server has no {', '.join(unknown)} for jobs")
    if not spec.get("dockerImage"):
        raise Refusal(400, "dockerImage is needed")
    if not _is_list_of_texts(spec.get("command")) or not spec["command"]:
        raise Refusal(400, "command must be a list of strings")
    for name in ("environment", "secrets"):
        if not _is_map_of_texts(spec.get(name, {})):
            raise Refusal(400, f"{name} must map strings to strings")
    if spec.get("flavor") not in FLAVORS:
        raise Refusal(400, f"Invalid flavor {spec.get('flavor')!r}. Known: {', '.join(FLAVORS)}")
    if not isinstance(spec.get("timeoutSeconds"), int) or spec["timeoutSeconds"] < 1:
        raise Refusal(400, "timeoutSeconds must be a positive integer: the service's own is 30 minutes")
    checked_labels(spec.get("labels", {}))
    return spec


def job_on_wire(job: Job) -> dict[str, Any]:
    """Describe a job in the Hub's JSON. It has only the names of the job's secrets."""
    spec = job.spec
    return {
        "type": "job",
        "id": job.id,
        "createdAt": stamp(job.created),
        "startedAt": stamp(job.started) if job.started else None,
        "finishedAt": stamp(job.finished) if job.finished else None,
        "dockerImage": spec.get("dockerImage"),
        "spaceId": None,
        "command": spec["command"],
        "arguments": spec.get("arguments", []),
        "environment": spec.get("environment", {}),
        "secrets": sorted(spec.get("secrets", {})),
        "flavor": job.flavor,
        "labels": job.labels,
        "status": {"stage": job.stage, "message": job.message},
        "owner": {"id": owner_id(job.namespace), "name": job.namespace, "type": "user"},
        "initiator": job.initiator,
    }


def owner_id(namespace: str) -> str:
    return namespace.encode().hex().ljust(24, "0")[:24]


def stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def log_events(jobs: Jobs, job: Job, tail: int | None) -> Iterator[str]:
    """Replay a job's log, then follow it until it ends.

    The line about the start of the job always comes first, for any `tail`, because the vendor sends it so. It is not a
    line of the job. The stream stays open while there is nothing to send.
    """
    yield from _silence(jobs, lambda: job.started is not None or job.log_ended)
    if job.started:
        second = job.started.strftime("%Y-%m-%d %H:%M:%S")
        yield _event({"data": f"===== Job started at {second} =====", "timestamp": second.replace(" ", "T") + "Z"})
    with jobs.changed:
        sent = max(0, len(job.lines) - tail) if tail is not None else 0
    ended = False
    while not ended:
        yield from _silence(jobs, lambda sent=sent: job.log_ended or len(job.lines) > sent)  # type: ignore[misc]
        with jobs.changed:
            lines, ended = job.lines[sent:], job.log_ended or jobs.closing
        for moment, line in lines:
            yield _event({"data": line, "timestamp": stamp(moment)})
        sent += len(lines)


def _silence(jobs: Jobs, is_over: Callable[[], bool]) -> Iterator[str]:
    """Send keep-alive messages in a stream until there is more to send, or the server closes."""
    while True:
        with jobs.changed:
            if jobs.changed.wait_for(lambda: jobs.closing or is_over(), KEEP_ALIVE_S):
                return
        yield ": keep-alive\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_map_of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
