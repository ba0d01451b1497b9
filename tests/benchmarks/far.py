"""Rounds behind a far bucket: requests per replica and round (S9), and seconds with 50 ms of latency (S10).

The server is small, on loopback and in a process of its own. It delays each request like a far one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from .harness import Comparison, Options
from .launch import scratch_folder, state_of_its_own

sys.path.insert(0, str(Path(__file__).parents[1]))  # the servers of the tests

from servers.s3.server import CREDENTIALS, S3Server, running_server

LATENCY_S, BYTES_PER_S = 0.05, 20e6
IN_TURN, AT_ONCE = "reading one object after the other", "reading objects at once, as DiLoCo does"


def far(options: Options) -> list[Comparison]:
    """S9 and S10."""
    n = 2 if options.quick else 8
    n_elements, block_elements = (40_000, 4 << 10) if options.quick else (2_000_000, 16 << 10)
    rounds = options.repetitions(5) + 1  # in the first round, replicas learn how far apart they arrive
    by_method: dict[str, list[list[dict[str, Any]]]] = {}
    with running_bucket() as server:
        for method in (IN_TURN, AT_ONCE):
            arguments = {"n_elements": n_elements, "rounds": rounds, "block_elements": block_elements}
            by_method[method] = _rounds(server, n, {**arguments, "at_once": method == AT_ONCE})
    what = f"{n_elements * 4 / 1e6:g} MB, N={n}, {n} shards"
    behind = f"{LATENCY_S * 1000:g} ms latency and {BYTES_PER_S / 1e6:g} MB/s a request"
    seconds = {
        method: [max(each["round_s"] for each in costs) for costs in found] for method, found in by_method.items()
    }
    return [
        _requests(what, n, by_method[AT_ONCE]),
        Comparison("S10", f"{what}: a round behind {behind}", "s", seconds, IN_TURN),
    ]


def _requests(what: str, n: int, rounds_: list[list[dict[str, Any]]]) -> Comparison:
    samples = {
        method: [fmean(each["requests"].get(method, 0) for each in costs) for costs in rounds_]
        for method in ("GET", "HEAD", "PUT", "DELETE")
    }
    theirs = 2 * (n - 1) + 4
    note = f"the protocol: {theirs} GETs and back-off polls (about 40 in all at N=8), {2 + 1 / n:g} PUTs, 1 DELETE"
    return Comparison(
        "S9", f"{what}: requests per replica and round", "requests", samples, goals={"GET": 40}, note=note
    )


def _rounds(server: S3Server, n: int, arguments: dict[str, Any]) -> list[list[dict[str, Any]]]:
    from executors import launch

    server.empty()
    server.misbehave(latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S)
    with state_of_its_own(), scratch_folder("far-") as folder:
        arguments = {"url": server.url("far"), **arguments}
        run = launch("local", f"{__package__}.far_replica:meet", n, args=arguments, rendezvous=f"{folder}/store")
        by_rank: list[list[dict[str, Any]]] = run.results()
    by_round = [list(costs) for costs in zip(*by_rank, strict=True)][1:]
    for costs in by_round:
        assert all(each["ranks"] == list(range(n)) for each in costs), "a replica is missing in a round"
    return by_round


@contextmanager
def running_bucket() -> Iterator[S3Server]:
    """Start a server, and set the environment so that launched replicas find it."""
    before = {name: os.environ.get(name) for name in CREDENTIALS}
    os.environ.update(CREDENTIALS)
    try:
        with running_server() as server:
            yield server
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
