"""Tests the planner's numbers for a round and for a choice, and compares them with systems whose utilization was
published.
"""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from diloco import planner, processor
from diloco.outer_defaults import PAPER_OUTER
from diloco.planner import (
    BYTES_PER_ELEMENT,
    FRAGMENTS,
    INNER_STEPS,
    MANY_FRAGMENTS,
    PRICES,
    Choice,
    Link,
    Plan,
    Prices,
    Processor,
    RoundCost,
    Workload,
    choose,
    cost_of_round,
    evaluate,
    faster_exact_round,
    round_cost,
    with_hiding_overlap,
)
from diloco.rendezvous import frames, snapshot
from diloco.rendezvous.round import MOST_PIECES, Layout, Limits
from diloco.wires import DEFAULT_MEAN_WIRE, MEAN_WIRES, WIRES
from executors.cli.plan import DEFAULT_OUTER
from executors.store.s3.store import MAX_PUT_BYTES

BUCKET = Link(up=210e6, down=260e6, latency_s=0.048)
EXAMPLE = Workload(params=1_300_000_000, n=8, step_s=0.9, link=BUCKET, processor=Processor(copy=160e9), steps=20_000)
HALVES = Choice(inner_steps=50, fragments=2, overlap_steps=20)

LINKS = st.builds(
    Link, up=st.floats(1e5, 1e11), down=st.floats(1e5, 1e11), latency_s=st.floats(0, 1, allow_subnormal=False)
)
JOBS = st.builds(
    Workload, params=st.integers(1, 10**11), n=st.integers(1, 300), step_s=st.floats(1e-3, 100), link=LINKS,
    steps=st.none() | st.integers(500, 10**6),
)  # fmt: skip
NAMES = st.sampled_from(sorted(BYTES_PER_ELEMENT))
MEAN_NAMES = st.sampled_from(sorted(MEAN_WIRES))


def test_the_parts_of_a_sharded_round_are_those_of_the_formula() -> None:
    """By hand: 650 M elements are 620 blocks, of which the largest of 8 shards has 78."""
    cost = round_cost(EXAMPLE, HALVES)
    sent, part = 650e6 * (1 + 4 / 256), 78 / 620
    assert cost.up == pytest.approx(sent * (1 + part))
    assert cost.down == pytest.approx(sent * (7 * part + 1 - part))
    assert cost.link_s == pytest.approx(cost.up / 210e6 + cost.down / 260e6) == pytest.approx(8.0, abs=0.05)
    assert cost.requests_s == pytest.approx(17 * 0.048)
    last_quarter = 8 * part / 5 / 4  # the rest of the sum is computed while the inputs are read
    assert (
        cost.processor_s == pytest.approx(2.6 * (1 / 1.5 + last_quarter + 1 / 5 + 1 / 1.5)) == pytest.approx(4.12, 1e-2)
    )
    assert cost.noticing_s == 2 * 0.5
    assert cost.seconds == cost.link_s + cost.requests_s + cost.processor_s + cost.noticing_s
    assert cost.seconds == pytest.approx(13.9, abs=0.05)


@given(elements=st.integers(1, 200 << 20), n=st.integers(1, 100), wire=NAMES)
def test_the_planner_cuts_a_mean_as_the_rounds_do(elements: int, n: int, wire: str) -> None:
    layout = Layout(elements, Limits(), WIRES[wire], WIRES[DEFAULT_MEAN_WIRE[wire]])
    shards = [layout.shard(shard, layout.n_shards(n)) for shard in range(layout.n_shards(n))]
    largest = max(shard.end_block - shard.first_block for shard in shards)
    cost = cost_of_round(elements, n, wire, None, Link(up=1, down=1, latency_s=0), Processor())
    if not layout.is_small:
        received = cost.up / elements - BYTES_PER_ELEMENT[wire]
        assert received / BYTES_PER_ELEMENT[DEFAULT_MEAN_WIRE[wire]] == pytest.approx(largest / layout.n_blocks)


