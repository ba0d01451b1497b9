"""Hostile records with a correct frame and a correct digest are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.patience import ENDLESS
from torch import nn
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from diloco.attached_state import AttachedState
from diloco.errors import AbortedError, ContributionError, QuorumTimeoutError
from diloco.outer import open_diloco
from diloco.rendezvous.claims import _claimed, claim
from diloco.rendezvous.envelope import UNSIGNED, BadRecordError, frame, unframe
from diloco.rendezvous.frames import Contribution, MeanHead, Seal, SealedReplica, digests_of, head_bytes
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.mean import Reducer
from diloco.rendezvous.membership import Identity
from diloco.rendezvous.phase import RoundPlan
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import Context, EntryState, Limits
from diloco.rendezvous.snapshot import SnapshotPointer, decode_part, encode_part, get_parts
from diloco.testing import run_replicas
from diloco.wires import FP32
from executors.errors import CorruptObjectError
from executors.store import MemoryStore

KEYS = Keys("test", "main")
DEEP = "[" * 100_000 + "]" * 100_000
NAN, INF = float("nan"), float("inf")
D = "d" * 32


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    _claimed.clear()


def framed(text: str) -> bytes:
    """Return a frame with any text as its head, also text that is not valid JSON."""
    head = text.encode()
    data = b"RPL1" + len(head).to_bytes(4, "little") + xxh3_128_digest(head) + head
    return data.ljust(-(-len(data) // 64) * 64, b"\0")


def record(fields: Any, payload: bytes = b"") -> bytes:
    return framed(json.dumps(fields)) + payload


MEAN = np.ones(4, np.float32).tobytes()
SEAL: dict[str, Any] = {
    "replicas": {"0": ["nonce", 0, 1.0, D, True]}, "anchor": D, "shards": 0, "phase_s": 1.0, "same": [],
    "mean": xxh3_128_hexdigest(MEAN),
}  # fmt: skip
CONTRIBUTION: dict[str, Any] = {
    "rank": 0, "attempt": 0, "nonce": "nonce", "weight": 1.0, "anchor": D, "bytes": 16, "blocks": D, "norms": [2.0],
    "waited_s": 0.0, "phase_s": 1.0, "head_start_s": 0.0, "in_phase": True, "steps": 3,
}  # fmt: skip
MEAN_HEAD: dict[str, Any] = {"blocks": D, "left_out": [1]}
POINTER: dict[str, Any] = {
    "nonce": "n", "rank": 0, "parts": [D], "state": [D], "first": 0, "contract": {"tensors": {"w": [[2], "f32", 0]}},
}  # fmt: skip


def parse_seal(data: bytes) -> Seal:
    return Seal.parse(data, "", UNSIGNED, size_bytes=len(MEAN), wire="fp32")


def test_the_records_that_are_spoilt_below_are_fine_as_they_are() -> None:
    assert parse_seal(record(SEAL, MEAN)).replicas[0].nonce == "nonce"
    assert Contribution.parse(record(CONTRIBUTION), "", UNSIGNED)[0].weight == 1.0
    assert MeanHead.parse(record(MEAN_HEAD), "", UNSIGNED).left_out == (1,)
    assert SnapshotPointer.parse(record(POINTER), "", UNSIGNED).rank == 0


NUMBERS = [-1, -0.5, 10**400, 2.5, NAN, INF, -INF, True, None, "1", [1], {"1": 1}]
TEXTS = ["", "x" * 10_000, 7, True, None, [D], {"a": D}]
DIGESTS = [*TEXTS, "d" * 31, "d" * 33, "D" * 32, "g" * 32, "d" * 31 + "\n"]
LISTS: list[Any] = [None, True, 3, "1", {}, {"0": 1}, [[1]], [None], ["1"], [True], [NAN], [-1], [10**400]]
FLAGS: list[Any] = [0, 1, None, "true", []]
TENSORS: list[Any] = [None, 3, [], [[2], "float32"], [2, "float32", 0]]
CONTRACTS: list[Any] = [None, True, 3, "{}", [], {"tensors": None}, {"tensors": []}]
GIVEN: list[Any] = [[], "total_steps", {"total_steps": [1]}, {"total_steps": {}}]
MEMBERS: list[Any] = [[], {}, None, 3, "0", True, {"0": None}, {"0": []}, {"0": {}}, {"0": "nonce"}]
RANKS = ["-1", "1.0", "", " 1", "0x1", "٣", "1" * 5_000, "nan", "00000000"]
WHOLE = [number for number in NUMBERS if not (isinstance(number, int) and number is not True and number >= 0)]
WEIGHTS = [-1, -0.5, 1e31, 10**400, NAN, INF, True, None, "1", [1]]


def member(*changes: tuple[int, Any]) -> dict[str, Any]:
    about: list[Any] = ["nonce", 0, 1.0, D, True]
    for at, value in changes:
        about[at] = value
    return {"replicas": {"0": about}}


HOSTILE_SEALS: list[dict[str, Any]] = [
    *({"replicas": value} for value in MEMBERS),
    *({"replicas": {rank: ["nonce", 0, 1.0, D, True]}} for rank in RANKS),
    {"replicas": {"0": ["nonce", 0, 1.0, D]}},
    {"replicas": {"0": ["nonce", 0, 1.0, D, True, 1]}},
    *(member((0, value)) for value in TEXTS),
    *(member((1, value)) for value in [*WHOLE, 10**7]),
    *(member((2, value)) for value in WEIGHTS),
    *(member((3, value)) for value in DIGESTS),
    *(member((4, value)) for value in FLAGS),
    *({"anchor": value} for value in DIGESTS),
    *({"wire": value} for value in [*TEXTS, "int8"]),
    *({"shards": value} for value in [*WHOLE, 65, 10**9]),
    *({"mean": value} for value in [*DIGESTS, "e" * 32]),
    *({"phase_s": value} for value in ("1", None, True, [1.0], 10**400)),
    *({"same": value} for value in (*LISTS, [[]], [[0]], [[0, 0]], [[0, 1]], [[0], [0]], [[0, None]], [{"0": 0}])),
]
HOSTILE_CONTRIBUTIONS: list[dict[str, Any]] = [
    *({name: value} for name in ("rank", "attempt") for value in [*WHOLE, 10**7]),
    *({name: value} for name in ("nonce", "wire") for value in TEXTS),
    *({"weight": value} for value in WEIGHTS),
    *({"anchor": value} for value in DIGESTS),
    *({name: value} for name in ("bytes", "steps") for value in WHOLE),
    *({"blocks": value} for value in (7, True, None, [D], {"a": D}, "d" * 31, "d" * 33)),
    *({"norms": value} for value in LISTS if value not in ([NAN], [-1])),
    *({name: value} for name in ("waited_s", "phase_s", "head_start_s") for value in ("1", None, True, [1], 10**400)),
    *({"in_phase": value} for value in FLAGS),
]
HOSTILE_MEANS: list[dict[str, Any]] = [
    *({"blocks": value} for value in (7, True, None, [D], "d" * 31)),
    *({"left_out": value} for value in [*LISTS, [10**7]]),
    *({"wire": value} for value in TEXTS),
]
HOSTILE_POINTERS: list[dict[str, Any]] = [
    *({"nonce": value} for value in [*TEXTS, "..", ".", "a/b", "../../other", "a\0", "é", "a\n", "-"]),
    *({"rank": value} for value in (NAN, INF, None, [1], "one")),
    *({"parts": value} for value in (None, True, 3, D, {D: 1}, [1], [None], [[D]])),
    *({"state": value} for value in (None, True, 3, D, {D: 1}, [1], [None])),
    *({"contract": value} for value in CONTRACTS),
    *({"first": value} for value in (None, "1", 0.5, [1])),
    *({"contract": {"tensors": {"w": value}}} for value in TENSORS),
    *({"contract": {"given": value}} for value in GIVEN),
]
Parse = Callable[[bytes], object]
TABLES: list[tuple[str, Parse, dict[str, Any], list[dict[str, Any]]]] = [
    ("seal", parse_seal, SEAL, HOSTILE_SEALS),
    ("contribution", partial(Contribution.parse, key="", proof=UNSIGNED), CONTRIBUTION, HOSTILE_CONTRIBUTIONS),
    ("mean", partial(MeanHead.parse, key="", proof=UNSIGNED), MEAN_HEAD, HOSTILE_MEANS),
    ("pointer", partial(SnapshotPointer.parse, key="", proof=UNSIGNED), POINTER, HOSTILE_POINTERS),
]
BY_NAME = {name: (parse, fields) for name, parse, fields, _ in TABLES}


def refuses(parse: Parse, data: bytes, what: object) -> None:
    try:
        parsed = parse(data)
    except BadRecordError:
        return
    except BaseException as error:  # noqa: BLE001 - any exception but these is a fault of the parser
        pytest.fail(f"{str(what)[:200]} raised {error!r:.200}")
    pytest.fail(f"{str(what)[:200]} was taken for {parsed!r:.200}")


@pytest.mark.parametrize(("name", "parse", "fields", "hostile"), TABLES, ids=[row[0] for row in TABLES])
def test_a_record_with_a_field_that_cannot_be_is_refused(
    name: str, parse: Parse, fields: dict[str, Any], hostile: list[dict[str, Any]]
) -> None:
    for change in hostile:
        refuses(parse, record({**fields, **change}, MEAN), change)
    for missing in fields:
        refuses(parse, record({k: v for k, v in fields.items() if k != missing}, MEAN), f"{name} without {missing}")


@pytest.mark.parametrize("name", BY_NAME)
def test_a_head_that_is_not_an_object_or_cut_off_is_refused(name: str) -> None:
    parse, fields = BY_NAME[name]
    texts = [DEEP, '{"a":' * 50_000 + "1" + "}" * 50_000, "[]", "3", "null", '"text"', "", "{", "NaN", "1" * 5_000]
    for text in texts:
        refuses(parse, framed(text), text[:40])
    refuses(parse, framed(json.dumps({**fields, "anchor": "@"}).replace('"@"', DEEP)), "a deep field")
    refuses(parse, b"RPL1" + (2).to_bytes(4, "little") + xxh3_128_digest(b"\xff\xfe") + b"\xff\xfe", "no text")
    whole = record(fields, MEAN)
    end = 24 + int.from_bytes(whole[4:8], "little")
    for cut in (*range(30), end // 2, end - 1):
        refuses(parse, whole[:cut], f"{cut} bytes")
    refuses(parse, b"RPL1\xff\xff\xff\xff" + whole[8:], "a length beyond the end")


@pytest.mark.parametrize("mean", [b"", MEAN[:-1], MEAN + b"\0" * 4])
def test_a_mean_in_a_seal_that_is_of_another_size_is_refused(mean: bytes) -> None:
    refuses(parse_seal, record({**SEAL, "mean": xxh3_128_hexdigest(mean)}, mean), mean)


@pytest.mark.parametrize("value", [NAN, INF, -INF, -1, -1e300])
def test_durations_that_cannot_be_are_read_as_none(value: float) -> None:
    assert parse_seal(record({**SEAL, "phase_s": value}, MEAN)).phase_s == 0.0
    for name in ("waited_s", "phase_s", "head_start_s"):
        assert getattr(Contribution.parse(record({**CONTRIBUTION, name: value}), "", UNSIGNED)[0], name) == 0.0


# -- snapshots and the saved states of ranks
# -------------------------------------------------------------------------------------


def part(header: Any, payload: bytes = b"\0" * 16) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + payload


def tensor(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


HOSTILE_PARTS = [
    b"", b"\xff" * 7, b"\xff" * 8, b"\xff" * 100, part(DEEP), part("[]"), part("3"), part("{"), part({"a": 3}),
    part({"a": {}}), part(tensor(dtype="F31")), part(tensor(dtype=[1])), part(tensor(data_offsets=[])),
    part(tensor(data_offsets=[-8, 8])), part(tensor(data_offsets=[10**30, 10**30])), part(tensor(data_offsets=["0"])),
    part(tensor(data_offsets=[1, 17])), part(tensor(data_offsets=None)),
    *(part(tensor(shape=shape)) for shape in (
        [-1], [-2, -2], [5], [10**30], [2**62, 4], ["4"], [4.0], [None], 4, None, [[4]], [1] * 100, [INF], {"4": 4},
    )),
]  # fmt: skip


def put_snapshot(store: MemoryStore, data: bytes, *, state: list[str], contract: Mapping[str, Any]) -> SnapshotPointer:
    store.put(KEYS.part(0, "evil", 0), data)
    fields = {
        "nonce": "evil",
        "rank": 1,
        "parts": [xxh3_128_hexdigest(data)],
        "state": state,
        "contract": contract,
        "first": 0,
    }
    store.put(KEYS.snapshot(0), frame(fields, "", UNSIGNED))
    return SnapshotPointer.parse(store.get(KEYS.snapshot(0)), "", UNSIGNED)


def test_a_part_that_is_not_a_safetensors_file_counts_as_unreadable() -> None:
    decode_part(memoryview(part(tensor())))
    store = MemoryStore()
    patient = RetryingStore(store, clock=lambda: 0.0, tolerance=ENDLESS)
    for data in HOSTILE_PARTS:
        refuses(lambda data: decode_part(memoryview(data)), data, data[:100])
        pointer = put_snapshot(store, data, state=[], contract={})
        assert get_parts(patient, KEYS, 0, pointer, UNSIGNED) is None


def where(store: MemoryStore, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    return {"store": store, "run_id": "test", "rank": rank, "world_size": world_size}


def contract_of(model: nn.Module) -> dict[str, Any]:
    with open_diloco(model, **where(MemoryStore())) as diloco:
        return dict(diloco._model_state.agreement())


def encoded(**arrays: Any) -> bytes:
    return b"".join(encode_part({name.replace("_", "/"): np.asarray(values) for name, values in arrays.items()}))


GOOD = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize(
    ("data", "state"),
    [
        (HOSTILE_PARTS[4], [D]),
        (encoded(other=GOOD), [D]),
        (encoded(anchor_weight=np.zeros(3, np.float32)), [D]),
        (encoded(anchor_weight=GOOD, momentum_weight=np.zeros(3, np.float32)), [D]),
        (encoded(anchor_weight=GOOD), []),
        (encoded(anchor_weight=GOOD), [D] * 9),
    ],
    ids=["no part", "other names", "another shape", "another momentum", "no state", "too many states"],
)
def test_a_snapshot_that_does_not_fit_counts_as_unreadable(data: bytes, state: list[str]) -> None:
    model, store = nn.Linear(2, 2, bias=False), MemoryStore()
    put_snapshot(store, data, state=state, contract=contract_of(model))
    _claimed.clear()
    with pytest.raises(QuorumTimeoutError, match="Rank 0 found no snapshot of run 'test' that can be read"):
        open_diloco(model, round_timeout_s=0.2, **where(store))


def test_a_contract_without_tensors_is_another_model_s() -> None:
    store = MemoryStore()
    put_snapshot(store, encoded(anchor_weight=GOOD), state=[D], contract={})
    with pytest.raises(ContributionError, match=r"'weight' of shape .* is only in this model"):
        open_diloco(nn.Linear(2, 2, bias=False), **where(store))


def kept_by(store: MemoryStore, position: str, arrays: bytes, head: bytes | None = None) -> None:
    digest = {"digest": xxh3_128_hexdigest(arrays)}
    store.put(f"{KEYS.own_state(0)}{position}/record", head or frame(digest, "", UNSIGNED))
    store.put(f"{KEYS.own_state(0)}{position}/tensors.safetensors", arrays)


def test_if_a_ranks_saved_state_is_unreadable_an_earlier_one_is_used(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    text = np.frombuffer(b'{"tensor": "gone", "dtype": "x"}', np.uint8)
    kept_by(store, "1/0", encoded(progress_0=np.ones(3), attached_x_json=text))
    for position, data in enumerate(HOSTILE_PARTS, 2):
        kept_by(store, f"{position}/0", data)
    kept_by(store, "100/0", encoded(a=GOOD), frame({}, "", UNSIGNED))
    kept_by(store, "101/0", encoded(a=GOOD), framed(DEEP))
    for stray in ("x/0", "-1/0", "102", "102/0/0"):
        kept_by(store, stray, b"")
    patient = RetryingStore(store, clock=lambda: 0.0, tolerance=ENDLESS)
    attachments = AttachedState(patient, KEYS, Identity(0, 1, 1, "n"), lambda job: job(), RoundPlan(), UNSIGNED)
    assert attachments.kept is not None
    assert attachments.kept.position == 1
    assert [part.tolist() for part in attachments.kept.progress([4])] == [[0.0] * 4]
    attachments.attach("x", torch.Generator(), 1)
    for told in ("the saved state of 'x' cannot be read", "/own/0/101/0/record in memory:// was damaged in each of"):
        assert told in caplog.text


# -- contributions and means -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_blocks", [0, 1, 3, 5])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_an_input_whose_head_is_of_another_payload_is_left_out(n_blocks: int, weight: float, caplog: Any) -> None:
    store = MemoryStore()
    patient = RetryingStore(store, clock=lambda: 0.0, tolerance=ENDLESS)
    payload = np.ones(8, np.float32).tobytes()  # a payload of two blocks
    bad = Contribution(0, 0, "a", weight, D, len(payload), digests_of(payload * 4, 16, UNSIGNED)[:n_blocks], ())
    head = bad.head("", UNSIGNED)
    store.put(KEYS.contribution(0, 0), head + payload)
    fine = Contribution(1, 0, "b", 1.0, D, len(payload), digests_of(payload, 16, UNSIGNED), (1.0, 1.0))
    good = fine.head("", UNSIGNED)
    store.put(KEYS.contribution(0, 1), good + payload)
    me, limits = Identity(2, 3, 0, "c"), Limits(small_bytes=0, block_elements=4, takeover_after_s=0.0)
    state: Any = SimpleNamespace(sizes=lambda: [8], wire=FP32, mean_wire=FP32, clips=False)
    context = Context(
        store=patient, keys=KEYS, me=me, training=state, plan=RoundPlan(), limits=limits, clock=lambda: 0.0,
        wait=lambda *_: None, proof=UNSIGNED,
    )  # fmt: skip
    proofs = [unframe(data, "", UNSIGNED)[1] for data in (head, good)]
    members = {rank: SealedReplica("ab"[rank], 0, 1.0, proof) for rank, proof in enumerate(proofs)}
    mean = Reducer(context).collect(r := EntryState.begin(context, 0), Seal(members, D, 2))
    assert mean is not None
    assert b"".join(mean) == payload
    assert r.left_out == {0}
    assert "The contribution of rank 0 has a head of another payload. The mean of" in caplog.text
    assert MeanHead.parse(store.get(KEYS.mean(0, 0)), "", UNSIGNED).left_out == (0,)
    assert len(store.get(KEYS.mean(0, 0))) == head_bytes(1) + 16


# -- reactions of a run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seal",
    [
        record({**SEAL, "shards": 10**9}),
        record({**SEAL, "replicas": {}}, MEAN),
        record({**SEAL, **member((2, -1))}, MEAN),
        record({**SEAL, "mean": xxh3_128_hexdigest(MEAN[:-4])}, MEAN[:-4]),
        record({**SEAL, "mean": xxh3_128_hexdigest(b"\xff" * 16)}, b"\xff" * 16),
        record(SEAL, MEAN)[:40],
        framed(DEEP),
        b"",
    ],
    ids=["shards", "nobody", "weight", "short mean", "mean of NaN", "cut off", "deep", "empty"],
)
def test_a_run_ends_at_a_seal_that_another_process_has_forged_and_names_it(seal: bytes) -> None:
    store = MemoryStore()
    store.put(KEYS.seal(2), seal)
    limits = Limits(grace_s=0.05, takeover_after_s=0.01)

    def body(where: Mapping[str, Any]) -> tuple[int, list[float], list[float]]:
        model = nn.Linear(2, 2, bias=False)
        diloco = open_diloco(model, inner_steps=1, outer_lr=1.0, outer_momentum=0.0, **where, limits=limits)
        before = diloco.anchor()["weight"].flatten().tolist()
        with pytest.raises(CorruptObjectError, match=rf"^Round 3 cannot be completed: {KEYS.seal(2)} is damaged"):
            list(iter(diloco.step, "for ever"))
        diloco._close(in_order=False)
        return diloco.rounds, before, diloco.anchor()["weight"].flatten().tolist()

    for rounds, before, after in run_replicas(2, body, store=store):
        assert (rounds, before) == (2, after)


def test_a_claim_of_deep_json_belongs_to_no_process() -> None:
    store, pauses = MemoryStore(), list[None]()
    store.put(KEYS.claim(0, 0), DEEP.encode())

    def pause() -> None:
        pauses.append(None)
        store.put(KEYS.claim(0, 0), b'{"nonce": "mine"}')

    assert claim(RetryingStore(store, clock=lambda: 0.0, tolerance=ENDLESS), KEYS, 0, 1, "mine", pause).attempt == 0
    assert len(pauses) == 1


def test_an_abort_record_of_deep_json_is_shown_as_it_is() -> None:
    assert str(AbortedError.from_record("run", DEEP.encode())) == f"Run 'run' was aborted: {DEEP[:500]}"
