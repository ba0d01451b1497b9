"""Segments become rows on one time line. Lines that do not fit are named, and hide no other lines."""

from __future__ import annotations

import json
import math
import socket
import threading
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from support.hostile_records import ANSI, DEEP, outcome_json, run_json

from executors.attempt import Attempt
from executors.errors import StoreError
from executors.metrics import metrics as metrics_module
from executors.metrics import segments as segments_module
from executors.metrics.metrics import Metrics, read_metrics
from executors.metrics.rows import Numbers, Round, Usage
from executors.metrics.segments import ParsedSegments, SegmentBudget
from executors.store import MemoryStore
from executors.task.record import RunRecord
from executors.view.report.measures import Measures

ROUND = {
    "t": 4.0, "entry": 0, "fragment": 0, "ranks": [0, 1], "verdict": "counted", "weight": 10, "up": 5, "down": 7,
    "train_s": 3.0, "wait_s": 0.5, "move_s": 0.25, "reduce_s": 0.125, "step_s": 0.125, "norm": 2.5, "mean_norm": None,
}  # fmt: skip
NUMBERS = {"t": 1.0, "step": 3, "loss": 2.5}
USAGE = {"t": 5.0, "cpu": 1.5, "rss": 1000}
T0 = 1.7e9


class Scene:
    """A run of two replicas whose segments the test writes."""

    def __init__(self) -> None:
        self.store = MemoryStore()

    def segment(self, *lines: Any, rank: int = 0, attempt: int = 0, number: int = 0) -> Scene:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n"
        self.store.put(f"run/metrics/{rank:04d}/{attempt}/{number:06d}.jsonl", text.encode(errors="surrogatepass"))
        return self

    def record(self, name: str, fields: Any, rank: int = 0, attempt: int = 0) -> Scene:
        self.store.put(f"run/replicas/{rank:04d}/{attempt}/{name}.json", json.dumps(fields).encode())
        return self

    def claim(self, at: float, rank: int = 0, attempt: int = 0, host: str = "a") -> Scene:
        return self.record("started", {"nonce": "n", "host": host, "at": at}, rank, attempt)

    def read(self, parsed: ParsedSegments | None = None) -> Metrics:
        return read_metrics(self.store, "run", RunRecord.parse(run_json(created_at=T0)), parsed=parsed)


def test_lines_become_rows_in_the_order_of_rank_attempt_and_time() -> None:
    scene = Scene().segment(USAGE, {"t": 9.0, "left_with": 1.0, "name": "main"}, number=1).segment(ROUND, NUMBERS)
    found = scene.segment(NUMBERS, rank=1).claim(T0).claim(T0, rank=1).read()
    assert found.problems == []
    assert [type(row) for row in found] == [Numbers, Round, Usage, Numbers]
    numbers, a_round, usage, _ = found
    assert numbers == Numbers(rank=0, attempt=0, t=1.0, values={"step": 3, "loss": 2.5})
    assert isinstance(a_round, Round)
    assert (a_round.ranks, a_round.norm, a_round.mean_norm, a_round.round_s, a_round.name) == (
        (0, 1),
        2.5,
        None,
        1,
        "main",
    )
    assert usage == Usage(rank=0, attempt=0, t=5.0, cpu=1.5, rss=1000)
    assert (found.numbers[0], found.rounds, found.usage) == (numbers, [a_round], [usage])


def test_the_newest_rounds_are_in_the_newest_segment_that_has_any() -> None:
    def at(entry: int) -> dict[str, Any]:
        return {**ROUND, "entry": entry}

    scene = Scene().segment(at(0), at(1), attempt=0, number=7).segment(at(2), NUMBERS, at(3), attempt=1)
    scene.segment(NUMBERS, attempt=1, number=1).segment(NUMBERS, rank=1).segment(at(2), rank=2).segment(at(2), rank=3)
    found = segments_module.newest_rounds(scene.store, "run", [(0, 1), (1, 0), (2, 0)], most=1)
    assert [(row.rank, row.attempt, row.entry) for row in found] == [(0, 1, 3), (2, 0, 2)]