def test_a_small_round_has_one_phase() -> None:
    job = Workload(params=1_000_000, n=4, step_s=0.1, link=Link(up=2e6, down=4e6, latency_s=0.01))
    cost = round_cost(job, Choice(inner_steps=10, wire="fp32"))
    assert cost.link_s == pytest.approx((4e6 + 4e6) / 2e6 + (3 * 4e6 + 4e6) / 4e6)
    assert cost.requests_s == pytest.approx(0.1)
    # one of four replicas creates the seal, and all read the mean
    assert (cost.up, cost.down) == (4e6 + 4e6 / 4, 3 * 4e6 / 4 + 4e6)
    large = round_cost(replace(job, params=1_048_577), Choice(inner_steps=10, wire="fp32"))
    assert large.requests_s == pytest.approx(0.17)


@pytest.mark.parametrize(
    ("wire", "mean_wire", "up"),
    [
        ("fp32", None, 4 * 1.125),
        ("bf16", None, 2 * 1.125),
        ("int8", None, (1 + 1 / 64) * 1.125),
        ("int4", None, 0.53125 + (1 + 1 / 64) / 8),
        ("int4", "bf16", 0.53125 + 2 / 8),
        ("top8", None, 388 / 4096 + 0.53125 / 8),
        ("top8", "each", 388 / 4096),
    ],
)
def test_a_wire_decides_the_bytes_that_are_sent(wire: str, mean_wire: str | None, up: float) -> None:
    job = replace(EXAMPLE, params=8 << 20)
    assert round_cost(job, Choice(inner_steps=50, wire=wire, mean_wire=mean_wire)).up == pytest.approx((8 << 20) * up)


def test_late_time_is_the_part_of_a_round_that_the_overlap_does_not_hide() -> None:
    plan = evaluate(EXAMPLE, HALVES)
    assert (plan.late_s, plan.has_room) == (0.0, True)
    late = evaluate(EXAMPLE, replace(HALVES, overlap_steps=10))
    copies_s = 2 * 2.6e9 / 160e9
    assert late.late_s == pytest.approx(late.round.seconds - 9)
    assert late.share == pytest.approx((late.late_s + copies_s) / (25 * 0.9 + late.late_s + copies_s))


def test_the_sums_are_of_all_replicas_rounds_and_fragments() -> None:
    plan = evaluate(EXAMPLE, HALVES)
    assert plan.rounds == 400
    assert 8 * 400 * (plan.up + plan.down) == pytest.approx(12.2e12, rel=0.01)
    assert plan.egress_usd(PRICES["s3"], 400) == pytest.approx(667, abs=1)
    requests = 400 * 2 * 8 * (4 * 5e-6 + (25 + 14 + plan.round.down / 2**23) * 0.4e-6)
    snapshots = 80 * (1 + 155) * 5e-6  # a snapshot of 10.4 GB after every tenth entry
    assert plan.requests_usd(PRICES["s3"], 400) == pytest.approx(requests + snapshots)
    assert plan.egress_usd(PRICES["r2"], 400) == plan.requests_usd(Prices(), 400) == 0


def test_the_choice_is_the_shortest_round_with_room_and_of_these_the_least_stale() -> None:
    plan = choose(EXAMPLE)
    assert plan.choice == Choice(inner_steps=50, fragments=2, overlap_steps=20, wire="int8")
    assert (plan.choice.inner_steps, plan.choice.wire, plan.has_room) == (50, "int8", True)
    of_that_length = [with_hiding_overlap(EXAMPLE, Choice(inner_steps=50, fragments=n)) for n in (1, 2, 5)]
    assert plan.choice.overlap_steps == min(each.choice.overlap_steps for each in of_that_length if each.has_room)
    shorter = [
        with_hiding_overlap(EXAMPLE, Choice(inner_steps=h, fragments=p)) for h in (10, 20, 30) for p in (1, 2, 5)
    ]
    assert not any(each.has_room for each in shorter)


@pytest.mark.parametrize(("speed", "is_faster"), [(20e9, True), (1e9, False), (5e6, False)])
def test_the_exact_wire_is_named_where_encoding_takes_longer_than_the_saved_bytes(
    speed: float, *, is_faster: bool
) -> None:
    link = Link(up=speed, down=speed, latency_s=0.0001)
    plan = choose(Workload(params=10**8, n=4, step_s=0.1, link=link), wires=("int8",))
    exact = faster_exact_round(plan)
    assert (exact is not None) is is_faster
    assert exact is None or exact.seconds < plan.round.seconds


