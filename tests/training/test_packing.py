"""Packing in pieces: streamed and kept payloads are equal, and parallel reads change nothing."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training import next_process, place
from torch import Tensor, nn

from diloco.errors import ContributionError
from diloco.fragments import Fragment, plan_fragments
from diloco.live_parameters import has_moved, live_tensors, pack
from diloco.outer import open_diloco
from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.frames import digests_of
from diloco.rendezvous.retrying_store import THREADS, ParallelMap
from diloco.rendezvous.round import Layout, Limits
from diloco.testing import run_replicas
from diloco.wires import FP32, WIRES
from diloco.wires.wire import PIECE, Floats, Wire, decoded
from executors.store import MemoryStore, Store
from executors.store.file import FileStore


def model_of(sizes: list[int], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Fragment, Tensor]:
    """Return a model with tensors of these sizes, its one fragment, and another anchor."""
    model = nn.Module()
    generator = torch.Generator().manual_seed(sum(sizes))
    model.tensors = nn.ParameterList([torch.randn(size, generator=generator).to(dtype) for size in sizes])
    (fragment,) = plan_fragments(model, 1, sync_buffers=False)
    return model, fragment, torch.randn(fragment.n_elements, generator=generator)


def difference(model: nn.Module, fragment: Fragment, anchor: Tensor) -> Floats:
    live = torch.cat([model.get_parameter(slot.name).detach().float().reshape(-1) for slot in fragment.slots])
    values: Floats = (anchor - live).numpy()
    return values


def encoded(wire: Wire, values: Floats, block_elements: int) -> list[bytes]:
    """Return the blocks of a payload."""
    blocks = []
    for first in range(0, len(values), block_elements):
        of_block = values[first : first + block_elements].copy()
        block = memoryview(bytearray(wire.size(len(of_block))))
        wire.encode(of_block, block, len(of_block), 0)
        blocks.append(bytes(block))
    return blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whether_work_has_moved_is_seen_in_its_first_piece(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    model, fragment, _ = model_of([3 * PIECE + 5, 7], dtype)
    live = live_tensors(model, fragment)
    anchor = torch.cat([values.float().reshape(-1) for _, values in live])
    compared, equal = [], torch.equal

    def noted(one: Tensor, other: Tensor) -> bool:
        compared.append(one.numel())
        return equal(one, other)

    monkeypatch.setattr(torch, "equal", noted)
    assert not has_moved(live, anchor)
    assert compared == [PIECE, PIECE, PIECE, 5, 7]
    compared.clear()
    for at, pieces in ((fragment.n_elements - 1, [PIECE, PIECE, PIECE, 5, 7]), (3 * PIECE, [PIECE] * 3 + [5])):
        anchor[at] += 1.0
        assert has_moved(live, anchor)
        assert compared == pieces
        compared.clear()
    anchor[0] += 1.0
    assert has_moved(live, anchor)
    assert compared == [PIECE]


@settings(deadline=None)  # a deadline would fail on a loaded machine
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=8),
    st.sampled_from([1, 3, 16, 25, 250]),
    st.tuples(st.integers(0, 20), st.integers(0, 20)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(list(WIRES.values())),
)
def test_streamed_pieces_are_the_payload_and_the_kept_bytes_are_a_part_of_it(
    sizes: list[int], block_elements: int, keep: tuple[int, int], dtype: torch.dtype, wire: Wire
) -> None:
    model, fragment, anchor = model_of(sizes, dtype)
    expected = b"".join(encoded(wire, difference(model, fragment, anchor), block_elements))
    first, end = (min(at * wire.size(block_elements), len(expected)) for at in sorted(keep))
    kept, written = memoryview(bytearray(b"7" * (end - first))), bytearray()
    with torch.no_grad():
        packed = pack(
            live_tensors(model, fragment), anchor, kept, wire=wire, proof=UNSIGNED, start=first,
            write=written.extend, who="I", block_elements=block_elements,
        )  # fmt: skip
    assert bytes(written) == expected
    assert packed.blocks == digests_of(expected, wire.size(block_elements), UNSIGNED)
    assert len(packed.norms) == len(packed.blocks)
    squares = [values @ values for _, values in decoded(wire, [memoryview(expected)], sum(sizes), block_elements)]
    assert sum(norm**2 for norm in packed.norms) == pytest.approx(sum(squares), rel=1e-4)
    assert bytes(packed.kept) == expected[first:end]
    assert packed.part(first, end - first) is not None
    assert packed.part(first, end - first + 4) is None
    assert first == 0 or packed.part(first - 4, 4) is None


def test_pieces_of_a_large_block_are_digested_as_one() -> None:
    model, fragment, anchor = model_of([PIECE - 5, 3 * PIECE, 11])
    kept = memoryview(bytearray(4 * fragment.n_elements))
    with torch.no_grad():
        live = live_tensors(model, fragment)
        packed = pack(live, anchor, kept, wire=FP32, proof=UNSIGNED, who="I", block_elements=2 * PIECE + 10)
    assert bytes(packed.kept) == difference(model, fragment, anchor).tobytes()
    assert packed.blocks == digests_of(packed.kept, 8 * PIECE + 40, UNSIGNED)


def test_a_value_that_is_not_finite_is_named_also_when_it_is_streamed() -> None:
    model, fragment, anchor = model_of([50, 60])
    with torch.no_grad():
        model.get_parameter("tensors.1")[7] = float("nan")
        live = live_tensors(model, fragment)
        with pytest.raises(ContributionError, match=r"Rank 3: 'tensors.1' is not finite in 1 of 60 values"):
            pack(live, anchor, memoryview(b""), wire=FP32, proof=UNSIGNED, write=len, who="Rank 3", block_elements=16)


def test_a_value_that_is_too_large_for_the_wire_is_refused() -> None:
    model, fragment, anchor = model_of([50])
    with torch.no_grad():
        model.get_parameter("tensors.0")[7] = 3.4e38
        live = live_tensors(model, fragment)
        pack(live, anchor, memoryview(b""), wire=FP32, proof=UNSIGNED, write=len, who="Rank 3")
        with pytest.raises(ContributionError, match=r"Rank 3: a value is too large for wire='int8'"):
            pack(live, anchor, memoryview(b""), wire=WIRES["int8"], proof=UNSIGNED, write=len, who="Rank 3")


class FarStore:
    """A store that streams nothing, and whose response time is unknown."""

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self.get, self.put, self.put_if_absent = store.get, store.put, store.put_if_absent
        self.list, self.delete = store.list, store.delete


def anchors_after(store: Store, n: int, rounds: int, wire: str) -> list[bytes]:
    """Run sharded rounds of several replicas, one thread each, and return their anchors."""

    def body(where: Mapping[str, Any]) -> bytes:
        model = nn.Linear(300, 7)
        torch.nn.init.constant_(model.weight, 0.5)
        torch.nn.init.zeros_(model.bias)
        with open_diloco(
            model, inner_steps=1, wire=wire, limits=Limits(small_bytes=0, block_elements=250), **where
        ) as diloco:
            for number in range(rounds):
                with torch.no_grad():
                    model.weight += 0.1 * (where["rank"] + 1) * (number + 1)
                report = diloco.step()
                assert report is not None
                assert report.ranks == tuple(range(n))
            return b"".join(values.numpy().tobytes() for values in diloco.anchor().values())

    return run_replicas(n, body, store=store)


@pytest.mark.parametrize("wire", ["fp32", "int4"])
def test_streaming_reading_at_once_and_neither_lead_to_the_same_anchor(wire: str, tmp_path: Path) -> None:
    streamed = anchors_after(FileStore(tmp_path / "near"), 3, 4, wire)
    at_once = anchors_after(FarStore(FileStore(tmp_path / "far")), 3, 4, wire)
    in_memory = anchors_after(MemoryStore(), 3, 4, wire)
    assert len({*streamed, *at_once, *in_memory}) == 1


def test_work_that_is_sent_early_is_kept_whole_in_addition_to_the_memory_of_a_shard(tmp_path: Path) -> None:
    limits, written = Limits(small_bytes=0, block_elements=250), bytearray()
    next_process()
    diloco = open_diloco(nn.Linear(300, 7), limits=limits, **place(FileStore(tmp_path), world_size=3))
    state = diloco._model_state
    taken = state._memory.nbytes
    packed = state.pack(0, written.extend)
    assert len(written) == 4 * 7 * 301 > taken > 0
    assert bytes(packed.kept) == bytes(written)
    assert state._memory.nbytes == taken
    diloco.close()


def test_a_parallel_map_keeps_the_order_and_does_several_things_at_once() -> None:
    together = threading.Barrier(THREADS, timeout=30)
    at_once = ParallelMap()

    def meet(number: int) -> int:
        together.wait()
        return number

    assert list(at_once(meet, range(THREADS))) == list(range(THREADS))
    assert list(at_once(str, [])) == []
    at_once.close()
    at_once.close()


@settings(deadline=None)  # a deadline would fail on a loaded machine
@given(st.integers(1, 40), st.integers(1, 750))
def test_the_memory_taken_at_first_is_enough_for_any_shard(n_ranks: int, n_elements: int) -> None:
    layout = Layout(n_elements, Limits(small_bytes=100, block_elements=16), FP32, FP32)
    n_shards = layout.n_shards(n_ranks)
    shards = [layout.shard(shard, n_shards) for shard in range(n_shards)]
    kept = layout.kept_bytes(n_ranks, streams=True)
    assert kept >= max(shard.size_bytes for shard in shards)
    assert kept <= max(100, 64 * max(shard.end_block - shard.first_block for shard in shards))
    assert layout.kept_bytes(n_ranks, streams=False) == 4 * n_elements