def long_run(n_segments: int = 100, n_ranks: int = 2) -> Scene:
    """A run in which each round counts all replicas, with one round a second and ten in each segment."""
    scene, n_rounds = Scene(), 10 * n_segments
    for rank in range(n_ranks):
        scene.claim(T0, rank=rank)
        scene.record("outcome", outcome_json(rank, finished_at=T0 + n_rounds, host="a"), rank)
        for number in range(n_segments):
            entries = range(10 * number, 10 * number + 10)
            steps = [{"t": entry + 0.5, "step": 10 * entry, "loss": 2.0} for entry in entries]
            rounds = [{**ROUND, "t": entry + 1.0, "entry": entry, "train_s": 0.9, "wait_s": 0.1} for entry in entries]
            scene.segment(*steps, *rounds, rank=rank, number=number)
    return scene


def bytes_of(scene: Scene) -> int:
    return sum(entry.size_bytes for entry in scene.store.list("run/metrics/"))


def test_newest_rounds_are_the_newest_of_a_run_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = long_run()
    monkeypatch.setattr(segments_module, "MAX_BYTES", bytes_of(scene) // 2)
    found = segments_module.newest_rounds(scene.store, "run", [(0, 0), (1, 0)], most=2)
    assert [(row.rank, row.entry) for row in found] == [(0, 998), (0, 999), (1, 998), (1, 999)]


def test_a_run_beyond_the_limit_is_read_from_its_beginning_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = long_run().claim(T0 + 1000, attempt=1).segment({**NUMBERS, "t": 3.0}, attempt=1)
    monkeypatch.setattr(segments_module, "MAX_BYTES", bytes_of(scene) // 3)
    found, kept = scene.read(), dict[str, memoryview]()
    for rank in (0, 1):
        steps = [row.values["step"] for row in found.numbers if (row.rank, row.attempt) == (rank, 0)]
        assert (steps[0], steps[-1]) == (0, 9990)
        assert max(after - before for before, after in pairwise(steps)) <= 310, (
            "at most three of four segments are skipped"
        )
    assert [row.t for row in found.numbers if row.attempt == 1] == [3.0], "the only segment of an attempt is read"
    (problem,) = found.problems
    assert "of 201 segments are left out" in problem
    assert read_metrics(scene.store, "run", RunRecord.parse(run_json(created_at=T0)), kept).rows == found.rows
    for rank in (0, 1):
        scene.segment(NUMBERS, rank=rank, number=100)
    read_metrics(scene.store, "run", RunRecord.parse(run_json(created_at=T0)), kept)
    assert sum(map(len, kept.values())) <= segments_module.MAX_BYTES, "a reader that continues keeps at most MAX_BYTES"


def test_a_ledger_of_a_part_does_not_say_goodput_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = long_run()
    assert scene.read().ledger.goodput == pytest.approx(1.0)
    monkeypatch.setattr(segments_module, "MAX_BYTES", bytes_of(scene) // 2)
    found = scene.read()
    assert (found.is_whole, found.ledger.goodput) == (False, None)
    numbers = Measures(found).six()
    of_the_whole = ("late", "hidden", "in_rounds", "waiting", "bytes_up", "bytes_down", "times_less")
    assert [numbers[name] for name in of_the_whole] == [None] * len(of_the_whole)


def test_columns_have_one_value_for_each_row() -> None:
    columns = Scene().segment({**NUMBERS, "lr": 0.1}, ROUND, USAGE).claim(T0).read().to_dict()
    assert {len(column) for column in columns.values()} == {3}
    assert list(columns)[:8] == ["kind", "rank", "attempt", "s", "step", "loss", "lr", "entry"]
    assert (columns["kind"], columns["loss"]) == (["numbers", "round", "usage"], [2.5, None, None])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2, is not JSON"),
        (DEEP, "it is not a JSON object"),
        ("[" * 200_000, "line 2, is not JSON"),
        ("[1]", "it is not a JSON object"),
        ('1,{"t":1}', "line 2, is not JSON"),
        ({"t": 1, "loss": "low"}, "'loss' is 'low', a number from"),
        ({"t": 1, "loss": True}, "'loss' is true, a number from"),
        ({"t": 1, "loss": {"a": 1}}, "'loss' is an object, a number from"),
        ({"t": 10**12, "step": -(10**12), "loss": 1}, "'t' is 1000000000000"),
        ({"loss": 1.0}, "'t' is missing"),
        ({"t": -1, "loss": 1.0}, "'t' is -1, a number from 0"),
        ({"t": 1e12}, "'t' is 1000000000000.0, a number from 0"),
        ({**ROUND, "verdict": "won"}, "'verdict' is 'won', one of counted, carried, dropped was expected"),
        ({**ROUND, "ranks": ["0"]}, "'ranks' is a list"),
        ({**ROUND, "train_s": -1}, "'train_s' is -1"),
        ({**ROUND, "weight": None}, "'weight' is null"),
        ({**USAGE, "rss": 1.5}, "'rss' is 1.5, an integer"),
        ({"t": 1, "left_out": "all"}, "'left_out' is 'all'"),
    ],
)  # fmt: skip
def test_a_line_that_does_not_fit_is_named_and_the_others_are_read(line: Any, said: str) -> None:
    found = Scene().segment(NUMBERS, line, {**NUMBERS, "t": 2.0}).segment(NUMBERS, rank=1).claim(T0).read()
    assert [(row.rank, row.t) for row in found] == [(0, 1.0), (0, 2.0), (1, 1.0)]
    (problem,) = found.problems
    assert said in problem
    assert "run/metrics/0000/0/000000.jsonl" in problem
    assert len(problem) < 1000


def test_numbers_that_are_not_finite_or_too_large_are_left_out_and_counted() -> None:
    values = ["NaN", "Infinity", "-1e999", "1" + 400 * "0", "1.7e308"]  # the sums of the last row overflow
    found = Scene().segment(NUMBERS, *(f'{{"t":{n},"step":{n},"loss":{v}}}' for n, v in enumerate(values, 1))).read()
    assert [dict(row.values) for row in found.numbers] == [
        {"step": 3, "loss": 2.5},
        *({"step": n} for n in range(1, 6)),
    ]
    said = "Rank 0, attempt 0: 'loss' is not finite, or beyond 1e+300, in 5 lines."
    assert found.problems == [said]
    assert [row.not_finite for row in found.numbers] == [(), *[("loss",)] * 5]


def test_missing_and_foreign_segments_are_named_as_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene().segment(NUMBERS).segment({"t": 3, "left_out": 7}, number=3)
    scene.store.put("run/metrics/0000/0/000004.jsonl", b" " * (5 << 20))
    scene.store.put("run/metrics/0000/0/000005.jsonl", b"")
    scene.store.put(f"run/metrics/{ANSI.replace(chr(0), '')}/x", b"")
    problems = scene.read().problems
    assert [said for said in problems if not said.isprintable()] == []
    foreign, large, empty, gap, dropped = problems
    assert "is not a segment." in foreign
    assert "has 5242880 bytes" in large
    assert empty == "'run/metrics/0000/0/000005.jsonl' is empty."
    assert gap == "Rank 0, attempt 0: segments are missing, the first is number 1."
    assert dropped == "Rank 0, attempt 0: 7 lines were dropped, because no segment could be written."
    monkeypatch.setattr(segments_module, "MAX_BYTES", 100)
    assert "segments are left out: together they have more than 100 bytes." in scene.read().problems[1]
    monkeypatch.setattr(metrics_module, "MAX_PROBLEMS", 1)
    assert scene.read().problems[1].endswith("more problems.")


def test_a_segment_with_a_huge_number_is_a_gap_and_takes_no_memory() -> None:
    scene = Scene().segment(NUMBERS)
    scene.store.put("run/metrics/0000/0/000999999.jsonl", b"")
    tracemalloc.start()
    try:
        problems = scene.read().problems
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "Rank 0, attempt 0: segments are missing, the first is number 1." in problems
    assert peak_bytes < 10 << 20


def test_names_beyond_many_or_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "MAX_NAMES", 2)
    found = Scene().segment(*({"t": n, f"n{n}": n} for n in range(5)), {"t": 9, "n0": 1, "n4": 1, "x" * 300: 1}).read()
    assert found.names() == ["n0", "n1"]
    assert found.problems == [
        "Rank 0, attempt 0: 4 names of numbers beyond 2, or longer than 200 characters, are left out."
    ]
    assert found.numbers[-1].values == {"n0": 1}