def test_int4_is_chosen_only_if_it_halves_inner_steps() -> None:
    chosen = {}
    for speed in (1e6, 2e6, 4e6, 8e6, 16e6, 32e6, 64e6, 128e6):
        job = Workload(params=10**9, n=4, step_s=1.0, link=Link(up=speed, down=speed, latency_s=0.05))
        int8, int4, plan = choose(job, wires=("int8",)), choose(job, wires=("int4",)), choose(job)
        chosen[plan.choice.wire] = True
        halves = int4.has_room and (not int8.has_room or 2 * int4.choice.inner_steps <= int8.choice.inner_steps)
        loses_less = not int8.has_room and int4.share <= 0.9 * int8.share
        assert (plan.choice.wire == "int4") == (halves or loses_less), speed
    assert chosen.keys() == {"int8", "int4"}


def test_top8_is_proposed_only_where_steps_would_wait_and_only_for_many_short_rounds() -> None:
    slow = Workload(params=10**7, n=4, step_s=0.1, link=Link(up=5e6, down=5e6, latency_s=0.02), steps=2000)
    plan = choose(slow, inner_steps=20)
    assert not choose(slow, wires=("int4",), inner_steps=20).has_room
    assert (plan.choice.wire, plan.choice.resolved_mean_wire) == ("top8", "each")
    many = choose(replace(slow, n=8), inner_steps=20)
    assert (many.choice.wire, many.choice.resolved_mean_wire) == ("top8", "int4")
    others = {
        "a short run": choose(replace(slow, steps=1000), inner_steps=20),
        "a run of unknown length": choose(replace(slow, steps=None), inner_steps=20),
        "long rounds": choose(replace(slow, steps=20_000), inner_steps=50),
        "a fast link": choose(replace(slow, link=Link(up=1e9, down=1e9, latency_s=0.001)), inner_steps=20),
        "a wire of the user": choose(slow, inner_steps=20, wires=("int8",)),
        "rounds of any length": choose(slow),
    }
    assert not {name for name, other in others.items() if other.choice.wire == "top8"}


def test_the_sparse_wire_takes_more_of_the_processor_than_int8() -> None:
    sparse, dense = (round_cost(EXAMPLE, replace(HALVES, wire=wire)) for wire in ("top8", "int8"))
    assert 1.5 * dense.processor_s < sparse.processor_s < 3 * dense.processor_s
    assert sparse.link_s < dense.link_s / 2


def test_a_round_is_small_only_if_its_mean_is_small_too() -> None:
    """A contribution in top8 has a sixth of the bytes of its mean."""
    for elements in (1_000_000, 7_000_000, 9_000_000, 40_000_000):
        layout = Layout(elements, Limits(), WIRES["top8"], WIRES["int4"])
        cost = cost_of_round(elements, 4, "top8", None, Link(up=1, down=1, latency_s=1), Processor())
        assert layout.is_small == (elements < 7_500_000) == (cost.requests_s == 10), elements


def test_a_round_without_stored_means_moves_contributions_alone() -> None:
    job = Workload(params=10**8, n=4, step_s=1.0, link=Link(up=1e6, down=1e6, latency_s=0.05))
    cost = round_cost(job, Choice(inner_steps=20, wire="top8", mean_wire="each"))
    sent = 10**8 * 388 / 4096
    assert cost.up == pytest.approx(sent)
    assert cost.down == pytest.approx(3 * sent)
    dense = round_cost(job, Choice(inner_steps=20, wire="fp32"))
    assert cost.up + cost.down < (dense.up + dense.down) / 29


