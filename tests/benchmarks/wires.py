"""Wires: the cost of encoding for a sender (W3), the cost of decoding for a reducer (W4), the bytes of a round (W5).

W11 is the speed of the sparse wire.
"""

from __future__ import annotations

from typing import Any

from .harness import Comparison, Options
from .launch import state_of_its_own


def wires(options: Options) -> list[Comparison]:
    """W3 to W5, and W11: measured in one thread, compared with fp32 or int8."""
    n = 3 << 16 if options.quick else 32 << 20
    times = _in_a_process("time_wires", n_elements=n, repetitions=options.repetitions(15))
    goals = {"W3": {"int8": 1 / 0.4}, "W4": {"int8": 1 / 0.6, "int4": 1 / 0.45}}
    titles = {"W3": "subtract, encode, digest", "W4": "digest, decode, weigh, add"}
    where = f"{n / 1e6:.1f}M values, one thread"
    found = [Comparison(name, f"{titles[name]}, {where}", "s", times[name], "fp32", goals[name]) for name in titles]
    # The sparse wire is for links where int8 is too large, so int8 is its peer.
    least = {"W3": 0.35, "decode": 0.25, "W4": 0.6}
    for name, share in least.items():
        taken = {wire: times[name][wire] for wire in ("int8", "top8")}
        title = f"{titles.get(name, 'decode')}, {where}"
        found.append(Comparison("W11", title, "s", taken, "int8", {"top8": 1 / share}))
    block, rounds = (1 << 14, 1) if options.quick else (1 << 20, 3)
    size = _in_a_process("bytes_of_a_round", n_elements=8 * block, block_elements=block, rounds=rounds)
    goal = {"int8, means too": 0.256, "int4, means int8": 0.2, "top8, means int4": 0.065, "top8, each": 0.035}
    return [*found, Comparison("W5", "bytes of a round, up and down", "bytes", size, "fp32", goal)]


def _in_a_process(task: str, **arguments: Any) -> Any:
    from executors import launch

    with state_of_its_own():
        env = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        return launch("local", f"{__package__}.wires_replica:{task}", 1, args=arguments, env=env).results()[0]