@pytest.mark.parametrize("room", [0, 400, 1 << 20], ids=["no room", "some room", "room"])
def test_a_run_that_is_read_again_and_again_is_parsed_once_and_reads_as_if_it_was_parsed_anew(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, add = list[str](), segments_module.Lines.add

    def count(lines: Any, key: str, body: bytes) -> None:
        added.append(key)
        add(lines, key, body)

    monkeypatch.setattr(segments_module.Lines, "add", count)
    monkeypatch.setattr(segments_module, "MAX_NAMES", 3)
    scene, parsed = Scene().claim(T0).claim(T0, rank=1), ParsedSegments(SegmentBudget(room))
    late, strange = {"t": 0.5, "step": 1, "loss": 9.0}, {"t": 6.0, "loss": math.inf}
    for number, lines in (
        (0, [NUMBERS, ROUND, {"t": 9.0, "left_with": 1.0, "name": "main"}]),
        (1, [late, "{", NUMBERS, strange]),
        (3, [strange, {"t": 7.0, "a": 1, "b": 2, "c": 3}]),
        (2, [{"t": 8.0, "left_out": 4}, USAGE]),  # a segment that was listed late
        (4, [NUMBERS]),
    ):
        for rank in range(2 if number < 4 else 1):
            scene.segment(*lines, rank=rank, number=number)
        found, again, anew = scene.read(parsed), scene.read(parsed), scene.read()
        for metrics in (found, again):
            assert (list(metrics), metrics.problems, metrics.left) == (list(anew), anew.problems, anew.left)
    added.clear()
    scene.read(parsed)
    assert (added == []) == (room > 400)
    parsed.forget()
    assert parsed._budget.take(room), "all room is free again"


def test_a_segment_that_the_store_did_not_return_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, parsed, get = Scene().segment(NUMBERS).claim(T0), ParsedSegments(SegmentBudget(1 << 20)), MemoryStore.get

    def fails(store: MemoryStore, key: str, **part: Any) -> memoryview:
        if "/metrics/" in key:
            raise StoreError("The store does not answer.", key=key, url=store.url)
        return get(store, key, **part)

    with monkeypatch.context() as broken:
        broken.setattr(MemoryStore, "get", fails)
        assert scene.read(parsed).problems == ["The store does not answer."]
    found = scene.read(parsed)
    assert ([row.t for row in found], found.problems) == ([1.0], [])


def test_a_run_without_any_segment_has_no_rows_and_no_problems() -> None:
    found = Scene().read()
    assert (list(found), found.problems, found.attempts, found.as_of_s, found.names()) == ([], [], [], 0.0, [])
    assert found.ledger.goodput is None


def test_attempts_begin_at_their_claims_and_end_at_their_outcomes() -> None:
    ended = outcome_json(1, finished_at=T0 + 30, host="a")
    lost = outcome_json(0, status="failed", reason="lost", finished_at=T0 + 4000, host="elsewhere")
    scene = Scene().claim(T0).claim(T0 + 2, rank=1).claim(T0 + 50, attempt=1)
    scene.record("outcome", ended, rank=1).record("outcome", lost).record("heartbeat", {"at": T0 + 20})
    found = scene.segment(NUMBERS).segment({**NUMBERS, "t": 9.0}, attempt=1).read()
    assert (found.began_at, found.as_of_s) == (T0, 59.0)
    spans = [(span.rank, span.attempt, span.started_s, span.ended_s) for span in found.attempts]
    assert spans == [(0, 0, 0.0, 20.0), (0, 1, 50.0, None), (1, 0, 2.0, 30.0)], (
        "the end of a lost attempt is its last heartbeat"
    )
    assert [found.at(row) for row in found] == [1.0, 59.0]
    assert found.attempts[0].outcome is not None


def test_an_attempt_found_lost_the_next_day_on_its_own_machine_ended_at_its_last_sign_of_life() -> None:
    scene = Scene().claim(T0, host=socket.gethostname()).segment(NUMBERS).record("heartbeat", {"at": T0 + 20})
    lost = Attempt(scene.store, "run", 0).record_lost("its supervisor is gone")
    assert lost.host == socket.gethostname(), "the finder's"
    found = scene.read()
    assert (found.as_of_s, [span.ended_s for span in found.attempts]) == (20.0, [20.0])


def test_a_record_of_an_attempt_that_cannot_be_read_is_named() -> None:
    found = Scene().segment(NUMBERS).record("started", [1]).claim(T0, rank=1).record("outcome", {}, rank=1).read()
    assert len(found) == 1
    assert ["started.json" in said or "outcome.json" in said for said in found.problems] == [True, True]


def saw(*times: float, verdict: str = "counted", first: int = 0) -> list[dict[str, Any]]:
    return [{**ROUND, "entry": first + n, "t": t, "verdict": verdict} for n, t in enumerate(times)]


@pytest.mark.parametrize("skew", [-7000.0, -0.5, 0.0, 3.0, 100.0])
def test_clocks_that_differ_are_put_right_by_the_seals_that_both_saw(skew: float) -> None:
    """Rank 1 is claimed 10 s after rank 0, sees each seal a little later, one much later, and its clock is wrong."""
    scene = Scene().claim(T0).claim(T0 + 10 + skew, rank=1, host="b")
    scene.segment(*saw(20.0, 30.0, 40.0, 50.0, 60.0)).segment(*saw(10.5, 45.0, 30.01, 40.5), rank=1)
    found = scene.read()
    assert found.attempts[1].started_s - found.attempts[0].started_s == pytest.approx(10, abs=0.51)
    late = max(found.rounds, key=found.at)
    assert (late.entry, found.at(late) - found.attempts[0].started_s) == (4, 60.0)


def test_an_attempt_that_saw_no_seal_has_the_clock_of_its_host() -> None:
    scene = Scene().claim(T0).claim(T0 + 105, rank=1, host="b").claim(T0 + 160, rank=1, attempt=1, host="b")
    scene.segment(*saw(20.0, 30.0)).segment(*saw(15.0, 25.0), rank=1).segment(NUMBERS, rank=1, attempt=1)
    starts = [span.started_s for span in scene.claim(T0 + 7, rank=2, host="c").read().attempts]
    assert starts == pytest.approx([0.0, 5.0, 60.0, 7.0])


def test_a_seal_that_was_seen_late_does_not_count_as_a_wrong_clock_if_other_seals_contradict_it() -> None:
    scene = Scene().claim(T0).claim(T0, rank=1, host="b")
    scene.segment(*saw(20.0, 30.0, 40.0)).segment(*saw(50.0, 55.0, verdict="carried"), *saw(40.0, first=2), rank=1)
    assert [span.started_s for span in scene.read().attempts] == [0.0, 0.0]


def test_the_ledger_of_a_run_has_the_work_of_failed_and_closed_replicas() -> None:
    scene = Scene().claim(T0).claim(T0, rank=1)
    scene.segment(*saw(10.0, 20.0), {"t": 21.0, "left_with": 3.0, "name": "main"})
    scene.segment(*saw(10.0, 20.0), rank=1)
    scene.record("outcome", outcome_json(0, finished_at=T0 + 30, host="a"))
    scene.record("outcome", outcome_json(1, status="failed", reason="signal", finished_at=T0 + 23, host="a"), rank=1)
    ledger = scene.read().ledger
    assert (ledger.counted, ledger.carried, ledger.dropped) == (40.0, 3.0, 0.0)
    assert ledger.lost == pytest.approx(10.0), "the pace was 10 units in 3 s, and the replica was killed 3 s later"
    assert ledger.by_rank[1].lost == ledger.lost
    assert not math.isnan(ledger.goodput or math.nan)


def test_at_a_bucket_each_object_is_asked_for_once_and_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, asked, both = Scene(), list[str](), threading.Barrier(2)
    scene.claim(T0).claim(T0, rank=1).record("outcome", outcome_json(1), rank=1)
    for number in range(2):
        scene.segment({**NUMBERS, "t": number}, number=number)
    near, get = scene.read(), scene.store.get

    def counted(key: str, **part: Any) -> memoryview:
        asked.append(key)
        if "/metrics/" in key:
            both.wait(30)  # until a second read runs at the same time
        return get(key, **part)

    monkeypatch.setattr(scene.store, "get", counted)
    scene.store._url = "s3://bucket"
    assert scene.read().rows == near.rows
    assert len(asked) == len(set(asked)) == 5


def test_rounds_that_lie_do_not_stop_the_ledger() -> None:
    lie = {**ROUND, "fragment": 10**6, "ranks": [*range(5000)], "weight": 1e299, "train_s": 1e-9, "entry": 2**53}
    scene = Scene().claim(T0).claim(T0, rank=1).segment(*saw(10.0, 20.0), lie).segment(*saw(10.0, 20.0), rank=1)
    assert scene.read().problems == []
    assert scene.read().ledger.by_rank.keys() == {0, 1}