def test_given_values_are_not_replaced_by_the_plan() -> None:
    plan = choose(EXAMPLE, wires=("fp32",), mean_wire="bf16", inner_steps=60, fragments=3, overlap_steps=4)
    assert plan.choice == Choice(inner_steps=60, fragments=3, overlap_steps=4, wire="fp32", mean_wire="bf16")
    assert choose(EXAMPLE, fragments=3).choice.inner_steps % 3 == 0
    assert choose(replace(EXAMPLE, steps=25, link=replace(BUCKET, up=1e5))).choice.inner_steps <= 25


@pytest.mark.parametrize(
    ("inner_steps", "rounds", "outer"),
    [
        (5, None, (1.0, 0.5)),
        (5, 20, (1.0, 0.5)),
        (10, None, (0.7, 0.8)),
        (5, 500, (1.0, 0.5)),
        (10, 100, (1.0, 0.5)),
        (10, 500, (0.7, 0.8)),
        (20, None, (0.7, 0.9)),
        (20, 50, (1.0, 0.5)),
        (50, 20, (1.0, 0.8)),
        (50, 21, (0.7, 0.9)),
        (500, 2, (1.0, 0.8)),
    ],
)
def test_short_rounds_and_short_runs_get_the_outer_settings_that_measured_best(
    inner_steps: int, rounds: int | None, outer: tuple[float, float]
) -> None:
    job = replace(EXAMPLE, steps=None if rounds is None else inner_steps * rounds)
    assert evaluate(job, Choice(inner_steps=inner_steps)).outer == outer


@pytest.mark.parametrize(
    ("job", "given", "problem"),
    [
        ({"params": 0}, {}, "params must be from 1 to 1e+15, got params=0."),
        ({"step_s": 0.0}, {}, "step_s must be more than 0, got step_s=0.0."),
        ({"link": replace(BUCKET, up=-1.0)}, {}, "up must be more than 0, got up=-1.0."),
        ({"link": replace(BUCKET, latency_s=-1.0)}, {}, "latency_s must be at least 0, got latency_s=-1.0."),
        ({}, {"wires": ("int2",)}, "wire must be one of fp32, bf16, int8, int4, top8, got wire='int2'."),
        ({}, {"mean_wire": "top8"}, "mean_wire must be one of fp32, bf16, int8, int4, each, got mean_wire='top8'."),
        ({}, {"inner_steps": 50, "fragments": 3}, "got inner_steps=50 and fragments=3."),
        ({}, {"inner_steps": 10, "overlap_steps": 10}, "from 0 to inner_steps / fragments - 1 = 9"),
        ({"steps": 5}, {"inner_steps": 10}, "steps must be at least inner_steps, got steps=5 and inner_steps=10."),
    ],
)
def test_invalid_values_are_refused_by_name(job: dict, given: dict, problem: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=problem.replace("+", r"\+").replace("(", r"\(")):
        choose(replace(EXAMPLE, **job), **given)


@given(job=JOBS, wire=NAMES, factor=st.floats(1, 1e4))
def test_a_better_link_never_makes_rounds_longer(job: Workload, wire: str, factor: float) -> None:
    """The test keeps the wire. Otherwise, a better link could change int4 to int8, whose rounds may be longer."""
    link = job.link
    faster = Link(up=link.up * factor, down=link.down * factor, latency_s=link.latency_s / factor)
    slow, fast = choose(job, wires=(wire,)), choose(replace(job, link=faster), wires=(wire,))
    assert fast.choice.inner_steps <= slow.choice.inner_steps
    assert round_cost(fast.workload, slow.choice).seconds <= slow.round.seconds
    assert evaluate(fast.workload, slow.choice).share <= slow.share


@example_settings(deadline=None)  # a loaded machine may take long
@given(job=JOBS)
def test_every_plan_can_be_passed_on(job: Workload) -> None:
    plan = choose(job)
    plan.choice.check(job)
    assert plan.choice.inner_steps in INNER_STEPS
    assert 0 <= plan.share <= 1
    assert plan.late_s == 0 or not plan.has_room
    assert min(plan.up, plan.down, plan.requests_usd(PRICES["s3"], 10), plan.egress_usd(PRICES["s3"], 10)) >= 0


