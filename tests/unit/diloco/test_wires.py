"""Compares the bytes of wires with a reference that was written from their description, and with bytes in this file.

`test_sparse_wire.py` does the same for the sparse wire.
"""

from __future__ import annotations

import struct
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wires import decoded, encoded, values
from xxhash import xxh3_64_hexdigest

from diloco.settings import DiLoCoSettings
from diloco.wires import DEFAULT_MEAN_WIRE, FP32, MEAN_WIRES, WIRES
from diloco.wires.wire import BLOCK_ELEMENTS, PIECE, Floats, NotFiniteError, Wire, square_of

SIZES = (1, 127, 128, 129, 255, 256, 257, 8191, 8192, 8193, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 77)
DENSE = {name: wire for name, wire in WIRES.items() if not wire.is_sparse}
LOSSY = [wire for wire in DENSE.values() if not wire.is_exact]


# -- the reference: one value after the other --------------------------------------------------------------------------


def reference(name: str, of: Floats) -> bytes:
    f = np.float32
    if name == "fp32":
        return of.tobytes()
    if name == "bf16":
        bits = [int(x) for x in of.view(np.uint32)]
        return b"".join(struct.pack("<H", (b + 0x7FFF + (b >> 16 & 1)) >> 16) for b in bits)
    group, most = {"int8": (256, 127), "int4": (128, 7)}[name]
    scales, whole = [], []
    for at in range(0, len(of), group):
        top = max(abs(x) for x in of[at : at + group])
        is_zero = top < f(2.0**-100)
        scales.append(f(0.0) if is_zero else top * f(1 / most))
        inverse = f(0.0) if is_zero else f(most) / top
        whole += [max(-most, min(most, round(float(x * inverse)))) for x in of[at : at + group]]  # round: half to even
    head = b"".join(struct.pack("<f", scale) for scale in scales)
    if name == "int8":
        return head + struct.pack(f"<{len(whole)}b", *whole)
    head += bytes(-len(head) % 8)
    for at in range(0, len(whole), 8192):
        page = whole[at : at + 8192]
        page += [0] * (len(page) % 2)
        half = len(page) // 2
        head += bytes((page[i] + 8) | (page[half + i] + 8) << 4 for i in range(half))
    return head


@pytest.mark.parametrize("name", DENSE)
def test_a_block_has_the_bytes_of_its_description(name: str) -> None:
    for n in SIZES[:10]:
        assert encoded(WIRES[name], values(n)) == reference(name, values(n)), n


def test_some_bytes_for_people() -> None:
    of = np.array([1.0, -0.5, 0.25, 0.0, 127 / 128], np.float32)
    bytes_of = {name: encoded(wire, of).hex(" ", 4 if name == "fp32" else 1) for name, wire in DENSE.items()}
    assert bytes_of == {
        "fp32": "0000803f 000000bf 0000803e 00000000 00007e3f",
        "bf16": "80 3f 00 bf 80 3e 00 00 7e 3f",
        "int8": "04 02 01 3c 7f c0 20 00 7e",
        "int4": "25 49 12 3e 00 00 00 00 8f f4 8a",
    }


GOLDEN = {
    "fp32": "2bf8f925f17c8319ed9ee8e739b578c29f6cb635ca18fc3be062381c3925189850d2e9c1e0705cab78713ebf783dcd93",
    "bf16": "3a89da46814f06b6c05203853c4c62cbde0d08af618171456c94d07fa64de2cad6f7b3eda97c00563bc4353e4e061c5b",
    "int8": "cc304fc9ee8d6f6883d30cfd624bd20b3e3e186842c352759e421f609f36688b74f2ef70bbfed4a49661a1ca5f510110",
    "int4": "838e00f9953354fb33ba093ad0383c2616423c7e6e4aab3f31eb3a47f1c75cbb5d22912d9682ac9f65b0113ea2a9ccbb",
}
"""Eight digits of the digest of the encoded bytes, for each size."""


@pytest.mark.parametrize("name", DENSE)
def test_bytes_never_change(name: str) -> None:
    found = "".join(xxh3_64_hexdigest(encoded(WIRES[name], values(n)))[:8] for n in SIZES)
    assert found == GOLDEN[name]


# -- properties for any values -----------------------------------------------------------------------------------------

magnitudes = st.floats(2.0**-90, 2.0**120, width=32)
arrays: Any = st.builds(
    lambda n, top, seed: (np.random.default_rng(seed).uniform(-1, 1, n) * top).astype(np.float32),
    st.integers(1, 9000), magnitudes, st.integers(0, 2**32),
)  # fmt: skip


@settings(deadline=None, max_examples=40)  # a deadline would fail on a loaded machine
@given(arrays)
def test_decoded_values_are_close_and_encode_to_the_same_bytes(of: Floats) -> None:
    steps = {"fp32": 0.0, "bf16": 2.0**-8, "int8": 0.5 / 127, "int4": 0.5 / 7}
    for name, wire in DENSE.items():
        block = encoded(wire, of)
        assert len(block) == wire.size(len(of))
        got = decoded(wire, block, len(of))
        assert np.abs(got - of).max() <= 1.001 * steps[name] * np.abs(of).max(), name
        again = decoded(wire, encoded(wire, got), len(of))
        assert np.abs(again - got).max() <= 2.0**-22 * np.abs(of).max(), name  # a scale may differ in the last bit
        assert wire.is_finite(memoryview(block), len(of)), name
        square = wire.encode(of.copy(), memoryview(bytearray(block)), len(of), 0)
        assert square == pytest.approx(float(np.square(got, dtype=np.float64).sum()), rel=1e-4)


