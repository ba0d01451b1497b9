"""Background rounds of a training on a CUDA device give the same result as on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.device_copies import DeviceCopies
from diloco.fragments import Values, plan_fragments
from diloco.live_parameters import BufferPool, HeldWork


class CopiesToNoDevice:
    """In the place of `DeviceCopies`: the device is the CPU, and the test decides about its free memory."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.n_copied = 0
        self._has_room = has_room

    def take_room(self, n_bytes: int) -> bool:
        return self._has_room

    def hold(self, live: Values, memory: Tensor) -> None:
        for slot, values in live:
            memory[slot.start : slot.end].copy_(values.reshape(-1))

    def wait(self) -> None: ...

    def copy_to_device(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        self.n_copied += sum(piece.numel() for piece in pieces)
        return [piece.clone() for piece in pieces]

    def use_on_stream(self, copies: Sequence[Tensor]) -> None: ...


def test_a_result_that_comes_before_the_merge_of_an_earlier_one_replaces_its_values_on_the_device() -> None:
    model = nn.Linear(3, 2, bias=False)
    (fragment,) = plan_fragments(model, 1, sync_buffers=False)
    anchor = torch.zeros(fragment.n_elements)
    held = HeldWork(model, fragment, anchor, BufferPool(fragment.n_elements, keeps=True))
    of_held: Any = held
    for value, has_room in ((1.0, True), (2.0, False)):
        of_held._copies = CopiesToNoDevice(has_room=has_room)
        anchor.fill_(value)
        held.take_anchor(0.0)
        held.prepare_merge()
    with torch.no_grad():
        held.merge()
    assert model.weight.tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("mix", [0.0, 0.25])
@pytest.mark.parametrize("has_room", [True, False])
def test_an_anchor_to_merge_is_copied_to_the_device_before_the_training_thread_merges_it(
    has_room: bool, mix: float
) -> None:
    merged = []
    for copies in (None, CopiesToNoDevice(has_room=has_room)):
        torch.manual_seed(0)
        model = nn.Linear(30, 7)
        (fragment,) = plan_fragments(model, 1, sync_buffers=False)
        held = HeldWork(model, fragment, torch.randn(fragment.n_elements), BufferPool(fragment.n_elements, keeps=True))
        of_held: Any = held
        of_held._copies = copies
        with torch.no_grad():
            held.hold("I")
            held.take_anchor(mix)
            held.prepare_merge()
            held.merge()
        merged.append([parameter.detach() for parameter in model.parameters()])
        if copies is not None:
            assert copies.n_copied == (fragment.n_elements if has_room else 0)
    assert all(torch.equal(one, other) for one, other in zip(*merged, strict=True))


class StreamWithoutDevice:
    """In the place of a CUDA stream and of its last event: notes whether a thread has waited for the event."""

    def __init__(self) -> None:
        self.is_done = False

    def record_event(self) -> StreamWithoutDevice:
        self.is_done = False
        return self

    def synchronize(self) -> None:
        self.is_done = True


def test_pinned_memory_may_be_written_again_once_its_values_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StreamWithoutDevice()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    copies = DeviceCopies(torch.device("cpu"))
    copies.copy_to_device([torch.ones(3)])
    assert stream.is_done


def test_a_gpu_that_had_room_for_copies_still_has_it_when_torch_keeps_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = [200]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: StreamWithoutDevice())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 1000))
    copies = DeviceCopies(torch.device("cpu"))
    assert not copies.take_room(101)
    assert copies.take_room(100)
    free[0] -= 100  # the copies, which torch keeps
    assert copies.take_room(100)
    free[0] -= 1  # the training has taken more
    assert not copies.take_room(100)


SHAPE = (8192, 4096)
"""A copy of a layer of this shape takes milliseconds, so a missing wait is seen."""
CYCLES = 10**9
"""Half a second of a GPU, in which a stream does nothing else."""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["add", "anchor"])
@pytest.mark.parametrize("has_room", [True, False])
def test_work_held_and_merged_on_a_device_has_the_bits_of_the_cpu_however_late_its_streams_are(
    dtype: torch.dtype, kind: str, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_room:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))
    expected, found = (held_and_merged(device, dtype, kind, SHAPE) for device in ("cpu", "cuda"))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def held_and_merged(device: str, dtype: torch.dtype, kind: str, shape: tuple[int, int]) -> list[Tensor]:
    """Return the held copy of a layer, and its parameters after the merge."""
    torch.manual_seed(0)
    model = nn.Linear(*shape).to(dtype).to(device)
    (fragment,) = plan_fragments(model, 1, sync_buffers=False)
    anchor = torch.randn(fragment.n_elements)
    pool = BufferPool(fragment.n_elements, keeps=True)
    held = HeldWork(model, fragment, anchor, pool)
    assert (held._copies is not None) == (device == "cuda")

    def delay_copies() -> None:
        if held._copies is not None:
            with torch.cuda.stream(held._copies._side):
                torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]

    with torch.no_grad():
        if device == "cuda":
            torch.cuda._sleep(2 * CYCLES)  # type: ignore[no-untyped-call] # longer than the copies are delayed
        for parameter in model.parameters():
            parameter.mul_(2.0)  # the last step before the copy
        delay_copies()
        held.hold("I")
        for parameter in model.parameters():
            parameter.add_(1.0)  # the training continues at once
        copy = torch.cat([values.reshape(-1).cpu() for _, values in held.values()])
        if kind == "add":
            held.remove_held()
        else:
            held.take_anchor()
        anchor.sub_(0.5)
        held.after_step()
        delay_copies()
        held.prepare_merge()
        held.merge()
        pool.take(fragment.n_elements, is_pinned=held._is_pinned).fill_(7.0)  # as another fragment does at once
    return [copy, *(parameter.detach().cpu() for parameter in model.parameters())]
