"""The sparse wire `top8`: its bytes against a reference that goes element by element, and each form it refuses."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wires import REFUSED, N, block_of_three, decoded, encoded, values
from xxhash import xxh3_64_hexdigest

from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.frames import digests_of
from diloco.rendezvous.reduction import BadInputError, BlockFormat, ShardInput, weighted_mean
from diloco.wires import FP32, MEAN_WIRES, WIRES
from diloco.wires.wire import BLOCK_ELEMENTS, PIECE, Floats, MalformedBlockError, NotFiniteError

TOP8 = WIRES["top8"]
SMALL = (1, 7, 8, 9, 511, 512, 513, 4095, 4096, 4097, 8193, 12289)
SIZES = (*SMALL, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 77)
F = np.float32


# -- the reference: one value after the other --------------------------------------------------------------------------


def reference(of: Floats) -> bytes:
    scales, chunks = b"", b""
    for first in range(0, len(of), 4096):
        chunk = [float(x) for x in of[first : first + 4096]]
        eighth = -(-len(chunk) // 8)
        positions = sorted(sorted(range(len(chunk)), key=lambda p: (-abs(chunk[p]), p))[:eighth])
        scale = F(1.5 * (sum(abs(chunk[p]) for p in positions) / eighth))
        scales += struct.pack("<f", F(0) if scale < F(2.0**-100) else scale)
        high, low = 0, 0
        for j, p in enumerate(positions):
            high |= 1 << j + (p >> 3)
            low |= (p & 7 | (8 if chunk[p] < 0 else 0)) << 4 * j
        chunks += high.to_bytes(-(-2 * eighth // 8), "little") + low.to_bytes(-(-eighth // 2), "little")
    return scales + bytes(-len(scales) % 8) + chunks


def read_by_reference(block: bytes, n: int) -> list[tuple[int, np.float32]]:
    """Return the positions of a block with their values, in rising order."""
    n_chunks = -(-n // 4096)
    at, found = -(-4 * n_chunks // 8) * 8, []
    for chunk in range(n_chunks):
        (scale,) = struct.unpack_from("<f", block, 4 * chunk)
        eighth = -(-min(4096, n - 4096 * chunk) // 8)
        n_high, n_low = -(-2 * eighth // 8), -(-eighth // 2)
        high = int.from_bytes(block[at : at + n_high], "little")
        low = int.from_bytes(block[at + n_high : at + n_high + n_low], "little")
        bits = [bit for bit in range(8 * n_high) if high >> bit & 1]
        for j, bit in enumerate(bits):
            half = low >> 4 * j & 15
            found.append((4096 * chunk + (bit - j) * 8 + (half & 7), F(-scale if half & 8 else scale)))
        at += n_high + n_low
    assert at == len(block)
    return found


def decoded_by_reference(block: bytes, n: int) -> Floats:
    out = np.zeros(n, F)
    for position, value in read_by_reference(block, n):
        out[position] = value
    return out


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_a_block_is_what_its_description_says() -> None:
    for n in SMALL:
        block = encoded(TOP8, values(n))
        assert block == reference(values(n)), n
        assert decoded(TOP8, block, n).tobytes() == decoded_by_reference(block, n).tobytes(), n


def test_a_whole_chunk_takes_388_bytes_and_a_whole_block_one_42nd_of_float32() -> None:
    assert TOP8.size(8192) == 2 * 388
    assert TOP8.size(BLOCK_ELEMENTS) == 99_328
    assert 4 * BLOCK_ELEMENTS / TOP8.size(BLOCK_ELEMENTS) == pytest.approx(42.2, abs=0.05)


def test_some_bytes_for_people() -> None:
    """Two of nine values are sent, those at 1 and 8: bits 0 and 2, and the halves 1 and 0 with a sign."""
    of = np.array([0, 4, 0, 0, 0, 0, 1, 0, -2], F)
    assert encoded(TOP8, of).hex(" ") == "00 00 90 40 00 00 00 00 05 81"
    assert decoded(TOP8, encoded(TOP8, of), 9).tolist() == [0, 4.5, 0, 0, 0, 0, 0, 0, -4.5]


GOLDEN = (
    "a0eda6dcd11942020c90688b9a41cd9f473170a9b07898c764dc8102875da2a71f1b82051dfa923ea71de81babedf7bbe8fcc71545683d2f"
)
"""Eight digits of the digest of the encoded bytes, for each size."""


def test_bytes_never_change() -> None:
    found = "".join(xxh3_64_hexdigest(encoded(TOP8, values(n)))[:8] for n in SIZES)
    assert found == GOLDEN


def test_of_equal_values_the_first_are_sent() -> None:
    for n in SMALL:
        block = encoded(TOP8, np.full(n, -2.0, F))
        assert block == reference(np.full(n, -2.0, F))
        starts = [4096 * (position // 4096) for position, _ in read_by_reference(block, n)]
        inside = [position - start for (position, _), start in zip(read_by_reference(block, n), starts, strict=True)]
        assert all(place < -(-min(4096, n - start) // 8) for place, start in zip(inside, starts, strict=True))
    uneven = np.where(np.arange(8193) % 3, F(1), F(2))
    uneven[:5] = 3
    assert encoded(TOP8, uneven) == reference(uneven)


def test_a_negative_zero_is_sent_without_a_sign() -> None:
    block = encoded(WIRES["top8"], np.array([1.0] + 15 * [-0.0], np.float32))
    assert decoded(WIRES["top8"], block, 16).tolist()[:2] == [0.75, 0.75]


def test_zeros_and_tiny_values_have_a_scale_of_zero_and_decode_to_zeros() -> None:
    for of in (np.zeros(5000, F), np.full(5000, -0.0, F), np.full(5000, 1e-38, F), np.full(5000, -1e-38, F)):
        block = encoded(TOP8, of)
        assert block == reference(of)
        assert not any(block[:8])
        assert not decoded(TOP8, block, 5000).any()
    least = np.full(5000, 2.0**-100, F)
    assert decoded(TOP8, encoded(TOP8, least), 5000).max() == F(1.5 * 2.0**-100)


@settings(deadline=None, max_examples=25)  # a deadline would fail on a loaded machine
@given(st.integers(1, 9000), st.integers(0, 2**32), st.sampled_from([F(1), F(2.0**-90), F(2.0**120)]))
def test_any_block_decodes_to_the_values_of_the_reference(n: int, seed: int, top: np.float32) -> None:
    of = (np.random.default_rng(seed).integers(-9, 9, n) * top).astype(F)  # with many equal values
    block = encoded(TOP8, of)
    assert block == reference(of)
    assert decoded(TOP8, block, n).tobytes() == decoded_by_reference(block, n).tobytes()
    assert TOP8.is_finite(memoryview(block), n)
    square = TOP8.encode(of.copy(), memoryview(bytearray(block)), n, 0)
    assert square == pytest.approx(sum(float(value) ** 2 for _, value in read_by_reference(block, n)))


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 9000), st.floats(0.01, 1.0), st.integers(0, 2**32))
def test_a_sum_changes_only_where_a_block_names_a_value(n: int, share: float, seed: int) -> None:
    rng, weight = np.random.default_rng(seed), F(share)
    block = encoded(TOP8, rng.standard_normal(n, F))
    for first in (True, False):
        before = rng.standard_normal(n, F)
        expected = np.zeros(n, F) if first else before.copy()
        for position, value in read_by_reference(block, n):
            expected[position] = expected[position] + F(abs(value) * weight) * np.sign(value)
        acc = before.copy()
        TOP8.accumulate(memoryview(block), n, 0, weight, acc, np.empty_like(acc), first=first)
        assert acc.tobytes() == expected.tobytes()


def test_a_mean_is_not_encoded_as_a_sparse_wire() -> None:
    assert "top8" not in MEAN_WIRES
    assert TOP8.is_sparse
    assert not any(wire.is_sparse or wire.keeps < 1 or wire.live < 1 for wire in MEAN_WIRES.values())


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_one_value_that_is_not_finite_or_too_large_is_refused_by_the_sender(bad: float) -> None:
    for at in (0, 4096, 8192):
        of = np.zeros(8193, F)
        of[at] = bad
        if bad == 3e38 and at < 8192:
            encoded(TOP8, of)  # the mean magnitude of the chunk is small enough
            continue
        with pytest.raises(NotFiniteError):
            encoded(TOP8, of)


@pytest.mark.parametrize("what", REFUSED)
def test_a_malformed_block_is_refused_and_changes_no_sum(what: str) -> None:
    block = block_of_three()
    assert TOP8.is_finite(memoryview(block), N)
    REFUSED[what](block)
    assert not TOP8.is_finite(memoryview(block), N)
    acc = np.arange(N, dtype=F)
    for first in (True, False):
        with pytest.raises(MalformedBlockError):
            TOP8.accumulate(memoryview(block), N, 0, F(1), acc, np.empty_like(acc), first=first)
        assert acc.tolist() == list(range(N))
    with pytest.raises(MalformedBlockError):
        TOP8.decode(memoryview(block), N, 0, np.empty(N, F))


def test_a_bit_in_the_wrong_chunk_is_refused() -> None:
    """The two chunks together name the right number of positions, but one of them names one too many."""
    for first, second in ((511, 513), (513, 511)):
        block = bytearray(encoded(TOP8, np.ones(8192, F)))
        for chunk, n_bits in enumerate((first, second)):
            start = 8 + chunk * 384
            block[start : start + 128] = ((1 << n_bits) - 1).to_bytes(128, "little")
        assert not TOP8.is_finite(memoryview(block), 8192), (first, second)


@pytest.mark.parametrize("what", REFUSED)
def test_the_reduction_names_the_rank_of_a_malformed_contribution(what: str) -> None:
    good, bad = bytes(block_of_three()), block_of_three()
    REFUSED[what](bad)
    inputs = [
        ShardInput(rank, 1.0, memoryview(data), digests_of(data, len(data), UNSIGNED))
        for rank, data in enumerate([good, bytes(bad), good])
    ]
    out = memoryview(bytearray(4 * N))
    with pytest.raises(BadInputError, match=r"^The contribution of rank 1 (has|does|names) ") as caught:
        weighted_mean(inputs, out, BlockFormat(N, N, TOP8, FP32, UNSIGNED))
    assert caught.value.rank == 1
    weighted_mean([inputs[0], inputs[2]], out, BlockFormat(N, N, TOP8, FP32, UNSIGNED))
    assert np.frombuffer(out, F)[[3, 12, 22]].tolist() == [3.0, -3.0, 3.0]


def test_pieces_of_a_long_block_are_encoded_and_read_by_themselves() -> None:
    n = 2 * PIECE + 5000
    of = values(n)
    block = memoryview(encoded(TOP8, of))
    parts = [of[start : start + PIECE] for start in range(0, n, PIECE)]
    alone = [encoded(TOP8, part) for part in parts]
    at = TOP8.span(n, 0, n).start
    for number, (part, its) in enumerate(zip(parts, alone, strict=True)):
        span = TOP8.span(n, number * PIECE, number * PIECE + len(part))
        assert bytes(block[span]) == its[TOP8.span(len(part), 0, len(part)).start :]
        assert span.start == at
        at = span.stop
    assert at == len(block)
