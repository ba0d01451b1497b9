"""Rounds beside the training: time lost behind a slow link (W1), steps while a round goes on (W2)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from .harness import Comparison, Options
from .launch import scratch_folder, state_of_its_own

LATENCY_S, BYTES_PER_S = 0.05, 20e6
OVERLAP = 10
FOREGROUND, BESIDE = "every step waits", "rounds beside the training"
SETTINGS: dict[str, dict[str, Any]] = {
    FOREGROUND: {},
    BESIDE: {"overlap_steps": OVERLAP, "merge": "carry"},
}


@dataclass(frozen=True)
class Link:
    """What lies between each replica and the store."""

    latency_s: float = LATENCY_S
    bytes_per_s: float = BYTES_PER_S

    def __str__(self) -> str:
        return f"{self.latency_s * 1000:g} ms and {self.bytes_per_s / 1e6:g} MB/s a replica"

    def run(self, n: int, **arguments: Any) -> list[dict[str, Any]]:
        """Let n replicas train behind it; return what each found."""
        from executors import launch

        with state_of_its_own(), scratch_folder("beside-") as folder:
            link = {"latency_s": self.latency_s, "bytes_per_s": self.bytes_per_s}
            task = f"{__package__}.beside_replica:train"
            found: list[dict[str, Any]] = launch(
                "local", task, n, args={**link, **arguments}, rendezvous=f"{folder}/store"
            ).results()
        return found

    def round_s(self, n: int, n_elements: int, **settings: Any) -> list[float]:
        """Return what rounds take with nothing beside them: each until its last replica has it."""
        arguments = {"n_elements": n_elements, "inner_steps": 1, "step_s": 0.0, "rounds": 4, "settings": settings}
        by_rank = [found["step_s"] for found in self.run(n, **arguments)]
        return [max(each) for each in zip(*by_rank, strict=True)][1:]


def lost(options: Options) -> list[Comparison]:
    """W1: 4 replicas behind a slow link, each round hidden behind 1.25 times what it takes."""
    link = Link(0.005, 200e6) if options.quick else Link()
    return [_lost(link, size, options) for size in ((200_000,) if options.quick else (2_500_000, 10_000_000))]


def _lost(link: Link, n_elements: int, options: Options) -> Comparison:
    n, rounds = (2, 2) if options.quick else (4, 3)
    round_s = median(link.round_s(n, n_elements))
    samples: dict[str, list[float]] = {method: [] for method in SETTINGS}
    for _ in range(options.repetitions(1)):
        for method, settings in SETTINGS.items():
            found = link.run(
                n, n_elements=n_elements, inner_steps=2 * OVERLAP, step_s=1.25 * round_s / OVERLAP, rounds=rounds,
                settings=settings,
            )  # fmt: skip
            samples[method] += [100 * sum(each["step_s"]) / each["all_s"] for each in found]
    return Comparison(
        "W1",
        f"{n_elements * 4 / 1e6:g} MB, N={n}, {link}: time lost in step()",
        "%",
        samples,
        goals={BESIDE: 2.0},
        note=f"a round takes {round_s:.2f} s, the steps in which it is hidden 1.25 times that",
    )


def steps(options: Options) -> list[Comparison]:
    """W2: what a busy round does to the steps beside it."""
    from executors import launch

    n_elements, rounds = (500_000, 3) if options.quick else (25_000_000, options.repetitions(5))
    found = []
    for kind, goal in (("device-like", 1.01), ("small operations on the CPU", 1.05)):
        arguments = {"n_elements": n_elements, "rounds": rounds, "on_device": kind == "device-like"}
        with state_of_its_own(), scratch_folder("beside-") as folder:
            task = f"{__package__}.beside_replica:time_steps"
            (samples,) = launch("local", task, 1, args=arguments, rendezvous=f"{folder}/store").results()
        title = f"a {kind} step, beside rounds of {n_elements * 4 / 1e6:g} MB"
        found.append(Comparison("W2", title, "s", samples, "alone", {"beside a round": goal}))
    return found
