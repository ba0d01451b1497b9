"""Rounds in a background thread: which thread waits for which, how errors reach the loop, and how the thread ends."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import pytest
import torch
from support.training import PLAIN, next_process, nudge, place
from torch import nn

from diloco import DiLoCo
from diloco.outer import open_diloco
from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.frames import Seal, SealedReplica
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.round import Limits
from diloco.round_thread import RoundThread
from diloco.testing import run_replicas
from executors.store import MemoryStore
from executors.store.faulty import FaultyStore

KEYS = Keys("test", "main")
PATIENT = Limits(grace_s=1e6)
THREAD = "rounds of diloco"


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    next_process()
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD)]


def zeros() -> nn.Linear:
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def value_of(model: nn.Module) -> float:
    (value,) = set(torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist())
    return float(value)


def anchor_of(diloco: DiLoCo) -> float:
    (value,) = set(diloco.anchor()["weight"].flatten().tolist())
    return float(value)


def begin(store: Any, model: nn.Module, world_size: int = 1, **options: Any) -> DiLoCo:
    """Begin a replica that continues to train from its second step of four."""
    given = {"inner_steps": 4, "overlap_steps": 2, "allow_no_rounds": True, "limits": PATIENT, **PLAIN, **options}
    return open_diloco(model, **given, **place(store, world_size=world_size))


def steps(n: int, model: nn.Module, diloco: DiLoCo) -> list[Any]:
    reports = []
    for _ in range(n):
        nudge(model, 1.0)
        reports.append(diloco.step())
    return reports


def has_said_bye(store: Any) -> bool:
    return [entry.key for entry in store.list("test/diloco/main/bye/")] == [KEYS.bye(0, 0)]


class Gate:
    """A store that holds each writer of a contribution until the gate is open."""

    def __init__(self) -> None:
        self.store = FaultyStore(MemoryStore(), seed=0)
        self.store.fail_at("put_if_absent", key="*/contribution/*", count=None, before=self._pass)
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def _pass(self) -> None:
        self.is_reached.set()
        self.is_open.wait()

    def opens_when(self, diloco: DiLoCo, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
        """When the training waits for the rounds, call a function and open the gate."""
        scheduler = diloco._training_side._scheduler
        until = scheduler.until

        def waiting(done: Callable[[], bool]) -> None:
            act()
            self.is_open.set()
            until(done)

        monkeypatch.setattr(scheduler, "until", waiting)


# -- who waits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto", [False, True])
def test_training_waits_for_nothing_between_sending_and_the_step_at_which_the_mean_is_due(
    auto: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, model = Gate(), zeros()
    options: dict[str, Any] = {"inner_steps": 3, "overlap_steps": "auto"} if auto else {}
    with begin(gate.store, model, **options) as diloco:
        assert steps(3, model, diloco) == [None] * 3
        gate.is_reached.wait()
        assert steps(2, model, diloco) == [None] * 2 if auto else True  # the next one is sent after step 6
        assert diloco.rounds == 0
        waited: list[int] = []
        gate.opens_when(diloco, monkeypatch, lambda: waited.append(diloco.rounds))
        (report,) = steps(1, model, diloco)
        assert (report.round, diloco.rounds) == (1, 1)
        assert waited[0] == 0
        assert report.late_s > 0
        assert report.busy_s > 0
        assert report.stale_steps == (3 if auto else 2)
        assert report.wire_error is None


def test_a_mean_is_applied_at_the_first_step_after_it_has_come_if_that_is_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, model = Gate(), zeros()
    with begin(gate.store, model, inner_steps=8, overlap_steps="auto", merge="carry", wire="int8") as diloco:
        has_landed = threading.Event()
        landed = diloco._training_side._scheduler.notify

        def lands() -> None:
            landed()
            has_landed.set()

        assert steps(10, model, diloco) == [None] * 10
        monkeypatch.setattr(diloco._training_side._scheduler, "notify", lands)
        gate.is_open.set()
        has_landed.wait()
        (report,) = steps(1, model, diloco)
        assert (report.round, report.stale_steps) == (1, 3)
        assert 0 <= report.wire_error < 0.01
        assert value_of(model) == pytest.approx(11.0, rel=1e-5)


def test_a_record_that_is_kept_while_the_next_round_continues_belongs_to_its_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each round takes until the next one is due, so one step merges the former and sends the latter."""
    gate, model = Gate(), zeros()
    options: dict[str, Any] = {"inner_steps": 3, "overlap_steps": "auto", "snapshot_every": 1, "merge": "carry"}
    with begin(gate.store, model, **options) as diloco:
        diloco.attach_state("generator", torch.Generator())
        steps(5, model, diloco)
        gate.opens_when(diloco, monkeypatch, lambda: None)
        steps(1, model, diloco)
        assert diloco._training_side._is_awaited
        diloco._workers.uploads.finish()
        kept = diloco._attached._read(KEYS, 1, 0)
        assert kept is not None
        assert (diloco.rounds, value_of(model)) == (1, 6.0)
        assert kept.progress([4])[0].tolist() == [3.0 - 6.0] * 4  # the first anchor is 3


