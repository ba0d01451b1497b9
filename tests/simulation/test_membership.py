"""Claims, turns, expected ranks and ranks that have left, counts of steps, phases, and lengths of waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest
from support.patience import ENDLESS

from diloco.rendezvous.claims import claim
from diloco.rendezvous.contribution import WorkScale
from diloco.rendezvous.earlier_call import EarlierCall
from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.frames import READ_TRIES, Contribution, Seal, SealedReplica, hash_order
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import RETURNS_S, Identity, Membership
from diloco.rendezvous.phase import Phase, RoundPlan
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import Context, EntryState, Limits, PendingWork
from diloco.rendezvous.round_runner import RoundRunner
from diloco.rendezvous.seal import Sealer, SealLog
from diloco.rendezvous.training_side import Inline, TrainingSide
from executors.attempt.outcome import encode_outcome
from executors.errors import RunNotFoundError
from executors.protocol import Outcome, ReplicaStatus
from executors.store import Data, MemoryStore, Store
from executors.store.faulty import FaultyStore
from simulation.integer_state import BLOCK_ELEMENTS, IntegerState
from simulation.world import SimulatedStore, World

KEYS = Keys("run", "main")
T = TypeVar("T")
R = TypeVar("R")


def retrying_store(store: Any) -> RetryingStore:
    return RetryingStore(store, clock=lambda: 0.0, tolerance=ENDLESS)


# -- turns and claims --------------------------------------------------------------------------------------------------

GOLDEN_ORDERS = {
    ("mean", 0): [1, 0, 4, 2, 5, 3],
    ("seal", 7): [5, 4, 1, 2, 3, 0],
    ("snapshot", 10): [4, 3, 5, 0, 2, 1],
}


def test_every_rank_has_its_turn_in_orders_that_other_versions_find_too() -> None:
    first = Counter(hash_order(range(4), "seal", entry)[0] for entry in range(400))
    assert min(first.values()) > 60
    assert hash_order({3, 1, 2}, "seal", 5) == hash_order([1, 2, 3], "seal", 5)
    assert {about: hash_order(range(6), *about) for about in GOLDEN_ORDERS} == GOLDEN_ORDERS


def test_hash_orders_do_not_depend_on_the_process() -> None:
    orders = f"[hash_order(range(6), *a) for a in {list(GOLDEN_ORDERS)}]"
    code = f"from diloco.rendezvous.frames import hash_order\nprint({orders})"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == str(list(GOLDEN_ORDERS.values()))


def test_joiners_at_once_share_no_rank_and_fence_no_process() -> None:
    for seed in range(5):
        world = World(seed)
        store = retrying_store(SimulatedStore(world))
        found: list[Identity] = []

        def join(name: str, store: Any = store, world: World = world, found: list[Identity] = found) -> None:
            found.append(claim(store, KEYS, None, 2, name, lambda: world.sleep(0.1)))

        for name in ("one", "other", "third"):
            world.spawn(name, partial(join, name))
        world.run()
        assert sorted((me.rank, me.attempt) for me in found) == [(2, 0), (3, 0), (4, 0)], seed
        assert len({me.nonce for me in found}) == 3


def claimed(store: Any) -> Identity:
    return claim(retrying_store(store), KEYS, 0, 1, "mine", lambda: None)


def test_a_claim_whose_reply_is_lost_is_its_own_nevertheless() -> None:
    store = FaultyStore(MemoryStore(), seed=0)
    store.fail_at("put_if_absent", key="*/started.json", action="lost")
    assert claimed(store).attempt == 0
    assert len(store.log) == 1


class Boastful(MemoryStore):
    """A store in which another process creates the object first, and this process gets a wrong answer."""

    def put_if_absent(self, key: str, data: Data) -> bool:
        super().put_if_absent(key, b'{"nonce": "another"}') if key.endswith("/0/started.json") else None
        super().put_if_absent(key, data)
        return True


def test_a_claim_that_the_store_confirms_belongs_to_the_nonce_in_it() -> None:
    assert claimed(Boastful()).attempt == 1


# -- membership --------------------------------------------------------------------------------------------------------


def membership(store: Store, me: Identity = Identity(0, 2, 0, "me")) -> Membership:  # noqa: B008 - frozen
    return Membership(retrying_store(store), KEYS, me)


def sealed_by(*names: tuple[int, int], phase_s: float = 0.0) -> Seal:
    members = {rank: SealedReplica(f"nonce{attempt}", attempt, 1.0, "d" * 32) for rank, attempt in names}
    return Seal(members, "a" * 32, 0, phase_s=phase_s)


def test_an_outcome_without_a_claim_ends_no_replica() -> None:
    store = MemoryStore()
    store.put(KEYS.outcome(1, 0), b"{}")
    assert not membership(store).is_gone(1)
    store.put(KEYS.claim(1, 0), b"{}")
    assert membership(store).is_gone(1)


def test_an_attempt_that_is_not_older_than_the_named_one_shows_that_a_rank_is_gone() -> None:
    store = MemoryStore()
    members = membership(store)
    members.seal = sealed_by((1, 1))
    for attempt in range(3):
        store.put(KEYS.claim(1, attempt), b"{}")
    store.put(KEYS.outcome(1, 0), b"{}")
    assert not members.is_gone(1), "an outcome of an older attempt does not show that the rank has left"
    store.put(KEYS.outcome(1, 2), b"{}")
    assert members.is_gone(1), "an outcome of a newer attempt shows that the rank has left"


def outcome(*, goes_on: bool) -> bytes:
    return encode_outcome(Outcome(rank=1, attempt=0, status=ReplicaStatus.FAILED, reason="exception", goes_on=goes_on))


def test_a_rank_whose_process_stays_for_the_next_attempt_is_waited_for_until_it_says_goodbye() -> None:
    store = MemoryStore()
    store.put(KEYS.claim(1, 0), b"{}")
    store.put(KEYS.outcome(1, 0), outcome(goes_on=True))
    members = membership(store)
    assert (members.is_gone(1), members.has_live_peer()) == (False, True)
    store.put(KEYS.bye(1, 0), b"")
    assert (members.is_gone(1), members.has_live_peer()) == (True, False)


def test_a_process_that_stays_and_vanishes_is_waited_for_only_for_a_moment() -> None:
    store, now = MemoryStore(), [100.0]
    store.put(KEYS.claim(1, 0), b"{}")
    store.put(KEYS.outcome(1, 0), outcome(goes_on=True))
    members = Membership(retrying_store(store), KEYS, Identity(0, 2, 0, "me"), lambda: now[0])
    assert not members.is_gone(1)
    now[0] += RETURNS_S
    assert members.is_gone(1)


@pytest.mark.parametrize("data", [outcome(goes_on=False), b"{}", b"\xff", outcome(goes_on=True)[:40]])
def test_any_other_outcome_and_one_that_cannot_be_read_end_a_rank(data: bytes) -> None:
    store = MemoryStore()
    store.put(KEYS.claim(1, 0), b"{}")
    store.put(KEYS.outcome(1, 0), data)
    assert membership(store).is_gone(1)


def test_an_attempt_in_the_place_of_a_named_one_of_its_process_is_in_phase_and_any_other_is_not() -> None:
    store = MemoryStore()
    store.put(KEYS.claim(0, 0), b"{}")
    members = membership(store, Identity(1, 2, 1, "new"))
    members.seal = sealed_by((0, 0), (1, 0))
    assert members.is_behind()
    members.earlier = EarlierCall(frozenset({(0, "nonce0")}), 1, 2.0, 0.1, 0.0)
    assert not members.is_behind()
    members.earlier = EarlierCall(frozenset({(0, "another copy")}), 1, 2.0, 0.1, 0.0)
    assert members.is_behind()


def test_the_steps_of_a_failed_attempt_and_of_the_time_since_count_up_to_the_last_step_of_the_phase() -> None:
    earlier = EarlierCall(frozenset(), position=3, steps_since=2.0, step_s=0.5, left_s=10.0)
    assert earlier.steps_at(3, 10.0, most=9) == 2
    assert earlier.steps_at(3, 11.0, most=9) == 4
    assert earlier.steps_at(3, 1000.0, most=9) == 9
    assert earlier.steps_at(4, 11.0, most=9) == 2, "the round of the failed attempt was decided meanwhile"
    assert replace(earlier, step_s=0.0).steps_at(3, 1000.0, most=9) == 2, (
        "without a measured step, the time since does not count"
    )


def test_work_of_a_part_of_a_phase_weighs_as_much_as_its_steps() -> None:
    here = context(Identity(0, 2, 1, "me"), [0.0], plan=RoundPlan(steps_per_entry=4))
    here.phase.begin_short(1)
    stepped(here.phase, 3)
    assert WorkScale(here).weigh(0, is_early=False).weight == 0.75
    here.phase.is_short = [False]
    assert WorkScale(here).weigh(0, is_early=False).weight == 1.0


def test_when_all_are_gone_their_newest_attempts_are_expected_that_have_not_left() -> None:
    store = MemoryStore()
    members = membership(store)
    members.seal = sealed_by((0, 0), (1, 0), (2, 0))
    for rank in (0, 1, 2):
        store.put(KEYS.claim(rank, 0), b"{}")
        store.put(KEYS.outcome(rank, 0), b"{}")
    assert not members.misses_any({})
    store.put(KEYS.claim(1, 1), b"{}")
    store.put(KEYS.claim(2, 1), b"{}")
    store.put(KEYS.bye(2, 1), b"")
    assert members.misses_any({})
    assert not members.misses_any({}, others={1})
    store.put(KEYS.claim(1, 2), b"{}")
    store.put(KEYS.outcome(1, 2), b"{}")
    assert not members.misses_any({}), "the newest claim is the rank"


class CountingStore(MemoryStore):
    """A store in memory that counts reads."""

    n_reads = 0

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        self.n_reads += 1
        return super().get(key, start=start, size=size)


def test_one_missing_replica_that_has_not_left_answers_for_all_that_are_missing() -> None:
    store = CountingStore()
    members = Membership(retrying_store(store), KEYS, Identity(0, 1000, 0, "me"))
    assert members.misses_any({})
    assert store.n_reads <= 3


def test_when_many_have_left_they_are_asked_about_at_once() -> None:
    store, asked = MemoryStore(), []
    for rank in range(100):
        store.put(KEYS.claim(rank, 0), b"{}")
        store.put(KEYS.bye(rank, 0), b"")

    def at_once(act: Callable[[T], R], things: Iterable[T]) -> Iterator[R]:
        asked.append(listed := list(things))
        return map(act, listed)

    members = Membership(retrying_store(store), KEYS, Identity(0, 100, 0, "me"), map=at_once)
    assert not members.has_live_peer()
    assert (sum(map(len, asked)), len(asked[0])) == (99, 1)
    assert len(asked) < 99 / 4


def test_the_own_rank_never_counts_as_a_living_peer() -> None:
    members = membership(MemoryStore())
    members.seal = sealed_by((0, 0))
    assert not members.has_live_peer()
    members.seal = sealed_by((0, 0), (1, 0))
    assert members.has_live_peer()


def test_before_the_first_seal_the_first_attempts_of_the_launch_are_expected_processes() -> None:
    members = membership(MemoryStore())
    assert members.names(1, 0, "any")
    assert not members.names(1, 1, "any")
    assert not members.names(2, 0, "any"), "a rank that joined is not expected"


# -- phases ------------------------------------------------------------------------------------------------------------


def stepped(phase: Phase, n: int) -> Phase:
    for _ in range(n):
        phase.count_step()
        phase.start_training_clock()
    return phase


def test_steps_count_from_the_last_look_that_saw_no_seal_less_the_overlap() -> None:
    phase = stepped(Phase(RoundPlan(steps_per_entry=10, overlap_steps=2), lambda: 0.0), 3)
    looked_step = phase.n_steps
    stepped(phase, 5)
    phase.advance_after_catch_up(1, looked_step, 0.0)
    assert (phase.base_step, phase.steps_since) == (10, 3)
    looked_step = phase.n_steps
    stepped(phase, 1)
    phase.advance_after_catch_up(2, looked_step, 0.0)
    assert (phase.base_step, phase.steps_since) == (30, 0)


def test_a_head_start_counts_for_one_round() -> None:
    now = [0.0]
    here = context(Identity(0, 2, 0, "me"), now)
    runner = RoundRunner(here, lambda result: None)
    here.phase.note_unsealed(0.0, 0)
    now[0] = 7.0
    runner._prepare_result([], 1, is_out_of_phase=False)
    assert here.phase.head_start_s == 7.0
    runner._prepare_result([], 1, is_out_of_phase=False, has_met=True)
    assert here.phase.head_start_s == 0.0


def test_the_runs_step_is_that_of_its_newest_entry_and_at_most_a_phase_more() -> None:
    phase = stepped(Phase(RoundPlan(steps_per_entry=10, total_steps=25), lambda: 0.0), 14)
    assert phase.run_step == 10, "the run has the step of the newest entry"
    phase.advance_after_catch_up(1, 0, 0.0)
    assert 10 <= phase.run_step <= 20
    phase.advance_in_phase(1, 0.0)
    assert stepped(phase, 9).run_step == 25
    assert phase.is_at_the_end
    for n_entries in (1, 5):
        phase.advance_in_phase(n_entries, 0.0)
        assert phase.run_step == 25


def test_a_last_round_does_not_overlap_with_training() -> None:
    plan = RoundPlan(steps_per_entry=10, n_fragments=2, overlap_steps=3, total_steps=40)
    phase = stepped(Phase(plan, lambda: 0.0), 7)
    assert plan.last_entry == 4
    assert [phase.is_time_to_send(entry) for entry in range(5)] == [True, True, True, False, False]


# -- the grace ---------------------------------------------------------------------------------------------------------


def context(me: Identity, now: list[float], store: Store | None = None, plan: RoundPlan | None = None) -> Context:
    return Context(
        store=retrying_store(store or MemoryStore()), keys=KEYS, me=me, training=IntegerState(1, 0, 0),
        plan=plan or RoundPlan(), wait=lambda seconds, prefixes: None, clock=lambda: now[0], proof=UNSIGNED,
    )  # fmt: skip


def sealer(here: Context) -> Sealer:
    return Sealer(here, SealLog(here))


def test_the_bound_of_a_replica_that_sees_no_expected_process() -> None:
    for told_s, own_s, unobserved_wait_s in [
        (100.0, 100.0, 230.0),
        # a phase that a seal reports counts for at most half of the round's time limit, so no replica waits forever
        (1e9, 100.0, 2 * 100.0 + 900.0),
        # the replica's own phases take an hour, and the bound is at least two of them
        (3600.0, 3600.0, 2 * 3600.0 + 180.0),
        (0.0, 100.0, 30.0),
    ]:
        now = [0.0]
        here = context(Identity(0, 2, 0, "me"), now)
        assert here.phase.phase_s == 0.0
        now[0] = own_s
        here.phase.count_step()
        here.members.seal = sealed_by((1, 0), phase_s=told_s)
        assert sealer(here).unobserved_wait_s == pytest.approx(unobserved_wait_s), (told_s, own_s)


def test_a_replica_whose_anchor_is_in_the_minority_waits_for_as_long_again() -> None:
    here = context(Identity(0, 2, 0, "me"), [0.0])
    one, entry = sealer(here), EntryState.begin(here, 0)
    entry.began_s = 0.0
    assert [one._is_over(entry, {}, now, grace_factor=1) for now in (29.0, 31.0)] == [False, True]
    assert [one._is_over(entry, {}, now, grace_factor=2) for now in (31.0, 59.0, 61.0)] == [False, False, True]


def test_a_replica_without_a_step_decides_nothing_alone_before_the_first_seal() -> None:
    now = [0.0]
    here = context(Identity(2, 2, 0, "joiner"), now)
    one, entry = sealer(here), EntryState.begin(here, 0)
    entry.began_s = entry.published_s = 0.0
    assert not one._is_over(entry, {}, 1e6, grace_factor=1)
    now[0] = 10.0
    here.phase.count_step()
    assert [one._is_over(entry, {}, at_s, grace_factor=1) for at_s in (49.0, 51.0)] == [False, True]


@pytest.mark.parametrize("changes", [None, {"rank": 0}, {"rank": 1, "wire": "bf16"}, {"rank": 1}])
def test_an_object_that_is_not_a_contribution_of_a_rank_is_not_waited_for(changes: dict[str, Any] | None) -> None:
    store = MemoryStore()
    here = replace(context(Identity(0, 2, 0, "me"), [0.0], store), limits=Limits(block_elements=BLOCK_ELEMENTS))
    runner = RoundRunner(here, lambda result: None)
    here.training.hold(0, is_early=False)
    runner.publish(PendingWork(0, 1.0, 1, 1.0, 1, is_early=False))
    entry, key = runner.current(), KEYS.contribution(0, 1)
    mine = bytes(store.get(KEYS.contribution(0, 0)))
    head = replace(Contribution.parse(mine, "", UNSIGNED)[0], **changes or {}).head(
        key, UNSIGNED, entry.layout.n_blocks
    )
    store.put(key, b"no contribution" if changes is None else head + mine[len(head) :])
    for _ in range(READ_TRIES):
        runner.sealer.try_seal(entry, 0.0)
    seal = runner.seals.seal(0)
    assert seal is not None
    assert list(seal.replicas) == ([0, 1] if changes == {"rank": 1} else [0])


@pytest.mark.parametrize("job", ["run_round", "catch_up"])
def test_a_queued_job_does_nothing_if_another_result_has_arrived_since(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = RoundRunner(context(Identity(0, 2, 0, "me"), [0.0]), lambda result: None)
    ran: list[str] = []
    monkeypatch.setattr(runner, "_wait_for_mean", lambda: ran.append("run_round"))
    monkeypatch.setattr(runner, "_apply_sealed", lambda reports: ran.append("catch_up"))

    def run(n_merged: int) -> None:
        if job == "run_round":
            runner.run_round(None, n_merged)
        else:
            runner.catch_up(n_merged=n_merged)

    runner.n_results = 3
    run(2)
    assert ran == []
    run(3)
    assert job in ran


def test_nothing_is_in_flight_that_was_sent_out_of_phase() -> None:
    sent = PendingWork(0, 1.0, 1, 1.0, 1, is_early=False)
    cases: list[dict[str, Any]] = [
        {}, {"pending": replace(sent, is_early=True)}, {"is_foreign": True}, {"published": False}, {"pending": None},
    ]  # fmt: skip
    for changes in cases:
        runner = RoundRunner(context(Identity(0, 2, 0, "me"), [0.0]), lambda result: None)
        for name, value in {"published": True, "pending": sent, **changes}.items():
            setattr(runner.current(), name, value)
        assert runner.in_flight is (not changes), changes


# -- a deleted run -----------------------------------------------------------------------------------------------------

KEPT = (KEYS.claim(0, 0), KEYS.snapshot(0), KEYS.seal(5))


def watching(store: Store, now: list[float]) -> Membership:
    patient = RetryingStore(store, clock=lambda: now[0], tolerance=ENDLESS)
    members = Membership(patient, KEYS, Identity(0, 2, 0, "me"), lambda: now[0])
    members.read_seal = KEYS.seal(5)
    for key in KEPT:
        store.put(key, b"{}")
    return members


def test_a_run_whose_records_are_gone_in_three_looks_ends_a_replica() -> None:
    store, now = MemoryStore(), [0.0]
    members = watching(store, now)
    for key in KEPT:
        store.delete(key)
    for now[0] in (10.0, 11.0, 20.0, 29.0):
        members.check_fence()
        assert not members.is_deleted
    now[0] = 30.0
    with pytest.raises(RunNotFoundError, match=r"Run 'run' was deleted from memory://: neither the claim of rank 0"):
        members.check_abort()
    assert members.is_deleted


def test_one_record_that_still_exists_or_exists_again_ends_no_replica() -> None:
    for left in KEPT:
        store, now = MemoryStore(), [0.0]
        members = watching(store, now)
        for key in KEPT:
            store.delete(key) if key != left else None
        for now[0] in range(0, 100, 10):
            members.check_run()
    store, now = MemoryStore(), [0.0]
    members = watching(store, now)
    for now[0] in range(0, 200, 10):  # two answers are stale, the next one is right, and so on
        for key in KEPT:
            store.put(key, b"{}") if now[0] % 30 == 0 else store.delete(key)
        members.check_run()


def test_a_store_that_only_fails_ends_no_replica() -> None:
    store, now = FaultyStore(MemoryStore(), seed=0), [0.0]
    members = watching(store, now)
    store.fail_at("get", count=None, action="error")
    for now[0] in range(0, 100, 10):
        members.check_run()


def test_a_process_that_finds_its_run_deleted_ends_and_writes_nothing_more() -> None:
    store, now = MemoryStore(), [0.0]

    def wait(seconds: float, prefixes: object) -> None:
        now[0] += seconds

    here = context(Identity(0, 1, 0, "me"), now, store)
    limits = Limits(block_elements=BLOCK_ELEMENTS)
    side = TrainingSide(replace(here, wait=wait, limits=limits), Inline(wait))
    store.put(KEYS.claim(0, 0), b'{"nonce": "me"}')
    side.start()
    while side.position < 3:
        now[0] += 1.0
        side.step()
    for entry in list(store.list("")):
        store.delete(entry.key)

    def train_on() -> None:
        while now[0] < 100.0:
            now[0] += 1.0
            side.step()

    with pytest.raises(RunNotFoundError):
        train_on()
    assert now[0] < 3.0 + 3 * 10.0 + 10.0
    written = [entry.key for entry in store.list("")]
    side.say_bye()
    assert [entry.key for entry in store.list("")] == written
