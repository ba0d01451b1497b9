"""The delay until a replica notices a new object of a peer in a directory (S6), compared with polling."""

from __future__ import annotations

from statistics import quantiles

from .harness import Comparison, Options
from .launch import scratch_folder, state_of_its_own

OURS, LOOKING = "the watch of the rendezvous", "looking every 10 ms"


def noticing(options: Options) -> list[Comparison]:
    """S6: one process writes objects at irregular times, and another waits for each."""
    from executors import launch

    n_objects = 20 if options.quick else 300
    found: dict[str, list[float]] = {}
    with state_of_its_own(), scratch_folder("noticing-") as folder:
        for method, watches in ((OURS, True), (LOOKING, False)):
            arguments = {"n_objects": n_objects, "watches": watches}
            task = f"{__package__}.noticing_replica:notice"
            found[method] = launch("local", task, 2, args=arguments, rendezvous=f"{folder}/store").results()[0]
    middle = Comparison("S6", "a peer's object is noticed, median", "ms", found, LOOKING)
    slow = {method: [quantiles(delays, n=10)[8]] for method, delays in found.items()}
    return [middle, Comparison("S6", f"the same, 90th percentile of {n_objects}", "ms", slow, goals={OURS: 1.0})]
