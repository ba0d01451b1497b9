"""The outer step: its time compared with the necessary memory traffic (O1), and its memory (O2, W10)."""

from __future__ import annotations

from typing import Any

from .harness import Comparison, Options
from .launch import state_of_its_own

FLOOR = "floor: read and write two buffers, read one"
PEER = "torch.optim.SGD(nesterov, foreach), then a digest of its state"


def outer_step(options: Options) -> list[Comparison]:
    """O1 and O2: GPT-2's shapes, 96 million parameters in 148 tensors, one thread."""
    shape = TOY if options.quick else USUAL
    where = "a toy model" if options.quick else "96M parameters in 148 tensors"
    times = _in_a_process("time_step", **shape, repetitions=options.repetitions(15))
    ours, plain = "outer step, with its digest", "torch.optim.SGD(nesterov, foreach)"
    samples = {PEER: times["sgd_and_digest"], ours: times["ours"], plain: times["sgd"], FLOOR: times["floor"]}
    found = [Comparison("O1", f"outer step, {where}, one thread", "s", samples, PEER, {ours: 1.0})]
    memory = {
        "outer step": _in_a_process("memory_of_step", **shape, how="ours"),
        "copy of the model and torch.optim.SGD(foreach)": _in_a_process("memory_of_step", **shape, how="sgd"),
        "DiLoCo, one fragment": _in_a_process("memory_of_replica", **shape, fragments=1),
        "DiLoCo, 4 fragments": _in_a_process("memory_of_replica", **shape, fragments=4),
        "DiLoCo, one fragment, one of 4 replicas": _in_a_process("memory_of_replica", n=4, **shape, fragments=1),
    }
    for when in ("peak", "steady"):
        taken = {method: [each[when]] for method, each in memory.items()}
        title = f"memory beside the model, {when}"
        found.append(Comparison("O2", title, "models", taken, goals={"outer step": 2.05}))
    return found


def memory_beside(options: Options) -> list[Comparison]:
    """W10: the memory of background rounds, for the same model."""
    shape = TOY if options.quick else USUAL
    settings = {"wire": "int8", "overlap_steps": 1, "merge": "carry"}
    found = {
        f"{fragments} fragment{'s' * (fragments > 1)}{of}": _in_a_process(
            "memory_of_replica",
            2 if options.quick else 4,
            **shape,
            fragments=fragments,
            settings={**settings, "wire": wire},
        )
        for fragments, wire, of in ((1, "int8", ""), (4, "int8", ""), (1, "top8", ", top8"))
    }
    taken = {method: [each["peak"]] for method, each in found.items()}
    title = "memory beside the model, int8, rounds beside the training, one of 4 replicas, peak"
    return [
        Comparison(
            "W10", title, "models", taken, goals={"1 fragment": 3.3, "4 fragments": 2.6, "1 fragment, top8": 4.2}
        )
    ]


TOY = {"width": 64, "layers": 2, "vocabulary": 256}
USUAL = {"width": 768, "layers": 12, "vocabulary": 13_312}


def _in_a_process(task: str, n: int = 1, **arguments: Any) -> Any:
    from executors import launch

    with state_of_its_own():
        return launch("local", f"{__package__}.outer_step_replica:{task}", n, args=arguments).results()[0]
