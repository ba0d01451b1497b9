"""What the Hub's job routes take and give, as JSON and as server-sent events."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from servers.hub_hardware import FLAVORS
from servers.hub_jobs import Job, Jobs

LABEL_KEY = re.compile(r"[A-Za-z0-9_-]{1,100}")
LABEL_VALUE = re.compile(r"[A-Za-z0-9_-]{0,100}")
NOT_DONE_HERE = ("volumes", "expose", "ssh", "network", "resourceGroupId")
"""Known to the vendor; a local process cannot have them, and a job that asks for one must not seem to."""
SAMPLE_EVERY_S = 1.0


class Refusal(Exception):
    """A request is answered with an error."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text or HTTPStatus(status).phrase)
        self.status = status


def checked_labels(labels: Any) -> dict[str, str]:
    """Return labels that keep the vendor's rules.

    Raises:
        Refusal: They do not.
    """
    if not _is_map_of_texts(labels):
        raise Refusal(400, "labels must map strings to strings")
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            raise Refusal(400, f"label {key}={value}: only letters, digits, - and _, and at most 100 characters")
    return dict(labels)


def checked_spec(spec: Any) -> dict[str, Any]:
    """Return the body of a request to run a job, when the vendor would take it.

    Raises:
        Refusal: It would not.
    """
    if not isinstance(spec, dict):
        raise Refusal(400, "the body must be a JSON object")
    if bool(spec.get("dockerImage")) == bool(spec.get("spaceId")):
        raise Refusal(400, "exactly one of dockerImage and spaceId is needed")
    if not _is_list_of_texts(spec.get("command")) or not spec["command"]:
        raise Refusal(400, "command must be a list of strings")
    if not _is_list_of_texts(spec.get("arguments", [])):
        raise Refusal(400, "arguments must be a list of strings")
    for name in ("environment", "secrets"):
        if not _is_map_of_texts(spec.get(name, {})):
            raise Refusal(400, f"{name} must map strings to strings")
    if spec.get("flavor") not in FLAVORS:
        raise Refusal(400, f"Invalid flavor {spec.get('flavor')!r}. Known: {', '.join(FLAVORS)}")
    for name in ("timeoutSeconds", "attempts"):
        value = spec.get(name, 1)
        if not isinstance(value, int) or value < 1:
            raise Refusal(400, f"{name} must be a positive integer")
    checked_labels(spec.get("labels", {}))
    return spec


def job_on_wire(job: Job) -> dict[str, Any]:
    """Describe a job as the Hub does: the names of its secrets alone."""
    owner = {"id": owner_id(job.namespace), "name": job.namespace, "type": "user"}
    now = datetime.now(UTC)
    started, ended = job.started, job.finished or now
    spec = job.spec
    wire = {
        "type": "job",
        "id": job.id,
        "createdAt": stamp(job.created),
        "startedAt": stamp(started) if started else None,
        "finishedAt": stamp(job.finished) if job.finished else None,
        "dockerImage": spec.get("dockerImage"),
        "spaceId": spec.get("spaceId"),
        "command": spec["command"],
        "arguments": spec.get("arguments", []),
        "environment": spec.get("environment", {}),
        "secrets": sorted(spec.get("secrets", {})),
        "flavor": job.flavor,
        "labels": job.labels,
        "status": {"stage": job.stage, "message": job.message, "failureCount": job.failures},
        "durations": {
            "schedulingSecs": _seconds(job.created, started) if started else None,
            "runningSecs": _seconds(started, ended) if started else None,
            "totalSecs": _seconds(job.created, ended),
        },
        "owner": owner,
        "initiator": job.initiator,
    }
    if "attempts" in spec:
        wire["retry"] = spec["attempts"] - 1
    return wire


def owner_id(namespace: str) -> str:
    return namespace.encode().hex().ljust(24, "0")[:24]


def stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def log_events(jobs: Jobs, job: Job, tail: int | None, keep_alive_s: float) -> Iterator[str]:
    """Replay a job's log, then follow it until it ends.

    The line that says when the job started comes first whatever `tail` is, as the vendor sends it; it is no line of
    the job's. While there is nothing to say the stream stays open.
    """
    yield from _silence(jobs, lambda: job.started is not None or job.log_ended, keep_alive_s)
    if job.started:
        second = job.started.strftime("%Y-%m-%d %H:%M:%S")
        yield _event({"data": f"===== Job started at {second} =====", "timestamp": second.replace(" ", "T") + "Z"})
    with jobs.changed:
        sent = max(0, len(job.lines) - tail) if tail is not None else 0
    ended = False
    while not ended:
        yield from _silence(jobs, lambda sent=sent: job.log_ended or len(job.lines) > sent, keep_alive_s)  # type: ignore[misc]
        with jobs.changed:
            lines, ended = job.lines[sent:], job.log_ended or jobs.closing
        for moment, line in lines:
            yield _event({"data": line, "timestamp": stamp(moment)})
        sent += len(lines)


def _silence(jobs: Jobs, is_over: Callable[[], bool], keep_alive_s: float) -> Iterator[str]:
    """Keep a stream alive until it may go on, or the server closes."""
    while True:
        with jobs.changed:
            if jobs.changed.wait_for(lambda: jobs.closing or is_over(), keep_alive_s):
                return
        yield ": keep-alive\n\n"


def metric_events(jobs: Jobs, job: Job, keep_alive_s: float) -> Iterator[str]:
    """Sample a running job every second. The stream does not end with the job, nor does the vendor's."""
    yield from _silence(jobs, lambda: job.process is not None or job.is_over, keep_alive_s)
    while not jobs.closing and not job.is_over:
        yield f"event: metric\n{_event(_sample(job))}"
        with jobs.changed:
            jobs.changed.wait_for(lambda: jobs.closing or job.is_over, SAMPLE_EVERY_S)
    yield from _silence(jobs, lambda: False, keep_alive_s)


def _sample(job: Job) -> dict[str, Any]:
    """Return what a job's first process uses; its share of the processors is the mean since it started."""
    assert job.process is not None
    assert job.started is not None
    flavor = FLAVORS[job.flavor]
    memory_bytes, cpu_s = _use(job.process.pid)
    elapsed_s = max(1e-3, (datetime.now(UTC) - job.started).total_seconds())
    return {
        "cpu_usage_pct": round(100 * cpu_s / elapsed_s / flavor.cpus),
        "cpu_millicores": 1000 * flavor.cpus,
        "memory_used_bytes": memory_bytes,
        "memory_total_bytes": flavor.memory_gb * 1_000_000_000,
        "rx_bps": 0,
        "tx_bps": 0,
        "gpus": {},
        "replica": job.id[-5:],
    }


def _use(pid: int) -> tuple[int, float]:
    """Return a process's resident memory in bytes and the seconds of processor time it has had."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0, 0.0
    ticks = int(fields[11]) + int(fields[12])
    return int(fields[21]) * os.sysconf("SC_PAGESIZE"), ticks / os.sysconf("SC_CLK_TCK")


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


def _seconds(start: datetime, end: datetime) -> int:
    return int((end - start).total_seconds())


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_map_of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