@example_settings(deadline=None)
@given(
    job=JOBS, params=st.floats(1e9, 405e9).map(round), wire=NAMES, mean_wire=st.none() | MEAN_NAMES,
    fragments=st.none() | st.integers(1, 200),
)  # fmt: skip
def test_no_plan_for_a_bucket_has_an_object_that_a_bucket_does_not_take(
    job: Workload, params: int, wire: str, mean_wire: str | None, fragments: int | None
) -> None:
    job, wires = replace(job, params=params, steps=None, most_bytes=MAX_PUT_BYTES), (wire, "int8")
    try:
        choice = choose(job, wires=wires, mean_wire=mean_wire, fragments=fragments).choice
    except ValueError as refusal:
        least = int(
            re.findall(r"fragments must be at least (\d+), because the store accepts no object", str(refusal))[0]
        )
        assert least > (MANY_FRAGMENTS[-1] if fragments is None else fragments)
        choice = choose(job, wires=wires, mean_wire=mean_wire, fragments=least).choice
    elements = math.ceil(params / choice.fragments)
    layout = Layout(elements, Limits(), WIRES[choice.wire], MEAN_WIRES[choice.resolved_mean_wire])
    shards = [layout.shard(shard, layout.n_shards(job.n)) for shard in range(layout.n_shards(job.n))]
    assert layout.size_bytes <= MAX_PUT_BYTES
    assert not layout.stores_mean or all(shard.mean_bytes <= MAX_PUT_BYTES for shard in shards)
    fewer = [
        replace(choice, fragments=part, inner_steps=length, overlap_steps=0)
        for part in FRAGMENTS
        for length in INNER_STEPS
    ]
    assert fragments is not None or choice.fragments in FRAGMENTS or not any(each.fits(job) for each in fewer)


@given(job=JOBS, wire=NAMES, inner_steps=st.sampled_from(INNER_STEPS), more=st.integers(1, 9))
def test_more_overlap_never_loses_more_time(job: Workload, wire: str, inner_steps: int, more: int) -> None:
    choice = Choice(inner_steps=inner_steps, wire=wire)
    assert evaluate(job, replace(choice, overlap_steps=more)).share <= evaluate(job, choice).share


@given(job=JOBS, wire=NAMES)
def test_a_round_that_was_can_be_compared_without_the_job(job: Workload, wire: str) -> None:
    cost = cost_of_round(job.params, job.n, wire, None, job.link, job.processor)
    assert cost == round_cost(job, Choice(inner_steps=10, overlap_steps=3, wire=wire))


def test_the_numbers_are_those_of_the_wires_and_of_the_rendezvous() -> None:
    assert {name: wire.size(1 << 20) / (1 << 20) for name, wire in WIRES.items()} == BYTES_PER_ELEMENT
    assert planner.MEAN_WIRES == DEFAULT_MEAN_WIRE
    assert (Limits().block_elements, Limits().small_bytes) == (planner.BLOCK_ELEMENTS, planner.SMALL_BYTES)
    assert (Limits().piece_bytes, MOST_PIECES) == (planner.PIECE_BYTES, planner.MOST_PIECES)
    assert DEFAULT_OUTER == PAPER_OUTER
    assert (planner.MAX_SHARDS, planner.SNAPSHOT_PART_BYTES) == (frames.MAX_SHARDS, snapshot.PART_BYTES)


def test_a_processor_is_measured_by_the_work_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "TRIES", 1)
    with torch.device("meta"):  # whatever torch makes by default
        found = processor.measure()
    assert list(found) == ["encode", "accumulate", "decode", "step"]
    assert all(1e6 < rate < 1e12 for rate in found.values())
    assert Processor(**found).copy == Processor().copy