def test_a_state_may_be_taken_after_an_error_ended_rounds_in_flight() -> None:
    model = zeros()
    diloco = begin(MemoryStore(), model, world_size=2)
    steps(3, model, diloco)
    assert diloco._training_side._is_awaited
    with pytest.raises(RuntimeError, match="the user's"), diloco:
        raise RuntimeError("the user's")
    state = diloco.state_dict()
    assert (state["rounds"], state["anchor"]["weight"].tolist()) == (0, [[0.0] * 4])


def test_a_process_that_asks_for_the_anchor_waits_for_the_round_and_leaves_the_live_parameters_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, model = Gate(), zeros()
    with begin(gate.store, model) as diloco:
        steps(2, model, diloco)
        gate.opens_when(diloco, monkeypatch, lambda: None)
        assert anchor_of(diloco) == 2.0
        assert (diloco.rounds, value_of(model)) == (0, 2.0)
        nudge(model, 1.0)
        assert diloco.step() is None
        (report,) = steps(1, model, diloco)
        assert (report.round, value_of(model)) == (1, 2.0)


def test_a_round_in_flight_is_merged_before_a_state_is_taken_or_loaded_and_counts_as_the_round_of_sync() -> None:
    model = zeros()
    with begin(MemoryStore(), model, merge="carry") as diloco:
        steps(3, model, diloco)
        state = diloco.state_dict()
        assert (state["rounds"], state["anchor"]["weight"][0, 0], value_of(model)) == (1, 2.0, 3.0)
        weights = model.state_dict()["weight"].clone()
        steps(4, model, diloco)  # to the middle of the next round
        model.load_state_dict({"weight": weights})
        diloco.load_state_dict(state)
        assert diloco.rounds == 2
        assert value_of(model) == anchor_of(diloco) == 6.0, "the round has counted that work"
        steps(4, model, diloco)
        reports = diloco.sync()
        assert [report.round for report in reports] == [3]
        assert (value_of(model), anchor_of(diloco)) == (10.0, 9.0)


# -- errors ------------------------------------------------------------------------------------------------------------


class StoreBrokeError(Exception):
    pass


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap_steps": "auto"}, {"background": True, "overlap_steps": 0}, {"fragments": 2, "overlap_steps": 1}],
    ids=["overlap", "auto", "no overlap", "fragments"],
)
def test_an_error_at_any_store_call_of_a_round_is_raised_once_by_the_next_call_of_the_training(
    options: dict[str, Any],
) -> None:
    for n in count(1):
        next_process()
        store, raised = FaultyStore(MemoryStore(), seed=0), list[StoreBrokeError]()
        n_calls = fail_at_call_of_the_rounds(n, store)
        diloco = None
        try:
            model = nn.Sequential(zeros(), nn.Linear(1, 1))
            diloco = begin(store, model, **options)
            steps(9, model, diloco)
            diloco.sync()
        except StoreBrokeError as error:
            raised.append(error)
        for _ in range(2):
            try:
                if diloco is not None:
                    diloco.close()
            except StoreBrokeError as error:
                raised.append(error)
        assert diloco is None or has_said_bye(store), n
        if n_calls() < n:
            break
        (told,) = raised
        assert {"strike", "_work"} <= {frame.name for frame in traceback.extract_tb(told.__traceback__)}
    assert n > 10
    assert not raised


