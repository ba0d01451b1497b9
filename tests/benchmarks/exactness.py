"""C1: replicas are bit-identical after every round, and one inner step of SGD is data-parallel training."""

from __future__ import annotations

from typing import Any

from .harness import Comparison, Options
from .launch import scratch_folder, state_of_its_own

OURS, PEER = "DiLoCo, one inner step, eta 1, mu 0", "data-parallel: gloo, same seed, same batches"


def exactness(options: Options) -> list[Comparison]:
    """C1: the anchors of all replicas, and their distance from data-parallel training."""
    from executors import launch

    n, rounds = (2, 3) if options.quick else (4, 50)
    with state_of_its_own(), scratch_folder("exactness-") as folder:
        arguments = {"rounds": rounds, "meeting_file": f"{folder}/gloo"}
        run = launch("local", f"{__package__}.exactness_replica:train", n, args=arguments, rendezvous=f"{folder}/store")
        by_rank: list[list[dict[str, Any]]] = run.results()
    by_round = list(zip(*by_rank, strict=True))
    different = [float(len({each["anchor"] for each in replicas}) - 1) for replicas in by_round]
    apart = [max(each["apart"] for each in replicas) for replicas in by_round]
    return [
        Comparison(
            "C1", f"N={n}: anchors that differ from the first's, after each of {rounds} rounds", "anchors",
            {OURS: different}, goals={OURS: 0.0}, note=f"the most in any round: {max(different):g}",
        ),
        Comparison(
            "C1", f"N={n}: largest distance from data-parallel training's parameters, after each round",
            "float32 roundings of the largest parameter a step", {OURS: apart}, goals={OURS: 1.0},
            note=f"the peer: {PEER}",
        ),
    ]  # fmt: skip
