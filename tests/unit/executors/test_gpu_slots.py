"""Tests which GPUs a local replica gets, by the kernel's data about living replicas."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.new_runs import run_spec

from executors.attempt import Attempt
from executors.backends.local.gpu_slots import GpuSlot, take_slot
from executors.backends.local.rank import LocalStarter
from executors.store import MemoryStore


def leave(*slots: GpuSlot) -> None:
    for slot in slots:
        for descriptor in slot.locks:
            os.close(descriptor)


def test_a_rank_gets_its_own_gpus_or_the_next_that_are_free(tmp_path: Path) -> None:
    slots = ["0,1", "2,3"]
    first, second = take_slot(tmp_path, slots, 0), take_slot(tmp_path, slots, 2)
    assert (first.devices, second.devices, first.is_shared, second.is_shared) == ("0,1", "2,3", False, False)
    leave(first)
    assert take_slot(tmp_path, slots, 3).devices == "0,1"


def test_the_gpu_of_a_process_that_cannot_be_killed_is_shared_before_that_of_a_replica_that_trains(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    spec = run_spec("run", "memory:", "", 6, tuple(range(6)))
    launch: Any = SimpleNamespace(
        gpu_slots=["A", "B"],
        log_folder=tmp_path / "run",
        log_file=lambda attempt: tmp_path / f"{attempt.rank}.log",
        torch_threads=lambda cores: None,
        spec=spec,
    )
    ranks = LocalStarter(launch, [])

    def take(rank: int) -> GpuSlot:
        slot = ranks._take_gpus(Attempt(MemoryStore(), "run", rank))
        assert slot is not None
        return slot

    stuck, trains = take(0), take(1)
    ranks.give_up_process(Attempt(MemoryStore(), "run", 0))
    for rank in (3, 5):
        guest = take(rank)
        assert (guest.devices, guest.is_shared) == ("A", True)
        log = (tmp_path / f"{rank}.log").read_text()
        assert log == "replicas: no GPU is free: sharing A with a process that cannot be killed.\n"
        leave(guest)
    leave(stuck, trains)
    assert [take(rank).devices for rank in (2, 3, 5)] == ["A", "B", "B"], (
        "the GPU is free again when the process has ended"
    )


def test_a_gpu_that_a_sharing_rank_still_has_is_not_free(tmp_path: Path) -> None:
    slots = ["A", "B"]
    first, second, guest, other = (take_slot(tmp_path, slots, rank) for rank in (0, 1, 2, 4))
    assert [(each.devices, each.is_shared) for each in (guest, other)] == [("A", True), ("A", True)]
    leave(first, second, guest)
    again = take_slot(tmp_path, slots, 0)
    assert (again.devices, again.is_shared) == ("B", False)
    leave(other)
    assert take_slot(tmp_path, slots, 1).devices == "A"
