"""One group of processes that average over gloo and over a directory; prints the costs of each replica's rounds.

python -m tests.benchmarks.rounds_group N_ELEMENTS N ROUNDS WIRE
"""

from __future__ import annotations

import json
import sys
from typing import Any

from .launch import scratch_folder, state_of_its_own


def group(n_elements: int, n: int, rounds: int, wire: str) -> list[list[dict[str, Any]]]:
    """Launch the replicas, and wait for them. Their store is in the directory for temporary files."""
    from executors import launch

    with state_of_its_own(), scratch_folder("rounds-") as folder:
        arguments = {"n_elements": n_elements, "rounds": rounds, "wire": wire, "meeting_file": f"{folder}/gloo"}
        task = f"{__package__}.rounds_replica:exchange"
        return launch("local", task, n, args=arguments, rendezvous=f"{folder}/store").results()


if __name__ == "__main__":
    n_elements, n, rounds, wire = sys.argv[1:]
    print(json.dumps(group(int(n_elements), int(n), int(rounds), wire)))
