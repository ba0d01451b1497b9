"""Which GPUs a local replica gets, by what the kernel says of those that live."""

from __future__ import annotations

import os
from pathlib import Path

from executors.backends.local.gpu_slots import GpuSlot, take_slot


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


def test_a_gpu_that_a_sharing_rank_still_has_is_not_free(tmp_path: Path) -> None:
    slots = ["A", "B"]
    first, second, guest, other = (take_slot(tmp_path, slots, rank) for rank in (0, 1, 2, 4))
    assert [(each.devices, each.is_shared) for each in (guest, other)] == [("A", True), ("A", True)]
    leave(first, second, guest)
    again = take_slot(tmp_path, slots, 0)
    assert (again.devices, again.is_shared) == ("B", False)
    leave(other)
    assert take_slot(tmp_path, slots, 1).devices == "A"
