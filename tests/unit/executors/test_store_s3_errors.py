"""Tests how errors of an S3 server are classified: as an outage, or as a refusal of these credentials."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from executors.attempt import Attempt
from executors.errors import StoreError, UnwritableStoreError
from executors.patience import BRIEF, CONTROLLER, FOLLOWER, OUTCOME, ROUND, START, SUPERVISOR, OutageTolerance
from executors.protocol import Outcome, ReplicaStatus
from executors.replica import Replica
from executors.replica.warning_log import WarningLog
from executors.store.memory import MemoryStore
from executors.store.s3.address import S3Address
from executors.store.s3.errors import explain, retried
from executors.worker import main
from executors.worker.heartbeat import Heartbeat

AT = S3Address.parse("s3://bucket/runs")
DEAD = [
    ("ExpiredToken", 400),
    ("ExpiredTokenException", 400),
    ("TokenRefreshRequired", 400),
    ("InvalidToken", 400),
    ("InvalidAccessKeyId", 403),
    ("SignatureDoesNotMatch", 403),
]


def error_of(code: str, status: int, verb: str = "read") -> StoreError:
    answer: Any = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return explain(ClientError(answer, "Act"), AT, "key", verb)


@pytest.mark.parametrize(("code", "status"), DEAD)
def test_invalid_credentials_make_a_store_unwritable_for_every_call(code: str, status: int) -> None:
    for verb in ("create", "write", "read", "list", "delete"):
        assert type(error_of(code, status, verb)) is UnwritableStoreError, verb


@pytest.mark.parametrize(("code", "status"), [("SlowDown", 503), ("AccessDenied", 403), ("NoSuchBucket", 404)])
def test_the_error_of_a_refused_read_does_not_mention_writing(code: str, status: int) -> None:
    assert type(error_of(code, status)) is StoreError


@pytest.mark.parametrize("code", ["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"])
def test_a_token_that_has_expired_is_reported_with_how_replicas_get_another(code: str) -> None:
    assert "`replicas resume` gives them new ones" in str(error_of(code, 400))


def test_a_replica_whose_credentials_have_expired_does_not_wait_for_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    class Expired(MemoryStore):
        def get(self, key: str, **options: Any) -> Any:
            raise error_of("ExpiredToken", 400)

    limits = list[float]()

    def retry(act: Any, patience: OutageTolerance, what: str, **_: Any) -> Any:
        try:
            return act()
        except StoreError as error:
            limits.append(patience.limit_for(error))
            raise

    monkeypatch.setattr(main, "retry", retry)
    worker = object.__new__(main._Worker)
    attempt = Attempt(Expired(), "run", 0)
    replica = Replica(0, 1, "run", 0, "memory://expired", claimed_nonce="n")
    vars(worker).update(attempt=attempt, warnings=WarningLog(attempt), heartbeat=Heartbeat(replica), _log=None)
    with pytest.raises(UnwritableStoreError, match="expired"):
        worker.record(Outcome(0, 0, ReplicaStatus.FAILED, "exception", error="boom"))
    assert limits == [BRIEF.seconds]


@pytest.mark.parametrize(
    ("code", "status", "refusal"),
    [
        ("SlowDown", 503, ""),
        ("RequestTimeTooSkewed", 403, ""),
        ("QuotaExceeded", 403, ""),
        ("AccessDenied", 403, "permission"),
        ("NoSuchBucket", 404, "permission"),
        *((code, status, "credentials") for code, status in DEAD),
    ],
)
def test_an_error_shows_whether_waiting_may_help(code: str, status: int, refusal: str) -> None:
    error = error_of(code, status, "write")
    assert error.refusal == refusal
    for each in (START, ROUND, OUTCOME, SUPERVISOR, CONTROLLER, FOLLOWER):
        assert (each.limit_for(error) == each.seconds) is (refusal == ""), each.process


def test_a_request_that_a_wrong_clock_spoiled_is_sent_again() -> None:
    answer: Any = {"Error": {"Code": "RequestTimeTooSkewed"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    tries = iter([ClientError(answer, "Act"), None])

    def act() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "done"

    assert retried(act, deadline_s=60.0, sleep=lambda seconds: None, clock=lambda: 0.0) == "done"
