"""The small records of one attempt of one rank, typed: its claim, heartbeat, cancel marker, intent and handle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executors.protocol import ReplicaHandle
from executors.records import FAR_AHEAD, LONG_AGO, Fields, integer, is_plain_number, json_object, nullable, number, text

MAX_RANK = 10**6  # beyond those launched, replicas may join
MAX_ATTEMPTS = 10_000
PID = integer(1, 2**31 - 1)
TICKS = integer(0, 2**63)


@dataclass(frozen=True)
class Claim:
    """`started.json`: the process that has the attempt."""

    nonce: str
    pid: int | None = None
    """None: a replica that joined without being launched."""
    pid_started: int | None = None
    host: str = ""

    @classmethod
    def parse(cls, data: Any, key: str = "started.json", url: str = "") -> Claim:
        fields = Fields(data, key, url)
        return cls(
            nonce=fields.take("nonce", text(100)),
            pid=fields.take("pid", nullable(PID), None),
            pid_started=fields.take("pid_started", nullable(TICKS), None),
            host=fields.take("host", text(1000), ""),
        )


@dataclass(frozen=True)
class Beat:
    """`heartbeat.json`: that a replica lived at a time, and what it reported last."""

    at: float
    reported: Mapping[str, float]

    @classmethod
    def parse(cls, data: Any, key: str = "heartbeat.json", url: str = "") -> Beat:
        fields = Fields(data, key, url)
        at = fields.take("at", number(LONG_AGO, FAR_AHEAD))
        # Reports are for people only: one that is no number to show is left out, and the others are shown.
        reported = {name: value for name, value in fields.values.items() if name != "at" and is_plain_number(value)}
        return cls(at, reported)


@dataclass(frozen=True)
class CancelMarker:
    """`cancel.json`: somebody asked the attempt to end."""

    why: str

    @classmethod
    def parse(cls, data: Any, key: str = "cancel.json", url: str = "") -> CancelMarker:
        return cls(Fields(data, key, url).take("why", text(), "cancelled"))


@dataclass(frozen=True)
class Intent:
    """`intent.json`: somebody is about to ask a cloud for a replica."""

    nonce: str
    by: str
    at: float

    @classmethod
    def parse(cls, data: Any, key: str = "intent.json", url: str = "") -> Intent:
        fields = Fields(data, key, url)
        return cls(
            nonce=fields.take("nonce", text(100)),
            by=fields.take("by", text(1000)),
            at=fields.take("at", number(LONG_AGO, FAR_AHEAD)),
        )


def parse_handle(data: Any, key: str = "handle.json", url: str = "") -> ReplicaHandle:
    """Read `handle.json`: what an executor needs to find a replica again.

    Its metadata is the executor's own, which has to check what it takes from it.
    """
    fields = Fields(data, key, url)
    return ReplicaHandle(
        rank=fields.take("rank", integer(0, MAX_RANK)),
        backend_name=fields.take("backend_name", text(100)),
        metadata=fields.take("metadata", json_object),
    )
