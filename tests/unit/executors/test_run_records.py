"""Tests runs whose records were moved, are damaged, or have texts of several lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from executors import LocalProcessExecutor, attach, launch, list_runs
from executors.errors import ReplicaFailedError, RunNotFoundError
from executors.run.removal import remove_run
from executors.store.memory import MemoryStore

PLAIN = LocalProcessExecutor(preload=())


def raise_three_lines() -> None:
    raise ValueError("line one\nline two\nline three")


def test_a_failure_is_named_by_the_line_that_begins_its_exception() -> None:
    run = launch(PLAIN, raise_three_lines, 2)
    with pytest.raises(ReplicaFailedError) as caught:
        run.results()
    assert re.match(r"ValueError: line one \(rank [01] of 2, \S*test_run_records.py:\d+\)\n", str(caught.value))
    assert re.search(r"The same happened to rank [01]\.", "\n".join(caught.value.__notes__))
    assert run.status().replicas[0].note == "exception: ValueError: line one"


def test_a_moved_store_is_found_at_the_address_that_the_user_gives(tmp_path: Path) -> None:
    run = launch(PLAIN, str, 1, rendezvous=tmp_path / "here", run_id="mover")
    assert run.results() == [""]
    (tmp_path / "here").rename(tmp_path / "there")
    assert attach(f"{tmp_path}/there/mover").results() == [""]


def test_looking_for_runs_makes_no_directories(tmp_path: Path) -> None:
    for look in (lambda: attach(f"{tmp_path}/typo/run"), lambda: list_runs(tmp_path / "typo")):
        with pytest.raises(RunNotFoundError, match="there is no such directory"):
            look()
    assert list(tmp_path.glob("typo*")) == []


def test_a_broken_record_hides_no_other_run_and_can_be_removed(state_home: Path) -> None:
    launch(PLAIN, str, 1, run_id="whole").wait(30)
    broken = state_home / "replicas" / "broken"
    broken.mkdir()
    (broken / "run.json").write_text("{half a rec")
    assert {run.run_id for run in list_runs()} == {"whole", "broken"}
    assert "<Run 'broken': cannot be read, file:///" in repr(list_runs())
    attach("broken").remove()
    assert [run.run_id for run in list_runs()] == ["whole"]


def test_removing_a_run_from_a_bucket_deletes_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store._url = "s3://bucket"
    names = ("decisions/000000.json", "replicas/0000/0/outcome.json", "run.json", "task/task.json")
    for name in (*names, *(f"metrics/0000/0/{number:06d}.jsonl" for number in range(6000))):
        store.put(f"run/{name}", b"{}")
    for key in ("run.json", "runs/run.json"):
        store.put(key, b"{}")
    batches, deleted, told = list[int](), list[str](), list[str]()
    delete = store.delete

    def in_parallel(act: Callable[[str], object], items: Sequence[str]) -> list[object]:
        batches.append(len(items))
        return [*map(act, items)]

    def note_and_delete(key: str) -> None:
        deleted.append(key)
        delete(key)

    monkeypatch.setattr("executors.store.parallel.in_parallel", in_parallel)
    monkeypatch.setattr(store, "delete", note_and_delete)
    remove_run(store, "run", told.append)
    assert [entry.key for entry in store.list("")] == ["run.json", "runs/run.json"]
    assert sum(batches) == 6003
    assert {*deleted[-4:-2]} == {"run/decisions/000000.json", "run/replicas/0000/0/outcome.json"}
    assert deleted[-2:] == ["run/run.json", "run/removing.json"], "the record of the removal is deleted last"
    assert told[1] == "4,096 of 6,003 objects"


def test_a_cancelled_replica_reports_the_reason() -> None:
    with launch(PLAIN, "signal:pause", 1) as run:
        run.cancel()
    (outcome,) = run.outcomes()
    assert outcome.error is not None
    assert "cancelled by the user" in outcome.error


@pytest.mark.parametrize("run", [None, Path("runs/otter")])
def test_a_run_that_is_not_named_by_a_string_is_refused(run: Any) -> None:
    with pytest.raises(TypeError, match="A run must be given by its id, or as"):
        attach(run)


@pytest.mark.parametrize("entrypoint", [5, None, ["f"]])
def test_an_entrypoint_that_cannot_be_called_is_refused(entrypoint: object) -> None:
    with pytest.raises(TypeError, match="entrypoint must be a callable or the name of one"):
        launch(PLAIN, entrypoint, 1)  # type: ignore[arg-type]
