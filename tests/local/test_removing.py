"""Removing a run: a removal that is killed is finished by the next one, and no resume or addition slips past it."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
from servers.s3.server import S3Server
from support.cli import HereInstead

from executors import LocalProcessExecutor, Run, attach, launch, list_runs
from executors.errors import (
    CorruptObjectError,
    LaunchError,
    RunBeingRemovedError,
    RunExistsError,
    RunNotFoundError,
)
from executors.registry.run_index import is_state_dir
from executors.restarts.decision_log import DecisionLog
from executors.restarts.orders import order_resume
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store import Store
from executors.store.faulty import FaultyStore
from executors.store.record_names import removal_key
from executors.task import addition_record
from executors.task.removal_record import Removal, find_removal, write_removal
from executors.testing import eventually

PLAIN = LocalProcessExecutor(preload=(), term_grace_s=0.5)
PLACES = ("state", "directory", "bucket")


class KilledError(BaseException):
    """Simulates a SIGKILL, because no code of the product catches this exception."""


class StartsNothing(LocalProcessExecutor):
    """Refuses each start, so that a resume does everything but start processes."""

    def start_ranks(self, *args: Any, **more: Any) -> NoReturn:
        raise LaunchError("no process can be started")


class Countdown:
    """Simulates a kill of this process at the n-th deletion of a file or folder of this machine."""

    left = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if Countdown.left and event in ("os.remove", "os.rmdir", "shutil.rmtree"):
            Countdown.left -= 1
            if Countdown.left == 0:
                raise KilledError


sys.addaudithook(Countdown())


def fail() -> NoReturn:
    raise RuntimeError("not yet")


@dataclass
class Scene:
    """An ended run, which can be restored as often as a test needs it."""

    store: Store
    state: Path
    saved: Path
    objects: dict[str, bytes]

    @classmethod
    def of(cls, run: Run, state: Path, saved: Path) -> Scene:
        shutil.copytree(state, saved)
        objects = {entry.key: bytes(view_of(run).store.get(entry.key)) for entry in view_of(run).store.list("")}
        return cls(view_of(run).store, state, saved, objects)

    @property
    def rendezvous(self) -> str | None:
        return None if is_state_dir(self.store.url) else self.store.url

    def restore(self) -> None:
        for entry in list(self.store.list("")):
            self.store.delete(entry.key)
        for key, data in self.objects.items():
            self.store.put(key, data)
        shutil.rmtree(self.state, ignore_errors=True)
        shutil.copytree(self.saved, self.state)

    def left(self) -> list[str]:
        """List what is left of the run, in its store and on this machine."""
        files = [path for path in self.state.rglob("*") if path.is_file() and "otter" in str(path)]
        preparing = self.state / "replicas" / ".preparing"
        here = [str(path) for path in files if path.parent != preparing]
        return [entry.key for entry in self.store.list("")] + here


@pytest.fixture
def where(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> str | Path | None:
    """The rendezvous of the run. None: the state directory of this user."""
    if request.param == "bucket":
        return s3.url("runs")
    return tmp_path / "runs" if request.param == "directory" else None


@pytest.fixture
def ended(where: str | Path | None, state_home: Path, tmp_path: Path) -> Scene:
    """A signed run of two ranks, whose log of decisions has the restart of each."""
    run = launch(PLAIN, fail, 2, run_id="otter", rendezvous=where, signed=True, restarts="1,backoff=0.01s:0.02s")
    eventually(lambda: run.status().is_terminal, "both ranks have failed twice")
    assert run.wait(60)
    settled = eventually(lambda: attach("otter").status().is_terminal, "the run has ended")
    assert settled
    return Scene.of(run, state_home, tmp_path / "saved")


def remove_until(call: int, verb_of: str) -> bool:
    """Remove the run, and die at one call. Return True if that call was reached.

    Args:
        call: its number, from 1.
        verb_of: "store" counts calls of the run's store, "files" counts deletions of files on this machine.
    """
    run = attach("otter")
    store = view_of(run).store = FaultyStore(view_of(run).store, seed=0)
    if verb_of == "store":
        store.fail_at("*", count=call, before=die)
    else:
        Countdown.left = call
    try:
        run.remove()
    except KilledError:
        return True
    finally:
        Countdown.left = 0
    return False


def die() -> NoReturn:
    raise KilledError


@pytest.mark.parametrize("where", PLACES, indirect=True)
@pytest.mark.parametrize("verb_of", ["store", "files"])
def test_a_removal_that_is_killed_anywhere_is_finished_by_the_next(ended: Scene, verb_of: str) -> None:
    for call in itertools.count(1):
        ended.restore()
        was_killed = remove_until(call, verb_of)
        if not was_killed:
            break
        if ended.left():
            (found,) = list_runs()
            assert found.run_id == "otter"
            attach("otter").remove()
        assert ended.left() == [], f"killed at {verb_of} call {call}"
        assert list_runs() == []
    assert ended.left() == []
    assert call > (12 if verb_of == "store" else 3), "the calls were counted"


@pytest.mark.parametrize("where", PLACES, indirect=True)
def test_every_verb_knows_a_run_whose_removal_was_interrupted(ended: Scene, here: HereInstead) -> None:
    seen = set[str]()
    for call in itertools.count(1):
        ended.restore()
        if not remove_until(call, "store"):
            break
        if not ended.left():
            continue
        (row,) = here.replicas("ls", "--json").json["runs"]
        told = here.replicas("status", "otter", "--json")
        assert told.code == 0
        assert row["status"] == told.json["status"], f"call {call}"
        assert row["status"] in ("failed", "being removed"), f"call {call}: nothing runs"
        seen.add(row["status"])
        if row["status"] == "being removed":
            assert "replicas rm otter" in row["problem"]
            assert "To finish the removal: replicas rm otter" in here.replicas("status", "otter").stdout
            for verb in (["resume", "otter"], ["wait", "otter"], ["add", "otter", "--backend", "local", "--n", 1]):
                refused = here.replicas(*verb)
                assert (refused.code, "To finish the removal: replicas rm otter" in refused.stderr) == (2, True), verb
            with pytest.raises(RunExistsError):
                launch(
                    PLAIN,
                    fail,
                    1,
                    run_id="otter",
                    rendezvous=None if is_state_dir(ended.store.url) else ended.store.url,
                )
        if call % 4 == 0:
            assert here.replicas("rm", "otter").code == 0
            assert ended.left() == []
    assert seen == {"failed", "being removed"}


def test_a_removal_by_a_living_process_is_named_as_such(here: HereInstead) -> None:
    run = launch(PLAIN, str, 1, run_id="otter")
    assert run.wait(60)
    write_removal(view_of(run).store, "otter", Removal.new())
    assert "is being removed by" in here.replicas("status", "otter").stdout


def attempt_to_remove() -> str:
    try:
        attach("otter").remove()
    except RunExistsError:
        return "refused"
    return "removed"


def attempt_to_resume() -> str:
    try:
        resume(Run(view_of(attach("otter")).store, "otter", executor=StartsNothing(preload=())))
    except RunNotFoundError:
        return "refused"
    except LaunchError:
        return "ordered"
    return "resumed"


@pytest.mark.parametrize("where", ["directory", "bucket"], indirect=True)
@pytest.mark.parametrize("first", ["rm", "resume"])
def test_at_least_one_of_a_removal_and_a_resume_at_the_same_time_sees_the_other(ended: Scene, first: str) -> None:
    """At each call of one process to the store, the other process makes its whole removal or resume."""
    said = set[tuple[str, str]]()
    for call in itertools.count(1):
        ended.restore()
        others = list[str]()
        run = attach("otter") if first == "rm" else Run(ended.store, "otter", executor=StartsNothing(preload=()))
        store = view_of(run).store = FaultyStore(view_of(run).store, seed=0)
        view_of(run).placements._store = store
        other = attempt_to_resume if first == "rm" else attempt_to_remove

        def act(other: Callable[[], str] = other, others: list[str] = others) -> None:
            others.append(other())

        store.fail_at("*", count=call, before=act)
        try:
            run.remove() if first == "rm" else resume(run)
            mine = "removed"
        except RunNotFoundError:
            mine = "gone"
        except RunExistsError:
            mine = "refused"
        except LaunchError:
            mine = "ordered"
        if not others:
            break
        said.add((mine, others[0]))
        left = [entry.key for entry in ended.store.list("")]
        if "otter/run.json" in left:
            assert {*ended.objects} <= {*left}, f"call {call}: {mine}, {others}: a run that is kept is whole"
            assert find_removal(ended.store, "otter") is None
        else:
            assert left == [], f"call {call}: {mine}, {others}"
    assert {mine for mine, _ in said} >= ({"removed"} if first == "rm" else {"gone", "ordered"}), said
    assert {other for _, other in said} >= ({"refused", "ordered"} if first == "rm" else {"refused", "removed"}), said
    assert call > 10


def test_a_run_whose_successful_ranks_are_about_to_be_extended_is_not_removed() -> None:
    run = launch(PLAIN, str, 2, run_id="otter")
    assert run.wait(60)
    assert order_resume(DecisionLog(view_of(run).store, "otter"), {1: 1}, 0) is None
    with pytest.raises(RunExistsError, match=r"still runs: rank 1 being resumed\. Cancel it first"):
        attach("otter").remove()


def hang() -> None:
    time.sleep(600)


@pytest.fixture
def hanging() -> Iterator[Run]:
    run = launch(PLAIN, hang, 1, run_id="otter")
    eventually(lambda: run.status().status == "running", "the run hangs")
    yield run
    if list(view_of(run).store.list("otter/")):
        run.cancel()


def test_a_run_is_not_removed_while_ranks_are_being_added(hanging: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its replicas end between the record of the new ranks and their start."""
    tried = list[str]()
    take = addition_record.take_ranks

    def take_and_remove(*args: Any) -> Any:
        ranks = take(*args)
        hanging.cancel()
        tried.append(attempt_to_remove())
        return ranks

    monkeypatch.setattr("executors.run.addition.take_ranks", take_and_remove)
    attach("otter").add("local", 1)
    assert tried == ["refused"]
    attach("otter").cancel()


