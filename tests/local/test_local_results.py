"""Arguments and results of local replicas. `unit/executors/test_result.py` has all values that an entrypoint may
return.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.runs import folder_of, without_store

from executors import LocalProcessExecutor, current_replica, launch, list_runs
from executors.attempt import Attempt
from executors.errors import EntrypointError
from executors.testing import eventually


def test_the_result_of_an_entrypoint_is_returned_or_refused(local: LocalProcessExecutor) -> None:
    values = [
        {"a": [1, -2.5, 1e300, True, None, "ä\n🦦\0"], "": {}, "nested": {"deep": [[[]]]}, "big": 2**70},
        None,
        "lone \udcff surrogate",
        [math.inf, -math.inf],
        math.nan,
        {"names": {1}},
        10**10_000,
    ]

    def entrypoint() -> Any:
        from executors import current_replica

        return values[current_replica().rank]

    run = launch(local, entrypoint, len(values))
    assert run.wait(timeout=60)
    *returned, nan, a_set, too_long = run.outcomes()
    assert [outcome.result for outcome in returned] == values[:4]
    assert {(outcome.status, outcome.reason) for outcome in (*returned, nan)} == {("succeeded", None)}
    assert math.isnan(nan.result)
    assert "result['names'] is a set" in (a_set.error or "")
    assert {(outcome.status, outcome.reason) for outcome in (a_set, too_long)} == {
        ("failed", "result_not_serializable")
    }


def test_methods_partials_and_callable_objects_are_entrypoints(local: LocalProcessExecutor) -> None:
    class Trainer:
        def __init__(self, width: int) -> None:
            self.width = width

        def fit(self, steps: int) -> int:
            return self.width * steps

        def __call__(self, steps: int) -> int:
            return self.width + steps

    trainer = Trainer(10)
    partials = functools.partial(trainer.fit, steps=3), functools.partial(trainer.fit)
    found = [launch(local, each, 1, args={"steps": 3}).results() for each in (trainer.fit, trainer, *partials)]
    assert found == [[30], [13], [30], [30]]


def test_arguments_travel_as_copies_whatever_their_size(local: LocalProcessExecutor) -> None:
    blob = bytes(range(256)) * (100 * 4096)  # 100 MiB
    numbers = [1]

    def entrypoint(blob: bytes, given: list[int]) -> list[int]:
        given.append(2)
        numbers.append(3)
        return [len(blob), blob[-1], len(given) + len(numbers)]

    assert launch(local, entrypoint, 2, args={"blob": blob, "given": [0]}).results() == [[len(blob), 255, 4]] * 2
    assert numbers == [1]
    text = "ä" * 3_000_000
    (result,) = launch(local, "executors.testing.tasks:echo", 1, args={"text": text}).results()
    assert result["args"]["text"] == text, "the argument of an entrypoint that is given by name arrives unchanged"


def test_a_function_that_cannot_be_pickled_is_refused_before_anything_starts(local: LocalProcessExecutor) -> None:
    lock = threading.Lock()

    def entrypoint() -> None:
        lock.acquire()

    with pytest.raises(EntrypointError, match=r"entrypoint.*cannot be pickled"):
        launch(local, entrypoint, 1)
    assert list_runs() == []


def test_a_result_is_recorded_although_the_store_took_nothing_for_a_while_after_the_entrypoint_returned(
    local: LocalProcessExecutor, tmp_path: Path, state_home: Path
) -> None:
    run = without_store(local, tmp_path, state_home, "cannot be recorded yet", gives_up_s=60.0)
    assert run.results() == ["the result"]
    assert run.logs(rank=0).count("cannot be recorded yet") == 1
    assert sum("cannot be recorded yet" in warning.text for warning in run.warnings()) == 1, (
        "the warning is an event of the run, too"
    )


def test_a_result_that_could_never_be_recorded_is_not_taken_for_an_entrypoint_that_returned_none(
    local: LocalProcessExecutor, tmp_path: Path, state_home: Path
) -> None:
    run = without_store(local, tmp_path, state_home, "Traceback", gives_up_s=0.5)
    assert run.wait(timeout=60)
    (outcome,) = run.outcomes()
    said = "Replica 0 of 1 returned a result that was not recorded. The replica's log has the reason."
    assert (outcome.reason, outcome.error, outcome.fingerprint) == ("no_result", said, None)


def test_an_entrypoint_that_raised_is_not_reported_to_have_ended_by_its_store(
    local: LocalProcessExecutor, tmp_path: Path, state_home: Path
) -> None:
    run = without_store(local, tmp_path, state_home, "StoreError: ", gives_up_s=0.5, error="the bug")
    assert run.wait(timeout=60)
    (outcome,) = run.outcomes()
    said = (
        "Replica 0 of 1 ended by itself with exit code 1. Its store failed, so only the replica's log has the reason."
    )
    assert (outcome.reason, outcome.error, outcome.fingerprint) == ("no_result", said, None)
    assert "ValueError: the bug" in outcome.output_tail


def test_a_directory_that_cannot_be_looked_at_for_a_moment_costs_neither_heartbeats_nor_the_result(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    """The directory behaves like a network file system whose ticket has expired, or whose server does not answer."""

    def entrypoint() -> str:
        me, look = current_replica(), os.stat
        folder, fails = folder_of(me.store.url) / me.run_id, threading.Event()

        def stat(path: Any, **how: Any) -> os.stat_result:
            if path == folder and fails.is_set():
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return look(path, **how)

        vars(os).update(stat=stat)
        fails.set()
        me.report(step=1)
        time.sleep(2.5)  # its heartbeat looks once a second
        fails.clear()
        me.report(step=2)
        attempt = Attempt(me.store, me.run_id, me.rank)
        eventually(
            lambda: (beat := attempt.beat()) is not None and beat.reported.get("step") == 2,
            "the replica writes heartbeats again",
        )
        fails.set()
        return "the result"

    run = launch(local, entrypoint, 1, rendezvous=tmp_path)
    assert run.wait(timeout=60)
    assert "Traceback" not in run.logs(rank=0)
    assert run.results() == ["the result"]
