"""Background rounds and slow links: lost time (W1), steps during a round (W2), plans (W7), signing (W8)."""

from __future__ import annotations

import os
from itertools import product
from statistics import median
from typing import Any

from .harness import Comparison, Options
from .launch import scratch_folder, state_of_its_own

OVERLAP = 10
FOREGROUND, BESIDE = "every step waits", "rounds beside the training"
SETTINGS: dict[str, dict[str, Any]] = {
    FOREGROUND: {},
    BESIDE: {"overlap_steps": OVERLAP, "merge": "carry"},
}
Link = dict[str, float]
"""The link between each replica and the store: `latency_s` and `bytes_per_s`. None: a directory."""
SLOW: Link = {"latency_s": 0.05, "bytes_per_s": 20e6}


def words(link: Link) -> str:
    return f"{link['latency_s'] * 1000:g} ms and {link['bytes_per_s'] / 1e6:g} MB/s a replica"


def run(task: str, n: int, *, signed: bool = False, **arguments: Any) -> list[Any]:
    """Run a task of `beside_replica` on n replicas that communicate through a directory. Return their results."""
    from executors import launch

    options: dict[str, Any] = {"signed": True} if signed else {}
    with state_of_its_own(), scratch_folder("beside-") as folder:
        where = f"{__package__}.beside_replica:{task}"
        found: list[Any] = launch("local", where, n, args=arguments, rendezvous=f"{folder}/store", **options).results()
    return found


def round_s(n: int, *, rounds: int = 3, **arguments: Any) -> list[float]:
    """Return the times of rounds without any steps, each until its last replica has the mean."""
    found = run("train", n, **{"inner_steps": 1, "step_s": 0.0, "rounds": rounds, **arguments})
    return [max(each) for each in zip(*(rank["busy_s"] for rank in found), strict=True)]


def lost(options: Options) -> list[Comparison]:
    """W1: 4 replicas behind a slow link. Each round is hidden behind steps that take 1.25 times its time."""
    link = {"latency_s": 0.005, "bytes_per_s": 200e6} if options.quick else SLOW
    return [_lost(link, size, options) for size in ((200_000,) if options.quick else (2_500_000, 10_000_000))]


def _lost(link: Link, n_elements: int, options: Options) -> Comparison:
    n, rounds = (2, 2) if options.quick else (4, 3)
    usual_s = median(round_s(n, n_elements=n_elements, link=link, settings={}))
    samples: dict[str, list[float]] = {method: [] for method in SETTINGS}
    for _ in range(options.repetitions(1)):
        for method, settings in SETTINGS.items():
            found = run(
                "train", n, n_elements=n_elements, link=link, inner_steps=2 * OVERLAP, step_s=1.25 * usual_s / OVERLAP,
                rounds=rounds, settings=settings,
            )  # fmt: skip
            samples[method] += [100 * sum(each["step_s"]) / each["all_s"] for each in found]
    return Comparison(
        "W1",
        f"{n_elements * 4 / 1e6:g} MB, N={n}, {words(link)}: time lost in step()",
        "%",
        samples,
        goals={BESIDE: 2.0},
        note=f"a round takes {usual_s:.2f} s, the steps in which it is hidden 1.25 times that",
    )


def steps(options: Options) -> list[Comparison]:
    """W2: the effect of a running round on the steps."""
    n_elements, rounds = (500_000, 1) if options.quick else (25_000_000, options.repetitions(5))
    found = []
    for kind, goal in (("device-like", 1.01), ("small operations on the CPU", 1.05)):
        (samples,) = run("time_steps", 1, n_elements=n_elements, rounds=rounds, on_device=kind == "device-like")
        title = f"a step, {kind}, beside rounds of {n_elements * 4 / 1e6:g} MB"
        found.append(Comparison("W2", title, "s", samples, "alone", {"beside a round": goal}))
    return found


def planned(options: Options) -> list[Comparison]:
    """W7: the time of a round by `replicas plan`, and the real time, with and without steps."""
    from diloco import planner

    n = 2 if options.quick else 4
    cases = [(50_000, "fp32", {"latency_s": 0.005, "bytes_per_s": 20e6})] if options.quick else PLANNED
    samples: dict[str, list[float]] = {}
    seconds = []
    for (n_elements, wire, link), overlap in product(cases, (0, OVERLAP)):
        plan_s = _plan_s(n, n_elements, wire, link, overlap)
        hidden: dict[str, Any] = (
            {"inner_steps": 2 * OVERLAP, "step_s": planner.MARGIN * plan_s / OVERLAP} if overlap else {}
        )
        settings = {"wire": wire, "overlap_steps": overlap, "merge": "carry"}
        taken_s = round_s(n, n_elements=n_elements, link=link, settings=settings, **hidden)
        name = f"{n_elements * 4 / 1e6:g} MB as {wire}, {words(link)}" + ", beside" * (overlap > 0)
        samples[name] = [100 * abs(t / plan_s - 1) for t in taken_s]
        seconds.append(f"{plan_s:.2f} and {median(taken_s):.2f}")
    note = f"s, planned and measured: {', '.join(seconds)}"
    goals = dict.fromkeys(samples, 25.0)
    return [Comparison("W7", f"N={n}: a round is off the plan by", "%", samples, goals=goals, note=note)]


PLANNED: tuple[tuple[int, str, Link], ...] = (
    (10_000_000, "fp32", SLOW),
    (10_000_000, "int8", SLOW),
    (2_500_000, "int8", {"latency_s": 0.1, "bytes_per_s": 5e6}),
)


def _plan_s(n: int, n_elements: int, wire: str, link: Link, overlap: int) -> float:
    from diloco import planner

    rate = link["bytes_per_s"]
    # the share of a core for each replica
    usual, share = planner.Processor(), min(1.0, len(os.sched_getaffinity(0)) / n)
    processor = planner.Processor(
        encode=share * usual.encode,
        accumulate=share * usual.accumulate,
        decode=share * usual.decode,
        step=share * usual.step,
    )
    way = planner.Link(up=rate, down=rate, latency_s=link["latency_s"])
    job = planner.Workload(params=n_elements, n=n, step_s=1.0, link=way, processor=processor)
    return planner.evaluate(
        job, planner.Choice(inner_steps=2 * OVERLAP, overlap_steps=overlap, wire=wire)
    ).round.seconds


def signed(options: Options) -> list[Comparison]:
    """W8: rounds of a signed run in a directory."""
    n, n_elements = (2, 200_000) if options.quick else (4, 25_000_000)
    samples: dict[str, list[float]] = {"unsigned": [], "signed": []}
    for _ in range(options.repetitions(3)):
        for method, taken in samples.items():
            settings = {"wire": "int8"}
            taken += round_s(n, signed=method == "signed", rounds=4, n_elements=n_elements, link={}, settings=settings)
    title = f"{n_elements * 4 / 1e6:g} MB as int8, N={n}, a directory: a round"
    return [Comparison("W8", title, "s", samples, "unsigned", {"signed": 1.15})]
