"""Rounds: the time to average one flat tensor over a directory, compared with gloo in the same processes (S1), and the
bytes (S5, S8).

Eight replicas write 3.6 GB a round for 100M elements. On a disk, Linux accepts writes at the speed of memory until a
share of the free memory (`vm.dirty_ratio`) waits to be written. After that, writes have the speed of the disk. On a
machine of 24 GiB, this happens in the middle of the round. So large tensors are measured a second time on a file system
in memory, with large pages as in the cache of a disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from shutil import which
from statistics import fmean, median
from typing import Any

from .harness import Comparison, Options
from .rounds_group import group

Costs = dict[str, Any]
"""The cost of one round for one replica, as `rounds_replica.exchange` returns it."""
GLOO, MEAN, WHOLE = "gloo all_reduce", "file store, until the mean is there", "the same and the outer step"
LARGE = 100_000_000
GOALS = {("fp32", 8): 0.65, ("int8", 8): 0.5}
"""The goals for the large size, by wire and number of replicas. 0.9 for all others."""


@dataclass(frozen=True)
class Place:
    """A location of the directory."""

    name: str
    around: tuple[str, ...] = ()
    """The command prefix that runs the benchmark's command, as for a mount."""


TEMPORARY = Place("in the temporary folder")
# The mount is in a new mount namespace, so it always disappears with it.
MEMORY = Place(
    "in memory, with large pages",
    (
        *("unshare", "--map-root-user", "--mount", "sh", "-c"),
        # The mount point is a folder of its own: over the temporary folder it would hide a checkout there.
        'd=$(mktemp -d) && { mount -t tmpfs -o huge=always replicas "$d" && TMPDIR=$d "$@"; code=$?; '
        'umount --lazy "$d"; rmdir "$d"; exit $code; }',
        "sh",
    ),
)


def can_mount() -> bool:
    """Return True if this user can mount a folder in memory."""
    return (
        bool(which("unshare")) and subprocess.run([*MEMORY.around, "true"], stderr=subprocess.DEVNULL).returncode == 0
    )


def rounds(options: Options) -> list[Comparison]:
    """Measure every size and number of replicas."""
    if options.quick:
        return _exchange(3_000_000, 2, 1, 2, TEMPORARY)  # large enough for a mean in shards
    places = [TEMPORARY]
    if can_mount():
        places.append(MEMORY)
    found = []
    for n_elements, n in ((size, n) for size in (10_000_000, LARGE) for n in (2, 4, 8)):
        for place in places if n_elements == LARGE else [TEMPORARY]:
            found += _exchange(n_elements, n, options.repetitions(2), 4, place)
            if (n_elements, n) == (LARGE, 8):
                found += _exchange(n_elements, n, options.repetitions(2), 4, place, "int8")
    return found


def _exchange(
    n_elements: int, n: int, groups: int, rounds_each: int, place: Place, wire: str = "fp32"
) -> list[Comparison]:
    """Run rounds in some groups of processes, one group after the other."""
    by_group = [_group(n_elements, n, rounds_each, place, wire) for _ in range(groups)]
    first = [group[0] for group in by_group]
    steady = [costs for group in by_group for costs in group[1:]]
    size = f"{n_elements / 1e6:g}M float32, N={n}" + f" over {wire}" * (wire != "fp32")
    timed = f"{size}, {place.name}"
    name = "S1" if wire == "fp32" else "S5"
    goals = {MEAN: GOALS.get((wire, n), 0.9)} if n_elements == LARGE else {}
    times = [
        Comparison(name, f"{timed}: first round", "s", _times(first), GLOO, note=_shares(first)),
        Comparison(name, f"{timed}: later rounds", "s", _times(steady), GLOO, goals, _shares(steady)),
        Comparison(name, f"{timed}: later rounds, processor time of all", "s", _processor(steady), GLOO),
    ]
    moved = _wire(size, n, 4 * n_elements, wire, first + steady)
    return [*times, _bytes(size, n, 4 * n_elements, first + steady), moved] if wire == "fp32" else [*times, moved]


def _group(n_elements: int, n: int, rounds_each: int, place: Place, wire: str) -> list[list[Costs]]:
    """Start N processes, and return the costs of each round by rank."""
    if place.around:
        arguments = map(str, (n_elements, n, rounds_each, wire))
        command = [sys.executable, "-m", f"{__package__}.rounds_group", *arguments]
        said = subprocess.run([*place.around, *command], check=True, stdout=subprocess.PIPE, text=True).stdout
        by_rank: list[list[Costs]] = json.loads(said)
    else:
        by_rank = group(n_elements, n, rounds_each, wire)
    by_round = [list(costs) for costs in zip(*by_rank, strict=True)]
    for costs in by_round:
        assert all(each["ranks"] == list(range(n)) for each in costs), "a replica is missing in a round"
    return by_round


def _times(rounds_: list[list[Costs]]) -> dict[str, list[float]]:
    """A round ends when the last replica has applied it."""
    return {
        GLOO: [max(each["gloo_s"] for each in costs) for costs in rounds_],
        MEAN: [max(each["mean_s"] for each in costs) for costs in rounds_],
        WHOLE: [max(each["round_s"] for each in costs) for costs in rounds_],
    }


def _processor(rounds_: list[list[Costs]]) -> dict[str, list[float]]:
    return {
        method: [sum(each[what] for each in costs) for costs in rounds_]
        for method, what in ((GLOO, "gloo_cpu_s"), (MEAN, "mean_cpu_s"), (WHOLE, "round_cpu_s"))
    }


def _shares(rounds_: list[list[Costs]]) -> str:
    parts = ", ".join(f"{what[:-2]} {_middle(rounds_, itemgetter(what)):.3f}" for what in _PARTS)
    return f"of which, mean over the replicas, s: {parts}"


_PARTS = ("move_s", "reduce_s", "wait_s")


def _middle(rounds_: list[list[Costs]], value: Callable[[Costs], float]) -> float:
    return median(fmean(value(each) for each in costs) for costs in rounds_)


def _wire(size: str, n: int, payload_bytes: int, wire: str, rounds_: list[list[Costs]]) -> Comparison:
    """Compare the bytes that are written and read with the least bytes of float32 in shards."""
    least = "the payload, sharded: (3 - 1/N) M"
    sums = [
        fmean(sum(each[way][what] for way in ("read", "written") for what in ("payload", "other")) for each in costs)
        for costs in rounds_
    ]
    samples = {
        least: [(3 - 1 / n) * payload_bytes / 1e6],
        f"{wire}, heads and seals and all": [total / 1e6 for total in sums],
    }
    return Comparison("S5", f"{size}: bytes on the wire per replica and round", "MB", samples, least)


def _bytes(size: str, n: int, payload_bytes: int, rounds_: list[list[Costs]]) -> Comparison:
    def per_round(direction: str) -> list[float]:
        return [fmean(each[direction]["payload"] for each in costs) / payload_bytes for costs in rounds_]

    other = (
        _middle(rounds_, lambda each: each["read"]["other"]),
        _middle(rounds_, lambda each: each["written"]["other"]),
    )
    return Comparison(
        "S8",
        f"{size}: payload per replica and round",
        "M",
        {"read": per_round("read"), "written": per_round("written")},
        goals={"read": 2 - 2 / n, "written": 1 + 1 / n},
        note="heads, seals and so on, bytes: {:,.0f} read, {:,.0f} written".format(*other),
    )
