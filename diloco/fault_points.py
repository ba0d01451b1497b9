"""Names the points in a round at which `replicas launch --chaos kill:…,at=NAME` can kill a replica. Each is a call of
the store.

Objects of a round have the index of the round in their key. A snapshot has the number of rounds before it, which is 0
for the first anchor. The package publishes this table in the entry point group `replicas.fault_points`. This file does
not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from executors.store.faulty import FaultPoint

FAULT_POINTS: Mapping[str, FaultPoint] = {
    "part": FaultPoint("put", "*/diloco/*/part/{round}/*"),
    "part-read": FaultPoint("get", "*/diloco/*/part/{round}/*"),
    "part-delete": FaultPoint("delete", "*/diloco/*/part/{round}/*"),
    "pointer": FaultPoint("put_if_absent", "*/diloco/*/snapshot/{round}"),
    "pointer-read": FaultPoint("get", "*/diloco/*/snapshot/{round}"),
    "contribution": FaultPoint("put_if_absent", "*/diloco/*/r{index}/contribution/{rank}"),
    "contribution-read": FaultPoint("get", "*/diloco/*/r{index}/contribution/*", inside=False),
    "contribution-delete": FaultPoint("delete", "*/diloco/*/r{index}/contribution/{rank}"),
    "input-read": FaultPoint("get", "*/diloco/*/r{index}/contribution/*", inside=True),
    "seal": FaultPoint("put_if_absent", "*/diloco/*/seal/{index}"),
    "seal-read": FaultPoint("get", "*/diloco/*/seal/{index}"),
    "mean": FaultPoint("put_if_absent", "*/diloco/*/r{index}/mean/*"),
    "mean-read": FaultPoint("get", "*/diloco/*/r{index}/mean/*"),
    "mean-delete": FaultPoint("delete", "*/diloco/*/r{index}/mean/*"),
    "own": FaultPoint("put", "*/diloco/*/own/{rank}/{round}/*"),
    "own-read": FaultPoint("get", "*/diloco/*/own/{rank}/{round}/*"),
    "list": FaultPoint("list", "*/diloco/*"),
    "bye": FaultPoint("put", "*/diloco/*/bye/{rank}/*"),
}