def test_an_addition_that_comes_after_the_removal_leaves_nothing(hanging: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    take = addition_record.take_ranks

    def remove_and_take(*args: Any) -> Any:
        hanging.cancel()
        assert attempt_to_remove() == "removed"
        return take(*args)

    monkeypatch.setattr("executors.run.addition.take_ranks", remove_and_take)
    with pytest.raises(RunBeingRemovedError, match="was removed"):
        attach("otter").add("local", 1)
    assert [entry.key for entry in view_of(hanging).store.list("otter/")] == []


def test_a_removal_that_died_before_it_deleted_anything_stops_no_resume(here: HereInstead) -> None:
    run = launch(PLAIN, fail, 1, run_id="otter")
    eventually(lambda: run.status().is_terminal, "the run has ended")
    new = vars(Removal.new())
    machine, _, _ = str(new["process"]).rpartition(" ")[0].rpartition(" ")
    write_removal(view_of(run).store, "otter", Removal(**{**new, "process": f"{machine} {2**31 - 1} 1"}))
    assert here.replicas("status", "otter", "--json").json["status"] == "failed"
    assert attempt_to_resume() == "ordered"
    attach("otter").remove()
    assert list(view_of(run).store.list("otter/")) == []


BAD_REMOVALS = {
    "nothing": b"",
    "an empty object": b"{}",
    "a list": b"[]",
    "half": b'{"nonce": "x", "by',
    "no text": b"\xff\xfe",
    "a time of no year": b'{"nonce": "x", "by": "y", "at": 1e300}',
    "no time": b'{"nonce": "x", "by": "y", "at": NaN}',
    "an endless name": json.dumps({"nonce": "x", "by": "y" * 100_000, "at": 1.0}).encode(),
    "a process of no shape": b'{"nonce": "x", "by": "y", "at": 1.0, "process": "init 1"}',
    "two megabytes": json.dumps({"nonce": "x", "by": "y", "at": 1.0, "more": "z" * 2_000_000}).encode(),
}


@pytest.mark.parametrize("data", BAD_REMOVALS.values(), ids=BAD_REMOVALS)
def test_a_foreign_record_of_a_removal_is_refused_by_name_and_the_run_can_be_removed(data: bytes) -> None:
    run = launch(PLAIN, str, 1, run_id="otter")
    assert run.wait(60)
    view_of(run).store.put(removal_key("otter"), data)
    with pytest.raises(CorruptObjectError, match=r"'otter/removing\.json' in .* (cannot be read|has 2000048 bytes)"):
        view_of(attach("otter")).check_not_removed()
    with pytest.raises(CorruptObjectError, match=r"otter/removing\.json"):
        resume(attach("otter"))
    attach("otter").remove()
    assert list(view_of(run).store.list("otter/")) == []