def test_planning_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, diloco.planner; print({'torch', 'numpy', 'executors'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"


# -- published numbers ----------------------------------------------------------------------------------------

UTILISATIONS = (50, 80, 90, 95, 99)
DILOCO = {
    # (parameters, seconds of a step, inner steps): the Gbit/s that reach each of these utilizations in the papers'
    # simulation.
    (1e9, 0.1, 100): (1.4, 6.2, 13.3, 23.3, 86.8),  # Streaming DiLoCo, 2501.18512, table 4, "Vanilla DiLoCo"
    (10e9, 0.8, 100): (1.7, 7.5, 16.0, 33.9, 104.8),
    (100e9, 4.9, 100): (3.0, 11.0, 23.3, 49.4, 184.2),
    (10e9, 0.8, 50): (3.0, 11.0, 23.3, 41.0, 126.5),  # scaling laws for DiLoCo, 2503.09799, table 6
    (10e9, 0.8, 300): (0.5, 2.0, 4.3, 9.1, 41.0),
    (405e9, 26, 50): (3.6, 13.3, 28.1, 59.6, 184.2),
    (405e9, 26, 100): (2.0, 7.5, 16.0, 33.9, 126.5),
    (405e9, 26, 300): (0.7, 3.0, 6.2, 13.3, 59.6),
    (671e9, 20, 50): (7.5, 33.9, 72.0, 126.5, 390.7),
    (671e9, 20, 100): (4.3, 16.0, 41.0, 72.0, 268.3),
    (671e9, 20, 300): (1.7, 6.2, 13.3, 28.1, 126.5),
}
OVERLAPPED = {
    # (…, fragments including the one of the embedding, bits of a value): one step of overlap; 2501.18512, table 4
    (1e9, 0.1, 99, 9, 16): (1.4, 4.3, 6.2, 9.1, 11.0),
    (1e9, 0.1, 99, 9, 4): (0.4, 0.9, 1.7, 2.0, 3.0),
    (10e9, 0.8, 85, 17, 16): (1.7, 3.6, 5.2, 6.2, 7.5),
    (10e9, 0.8, 85, 17, 4): (0.4, 0.9, 1.4, 1.4, 1.7),
}
MEASURED = [
    # (seconds of training, of the round after it, percent)
    (38 * 60, 103, 95.7),  # INTELLECT-1, 2412.01152, table 2: 10 B, int8, H = 100, in the USA
    (38 * 60, 382, 85.6),  # with replicas in Europe
    (38 * 60, 469, 83.0),  # with replicas around the world
    (20 * 60, 70, 94.5),  # Covenant-72B, 2603.08163: over an object store
]


def utilisation(choice: Choice, step_s: float, round_s: float) -> float:
    """Return the planner's utilization in percent for rounds of this duration, without the time for copies."""
    cost = RoundCost(link_s=round_s, requests_s=0, processor_s=0, noticing_s=0, up=0, down=0)
    job = replace(EXAMPLE, step_s=step_s, processor=Processor(copy=float("inf")))
    return 100 * (1 - Plan(workload=job, choice=choice, round=cost).share)


@pytest.mark.parametrize(("train_s", "round_s", "published"), MEASURED)
def test_a_measured_utilisation_follows_from_the_seconds_of_a_round(
    train_s: float, round_s: float, published: float
) -> None:
    assert utilisation(Choice(inner_steps=100), train_s / 100, round_s) == pytest.approx(published, abs=0.1)


def test_simulated_utilisations_are_a_few_points_above_the_plan() -> None:
    """Two replicas that exchange bf16 both ways at once. The papers hide a part of it in the backward pass."""
    differences = [
        utilisation(Choice(inner_steps=h), step_s, 16 * params / (gbit * 1e9)) - published
        for (params, step_s, h), row in DILOCO.items()
        for gbit, published in zip(row, UTILISATIONS, strict=True)
    ]
    assert len(differences) == 55
    assert -9 < min(differences) <= max(differences) < 0
    assert statistics.mean(differences) == pytest.approx(-2.9, abs=0.1)


def test_simulated_utilisations_with_overlap_are_above_the_plan() -> None:
    """In the papers, a transfer may overlap with the next fragment's, and a layer is needed only at its turn."""
    differences = [
        utilisation(Choice(inner_steps=h, fragments=p, overlap_steps=1), step_s, bits * params / p / (gbit * 1e9))
        - published
        for (params, step_s, h, p, bits), row in OVERLAPPED.items()
        for gbit, published in zip(row, UTILISATIONS, strict=True)
    ]
    assert -13.1 < min(differences) <= max(differences) < 2.2
    assert statistics.mean(differences) == pytest.approx(-6.2, abs=0.3)