def fail_at_call_of_the_rounds(n: int, store: FaultyStore) -> Callable[[], int]:
    """Let the n-th store call of the rounds fail. Return a function that returns the number of calls."""
    calls: list[str] = []

    def strike() -> None:
        if threading.current_thread().name.startswith(THREAD):
            calls.append("")
            if len(calls) == n:
                raise StoreBrokeError

    store.fail_at("*", count=None, before=strike)
    return lambda: len(calls)


def test_each_call_after_a_failed_round_raises_its_error_again() -> None:
    store, model = FaultyStore(MemoryStore(), seed=0), zeros()
    diloco = begin(store, model)
    store.fail_at("put_if_absent", key="*/contribution/0", before=lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            steps(4, model, diloco)
    diloco.close()


@pytest.mark.parametrize("n_steps", [0, 1, 2, 3])
def test_an_error_in_the_training_ends_the_rounds_where_they_stand_and_leaves_a_bye(n_steps: int) -> None:
    """The other replica never arrives."""
    store, model = MemoryStore(), zeros()
    diloco = begin(store, model, world_size=2)

    def train() -> None:
        with diloco:
            steps(n_steps, model, diloco)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert has_said_bye(store)
    assert diloco.rounds == 0


def test_a_process_that_interrupts_a_training_that_waits_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other replica never arrives."""
    assert threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        store, model = MemoryStore(), zeros()
        diloco = begin(store, model, world_size=2)
        me = threading.get_ident()
        strikes = threading.Thread(target=signal.pthread_kill, args=[me, signal.SIGINT])
        steps(3, model, diloco)
        Gate().opens_when(diloco, monkeypatch, strikes.start)
        with pytest.raises(KeyboardInterrupt), diloco:
            steps(1, model, diloco)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert has_said_bye(store)


def test_a_process_that_interrupts_a_replica_while_it_begins_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica joins a run whose first seal names work that does not exist."""
    store, model = MemoryStore(), zeros()
    with begin(store, model) as diloco:
        seal = Seal({0: SealedReplica("gone", 7, 1.0, "d" * 32)}, diloco._model_state.digest(0), 1)
    store.put_if_absent(KEYS.seal(0), seal.data("", UNSIGNED))
    next_process()
    me = threading.get_ident()

    def until(self: RoundThread, done: Callable[[], bool]) -> None:
        monkeypatch.undo()
        threading.Thread(target=signal.pthread_kill, args=[me, signal.SIGINT]).start()
        self.until(done)

    monkeypatch.setattr(RoundThread, "until", until)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            begin(store, zeros(), round_timeout_s=1e6)
    finally:
        signal.signal(signal.SIGINT, handler)


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_steps", "rounds"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (6, 2)])
@pytest.mark.parametrize("merge", ["anchor", "carry"])
def test_close_merges_the_round_in_flight_and_ends_the_thread_also_when_it_is_called_again(
    merge: str, n_steps: int, rounds: int
) -> None:
    store, model = MemoryStore(), zeros()
    diloco = begin(store, model, merge=merge)
    steps(n_steps, model, diloco)
    diloco.close()
    diloco.close()
    assert (diloco.rounds, has_said_bye(store)) == (rounds, True)
    assert anchor_of(diloco) == [0, 2, {"carry": 6, "anchor": 4}[merge]][rounds]
    assert value_of(model) == (anchor_of(diloco) if rounds else n_steps)


def test_a_replica_that_closes_while_the_others_continue_leaves_them_nothing_to_wait_for() -> None:
    def body(where: Mapping[str, Any]) -> int:
        model = zeros()
        options: dict[str, Any] = {"inner_steps": 4, "overlap_steps": 2, "allow_no_rounds": True, "same_data": "allow"}
        diloco = open_diloco(model, **options, **PLAIN, **where, limits=PATIENT)
        steps(6 if where["rank"] else 20, model, diloco)
        diloco.close()
        return diloco.rounds

    assert run_replicas(2, body) == [5, 2]