@settings(deadline=None, max_examples=40)
@given(arrays, st.floats(0.01, 1.0), st.integers(0, 2**32))
def test_accumulated_values_are_the_decoded_values_with_weighted_scales(of: Floats, share: float, seed: int) -> None:
    weight, before = np.float32(share), np.random.default_rng(seed).normal(size=len(of)).astype(np.float32)
    for wire in DENSE.values():
        block = memoryview(encoded(wire, of))
        acc, product = before.copy(), np.empty_like(before)
        wire.accumulate(block, len(of), 0, weight, acc, product, first=False)
        alone = np.empty_like(before)
        wire.accumulate(block, len(of), 0, weight, alone, product, first=True)
        assert acc.tobytes() == (before + alone).tobytes()
        assert alone.tobytes() == weighed(wire, block, len(of), weight).tobytes()


def weighed(wire: Wire, block: memoryview, n: int, weight: np.float32) -> Floats:
    if wire.name in ("fp32", "bf16"):
        return decoded(wire, bytes(block), n) * weight
    group = {"int8": 256, "int4": 128}[wire.name]
    n_scales = -(-n // group)
    scales = np.frombuffer(block, np.float32, n_scales)
    ones = bytes(np.ones(n_scales, np.float32).data.cast("B"))
    whole = decoded(wire, ones + bytes(block[len(ones) :]), n)
    return whole * np.repeat(scales * weight, group)[:n]


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3 * PIECE), st.sampled_from([PIECE, 2 * PIECE]))
def test_pieces_are_parts_of_the_whole(n: int, piece: int) -> None:
    for wire in WIRES.values():
        block = memoryview(encoded(wire, values(n)))
        whole = decoded(wire, bytes(block), n)
        spans = [wire.span(n, start, min(start + piece, n)) for start in range(0, n, piece)]
        assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]
        assert spans[-1].stop == wire.size(n)
        for start in range(0, n, piece):
            room = np.empty(min(piece, n - start), np.float32)
            assert np.array_equal(wire.decode(block, n, start, room), whole[start : start + piece])


# -- the edges ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_refused(wire: Wire, bad: float) -> None:
    for at in (0, 300, 599):
        of = values(600)
        of[at] = bad
        with pytest.raises(NotFiniteError):
            encoded(wire, of)


@pytest.mark.parametrize("wire", LOSSY, ids=lambda wire: wire.name)
def test_a_value_that_decodes_to_infinity_is_refused_by_senders_and_readers(
    wire: Wire,
) -> None:
    most = float(np.finfo(np.float32).max)
    with pytest.raises(NotFiniteError):
        encoded(wire, np.array([most], np.float32))
    block = encoded(wire, np.array([0.8 * most], np.float32))
    assert np.isfinite(decoded(wire, block, 1)).all()
    assert wire.is_finite(memoryview(block), 1)
    top = {"bf16": "807f"}.get(wire.name, "ffff7f7f")
    for bad in (bytes.fromhex(top), bytes.fromhex({"bf16": "c07f"}.get(wire.name, "0000c07f"))):
        assert not wire.is_finite(memoryview(bad + block[len(bad) :]), 1)


def test_zeros_and_tiny_values_become_zero() -> None:
    for wire in LOSSY:
        for of in (np.zeros(600, np.float32), np.full(600, -0.0, np.float32)):
            assert not decoded(wire, encoded(wire, of), 600).any()
    tiny = np.full(600, 1e-38, np.float32)
    for name in ("int8", "int4"):
        assert not decoded(WIRES[name], encoded(WIRES[name], tiny), 600).any(), (
            "tiny values are decoded as zero, so that no product is subnormal"
        )
        least = np.full(600, 2.0**-100, np.float32)
        assert decoded(WIRES[name], encoded(WIRES[name], least), 600) == pytest.approx(least, rel=1e-6)
    assert decoded(WIRES["bf16"], encoded(WIRES["bf16"], tiny), 600) == pytest.approx(tiny, rel=2**-8)


def test_the_squares_of_values_as_large_as_floats_get_are_summed() -> None:
    assert square_of(np.full(4, 1e30, np.float32)) == pytest.approx(4e60)
    assert encoded(FP32, np.full(4, 1e30, np.float32)) == np.full(4, 1e30, np.float32).tobytes()


def test_means_travel_in_wires_that_exist() -> None:
    assert set(DEFAULT_MEAN_WIRE) == set(WIRES)
    assert set(DEFAULT_MEAN_WIRE.values()) <= set(MEAN_WIRES)


@pytest.mark.parametrize(
    ("wire", "n_elements", "warns"), [("int8", 20_000_000, True), ("int8", 1000, False), ("fp32", 20_000_000, False)]
)
def test_a_wire_that_costs_more_than_it_brings_on_this_machine_is_named(
    wire: str, n_elements: int, *, warns: bool
) -> None:
    chosen: Any = SimpleNamespace(wire=wire)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        DiLoCoSettings.warn_of_costly_wire(chosen, n_elements)
    assert [str(each.message).split(":")[0] for each in found] == (["wire='int8'"] if warns else [])
