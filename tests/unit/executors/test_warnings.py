"""The warnings of one attempt are collected, kept and shown; these tests start no replica."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from executors.attempt import WARNED, Attempt, Beat
from executors.attempt.outcome import MAX_FIRST, MAX_WARNINGS, encode_outcome, parse_outcome
from executors.attempt.warning_record import MAX_CHARACTERS, RecordedWarnings
from executors.errors import CorruptObjectError, ReplicasWarning, StoreError
from executors.protocol import Outcome, ReplicaStatus, WarningCount
from executors.replica import Replica
from executors.replica.warning_log import MAX_OF_PLACE, N_AT_ONCE, NEW_S, REPEAT_S, RETRY_S, WarningLog
from executors.status import FoundWarning, ReplicaState, RunStatus, describe_warnings
from executors.store import MemoryStore, open_store
from executors.store.protocol import Data
from executors.store.records import MAX_RECORD_BYTES
from executors.task.record import TaskRecord
from executors.view.report.event_reader import MORE, read_warnings
from executors.worker import trained_alone
from executors.worker.heartbeat import Heartbeat
from executors.worker.trained_alone import has_trained_alone
from executors.worker.warning_hook import collect_warnings

SUCCEEDED = ReplicaStatus.SUCCEEDED
ROOT = Path(__file__).parents[3]


class CountingStore(MemoryStore):
    """Counts the puts, and fails while a test wants it to."""

    def __init__(self) -> None:
        super().__init__("memory://counting")
        self.n_puts = 0
        self.fails = False

    def put(self, key: str, data: Data) -> None:
        if self.fails:
            raise StoreError("down")
        self.n_puts += 1
        super().put(key, data)


class Kept:
    """A log of warnings in memory, and its clock."""

    def __init__(self) -> None:
        self.store = CountingStore()
        self.attempt = Attempt(self.store, "run", 3)
        self.now = 1000.0
        self.log = WarningLog(self.attempt, clock=lambda: self.now, now=lambda: self.now)

    def texts(self) -> list[str]:
        self.log.write(is_last=True)
        return [each.text for each in read_warnings(self.attempt)]


@pytest.fixture
def kept() -> Kept:
    return Kept()


# Kept warnings


def test_a_text_is_kept_once_with_how_often_and_when_it_came(kept: Kept) -> None:
    for second in range(3):
        kept.now = 1000.0 + second
        kept.log.add("the disk is full")
    kept.log.add("another")
    kept.log.write(is_last=True)
    found = kept.attempt.find("warnings.json", RecordedWarnings.parse)
    assert found is not None
    assert [(each.text, each.count, each.at, each.last_at) for each in found.warnings] == [
        ("the disk is full", 3, 1000.0, 1002.0),
        ("another", 1, 1002.0, 1002.0),
    ]
    assert kept.log.count == WarningCount(2, "the disk is full", 1000.0)


def test_a_loop_that_warns_fills_neither_the_memory_nor_the_record(kept: Kept) -> None:
    kept.log.add("the important one")
    for number in range(5000):
        kept.log.add(f"step {number}", "train:7")
        kept.log.add("again", "train:8")
    kept.log.add("the late one", "train:9")
    texts = kept.texts()
    assert texts == ["the important one", "step 0", "again", *(f"step {n}" for n in range(1, MAX_OF_PLACE)),
                     "the late one", f"{5000 - MAX_OF_PLACE} {MORE}"]  # fmt: skip
    for number in range(5000):
        kept.log.add(f"\N{PILE OF POO}{number:04d}" * MAX_CHARACTERS, f"place {number}")
    kept.log.write(is_last=True)
    found = kept.attempt.find("warnings.json", RecordedWarnings.parse)
    assert found is not None
    assert len(found.warnings) == MAX_WARNINGS
    assert {len(each.text) for each in found.warnings[-10:]} == {MAX_CHARACTERS}
    assert len(bytes(kept.store.get(kept.attempt.key("warnings.json")))) < MAX_RECORD_BYTES
    count = kept.log.count
    assert count is not None
    assert (count.count, len(count.first)) == (MAX_WARNINGS + 1, len("the important one"))


def test_the_first_texts_are_written_at_once_and_later_ones_and_repeats_wait(kept: Kept) -> None:
    n_woken: list[int] = []
    kept.log.on_first = lambda: n_woken.append(1)
    for number in range(N_AT_ONCE):
        kept.log.add(f"warning {number}")
        assert kept.log.write()
        assert (len(n_woken), kept.store.n_puts) == (number + 1, number + 1)
    kept.log.add("a later one")
    assert not kept.log.write()
    kept.now += NEW_S
    assert kept.log.write()
    assert (len(n_woken), kept.store.n_puts) == (N_AT_ONCE, N_AT_ONCE + 1)
    kept.log.add("warning 0")
    kept.now += NEW_S
    assert not kept.log.write()
    kept.now += REPEAT_S
    assert kept.log.write()
    assert kept.log.write(is_last=True)
    assert kept.store.n_puts == N_AT_ONCE + 2, "a record without changes is not written again"


def test_a_failing_store_is_asked_again_without_an_error(kept: Kept) -> None:
    kept.store.fails = True
    kept.log.add("kept in memory")
    assert not kept.log.write()
    kept.store.fails = False
    assert not kept.log.write(), "the next write waits, because it would fail again"
    kept.now += RETRY_S
    assert kept.log.write()
    assert kept.texts() == ["kept in memory"]


def test_the_prefix_of_the_rank_is_removed_from_a_text_because_readers_add_it(kept: Kept) -> None:
    for text in ("rank 3: a", "replicas: rank 3: b", "rank 30: c", "rank 3 takes no snapshots"):
        kept.log.add(text)
    assert kept.texts() == ["a", "b", "rank 30: c", "rank 3 takes no snapshots"]


def test_a_text_that_is_not_available_ends_nothing(kept: Kept) -> None:
    kept.log.add(5)  # type: ignore[arg-type]
    kept.log.on_first = lambda: 1 / 0  # type: ignore[assignment]
    kept.log.add("lone \ud800 surrogate")
    kept.log.add("")
    assert kept.texts() == ["lone ? surrogate", ""]


def test_the_folder_of_a_deleted_run_is_not_made_again(tmp_path: Path) -> None:
    attempt = Attempt(open_store(tmp_path), "run", 0)
    log = WarningLog(attempt)
    log.add("too late")
    assert log.write(is_last=True)
    assert not (tmp_path / "run").exists()


def test_a_process_that_was_forked_off_adds_nothing(kept: Kept) -> None:
    pid = os.fork()
    if pid == 0:
        kept.log.add("of a helper")
        os._exit(0 if kept.log.count is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_signal_handler_may_warn_while_its_thread_does(kept: Kept) -> None:
    def handler(signum: int, frame: FrameType | None) -> None:
        kept.log.add("in the handler")

    merge = kept.log._merge

    def interrupted(text: str, place: str, at: float) -> bool:
        if text == "in the thread":
            signal.raise_signal(signal.SIGUSR1)
        return merge(text, place, at)

    kept.log._merge = interrupted  # type: ignore[method-assign]
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        kept.log.add("in the thread")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert kept.texts() == ["in the handler", "in the thread"]


BAD: dict[str, Any] = {
    "no list": {"warnings": {"text": "a"}},
    "no texts": {"warnings": ["a"]},
    "a text that is none": {"warnings": [{"text": 5, "at": 1.0, "last_at": 1.0, "count": 1}]},
    "a text that is too long": {"warnings": [{"text": "x" * 1001, "at": 1.0, "last_at": 1.0, "count": 1}]},
    "a time that is none": {"warnings": [{"text": "a", "at": "now", "last_at": 1.0, "count": 1}]},
    "a count that is none": {"warnings": [{"text": "a", "at": 1.0, "last_at": 1.0, "count": 0}]},
    "too many": {"warnings": [{"text": "a", "at": 1.0, "last_at": 1.0, "count": 1}] * (MAX_WARNINGS + 1)},
    "more that are none": {"warnings": [], "left_out": -1},
}


@pytest.mark.parametrize("name", BAD)
def test_a_record_of_warnings_that_is_invalid_is_refused_by_its_key(kept: Kept, name: str) -> None:
    kept.store.put(kept.attempt.key("warnings.json"), json.dumps(BAD[name]).encode())
    with pytest.raises(CorruptObjectError, match=r"run/replicas/0003/0/warnings\.json"):
        read_warnings(kept.attempt)


# Counts in records that are read anyway


def test_a_heartbeat_and_an_outcome_have_the_count_for_every_report_of_the_replica(kept: Kept) -> None:
    kept.log.add("x" * 500)
    count = kept.log.count
    assert count is not None
    assert len(count.first) == MAX_FIRST
    beat = Beat(5.0, {"step": 1, WARNED: 7, "warnings": 3}, count)
    assert Beat.parse(beat.to_bytes()) == Beat(5.0, {"step": 1, "warnings": 3}, count)
    assert Beat.parse(Beat(5.0, {WARNED: 7}).to_bytes()) == Beat(5.0, {}, None)
    outcome = Outcome(3, 0, SUCCEEDED, warned=count, trained_alone=True)
    assert parse_outcome(encode_outcome(outcome)) == outcome
    for bad in (
        5,
        {},
        {**vars(count), "count": 0},
        {**vars(count), "first": "x" * 201},
        {**vars(count), "first_at": "x"},
    ):
        with pytest.raises(CorruptObjectError, match=r"replicas\.warnings"):
            Beat.parse(json.dumps({"at": 1.0, WARNED: bad}).encode())
        with pytest.raises(CorruptObjectError, match="warned"):
            parse_outcome(json.dumps({**json.loads(encode_outcome(outcome)), "warned": bad}).encode())


class SignallingStore(MemoryStore):
    """A store that signals when a heartbeat with a count of warnings is written."""

    def __init__(self) -> None:
        super().__init__("memory://signalling")
        self.is_counted = threading.Event()
        self.order: list[str] = []

    def put(self, key: str, data: Data) -> None:
        super().put(key, data)
        self.order.append(key.rpartition("/")[2])
        if key.endswith("heartbeat.json") and isinstance(data, bytes) and WARNED.encode() in data:
            self.is_counted.set()


def test_the_first_warning_wakes_the_heartbeat_which_writes_the_record_before_it_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("executors.worker.heartbeat.LOOK_S", 3600.0)
    store = SignallingStore()
    replica = Replica(0, 1, "run", 0, store.url, claimed_nonce="n")
    replica.__dict__["store"] = store
    replica.warnings = WarningLog(Attempt(store, "run", 0))
    heartbeat = Heartbeat(replica)
    heartbeat.start()
    try:
        replica.warnings.add("look at me")
        assert store.is_counted.wait(30)
    finally:
        heartbeat.stop()
    assert store.order[:2] == ["warnings.json", "heartbeat.json"]


# Collected warnings


def module_of(name: str, code: str) -> ModuleType:
    """Make a module, as one of a package is."""
    made = ModuleType(name)
    exec(textwrap.dedent(code), made.__dict__)
    return made


WARNS = """
import logging, warnings
log = logging.getLogger(__name__)
def warn(text, category=UserWarning, level=1):
    warnings.warn(text, category, stacklevel=level)
def note(text, *args):
    log.warning(text, *args)
def fail():
    try:
        raise OSError("no space")
    except OSError:
        log.exception("cannot keep %s", "it")
"""


@pytest.fixture
def shown() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def _warnings_are_shown_and_not_errors(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: shown.append(str(message))
        yield


def test_warnings_of_our_code_are_heard_at_whichever_line_they_point_and_those_of_others_are_not(
    kept: Kept, shown: list[str]
) -> None:
    ours, users = module_of("diloco.settings", WARNS), module_of("train", WARNS)
    almost = module_of("diloco_fork", WARNS)
    with collect_warnings(kept.log):
        ours.warn("of ours")
        ours.warn("of ours, with the line of the caller", level=2)
        ours.warn("of ours, of any category", DeprecationWarning)
        users.warn("of the user")
        users.warn("of the user, marked", ReplicasWarning)
        almost.warn("of a package with a name like ours")
    ours.warn("afterwards")
    assert kept.texts() == [
        "of ours",
        "of ours, with the line of the caller",
        "of ours, of any category",
        "of the user, marked",
    ]
    assert len(shown) == 7, "each warning is shown as before"


def test_records_of_our_loggers_are_heard_from_the_level_of_warnings_on(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    ours, users = module_of("diloco.rendezvous.round_runner", WARNS), module_of("train", WARNS)
    with collect_warnings(kept.log):
        ours.note("rank %s: round %s", 3, 7)
        ours.log.info("for whoever asks")
        ours.fail()
        logging.getLogger("executors").critical("of the top")
        users.note("of the user")
    ours.note("afterwards")
    assert kept.texts() == ["round 7", "cannot keep it: OSError: no space", "of the top"]
    assert "rank 3: round 7" in caplog.text


def test_a_record_without_a_text_is_ignored(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = module_of("diloco.quiet", WARNS)
    monkeypatch.setattr(quiet.log, "propagate", False)
    quiet.log.addHandler(logging.NullHandler())
    with collect_warnings(kept.log):
        monkeypatch.setattr(quiet.log, "handlers", [*quiet.log.handlers, *logging.getLogger("diloco").handlers])
        quiet.note("bad arguments %s %s", 1)
        quiet.note("good")
    assert kept.texts() == ["good"]


def test_a_warning_that_the_user_turned_into_a_record_is_heard_anyway(kept: Kept) -> None:
    ours, users = module_of("diloco.settings", WARNS), module_of("train", WARNS)
    with collect_warnings(kept.log):
        logging.captureWarnings(True)
        try:
            ours.warn("of ours", level=2)
            users.warn("of the user")
        finally:
            logging.captureWarnings(False)
    assert kept.texts() == ["of ours"]


def test_the_users_own_showwarning_stays_when_the_replica_has_ended(kept: Kept) -> None:
    def mine(*_: Any, **more: Any) -> None: ...

    before = warnings.showwarning
    with collect_warnings(kept.log):
        pass
    assert warnings.showwarning is before
    with collect_warnings(kept.log):
        warnings.showwarning = mine
    assert warnings.showwarning is mine


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from executors.attempt import Attempt
from executors.replica.warning_log import WarningLog
from executors.store.memory import MemoryStore
from executors.worker.warning_hook import collect_warnings
assert "logging" not in sys.modules, "it would cost every replica"
kept = WarningLog(Attempt(MemoryStore(), "run", 0))
def work():
    import logging, warnings
    {setup}
    sys.modules["diloco.made_up"] = made = type(sys)("diloco.made_up")
    exec({code!r}, made.__dict__)
    made.warn("by warnings", level=2)
    made.note("by a logger: %s", "text")
    logging.getLogger("other").warning("of another")
    made.fail()
{begin}
    work()
count = kept.count
print("collect_warnings:", None if count is None else count.count)
"""


@pytest.mark.parametrize(
    "setup",
    [
        "pass",
        "logging.basicConfig(format='%(name)s says %(message)s')",
        "logging.getLogger('diloco').propagate = False",
        "logging.getLogger('diloco.made_up').addHandler(logging.StreamHandler(sys.stdout))",
        "logging.getLogger('diloco').addHandler(logging.NullHandler())",
        "logging.captureWarnings(True)",
    ],
)
def test_the_log_gets_the_same_text_as_without_the_hook_and_a_logging_that_comes_later_is_heard(setup: str) -> None:
    def run(begin: str) -> tuple[str, str, str]:
        code = SCRIPT.format(root=str(ROOT), setup=setup, code=WARNS, begin=begin)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        output, _, n = done.stdout.rpartition("collect_warnings: ")
        return output, done.stderr, n.strip()

    out, err, n = run("with collect_warnings(kept):")
    assert (out, err) == run("if True:")[:2]
    assert n == "3"


def test_the_import_system_is_restored_if_no_code_imports_logging(kept: Kept) -> None:
    code = """
import sys
from executors.attempt import Attempt
from executors.replica.warning_log import WarningLog
from executors.store.memory import MemoryStore
from executors.worker.warning_hook import collect_warnings
before = [*sys.meta_path]
with collect_warnings(WarningLog(Attempt(MemoryStore(), "run", 0))):
    import colorsys
assert sys.meta_path == before
assert "logging" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Shown warnings


def warned(rank: int, text: str, at: float, count: int = 1) -> ReplicaState:
    return ReplicaState(rank, 0, ReplicaStatus.RUNNING, warned=WarningCount(count, text, at))


def test_a_line_counts_warnings_and_shows_the_first_with_all_ranks_that_share_it() -> None:
    now = RunStatus("run", "local", [warned(0, "b", 5.0, 2), warned(1, "a.", 4.0), warned(2, "a.", 6.0)])
    assert now.n_warnings == 4
    assert (
        describe_warnings(now.warnings, now.n_warnings, "run")
        == "4 warnings, the first: ranks 1-2: a; replicas events run"
    )
    document = now.to_json()
    assert document["n_warnings"] == 4
    assert [row["n_warnings"] for row in document["replicas"]] == [2, 1, 1]
    assert [(row["rank"], row["text"]) for row in document["warnings"]] == [(0, "b"), (1, "a."), (2, "a.")]
    one = [FoundWarning(text="rank 2 takes no snapshots: x", at=1.0, rank=2, attempt=0)]
    assert describe_warnings(one, 1, "r") == "1 warning: rank 2 takes no snapshots: x; replicas events r"
    logged = [FoundWarning(text="Rank 2: 1 inner step is dropped", at=1.0, rank=2, attempt=1)]
    assert describe_warnings(logged, 1, "r") == "1 warning: Rank 2: 1 inner step is dropped; replicas events r"
    both = [FoundWarning(text="Rank 2: x", at=1.0, rank=2), FoundWarning(text="Rank 2: x", at=1.0, rank=21)]
    assert describe_warnings(both, 2, "r") == "2 warnings, the first: ranks 2, 21: Rank 2: x; replicas events r"
    assert RunStatus("run", "local", [ReplicaState(0, 0, ReplicaStatus.RUNNING)]).to_json()["warnings"] == []


def test_a_notebook_shows_the_line_as_text() -> None:
    shown = RunStatus("run", "local", [warned(0, "<script>\x1b[31m", 5.0)]).to_html()
    assert "1 warning: rank 0: &lt;script&gt; [31m" in shown


# Replicas that each trained alone


def alone(n: int = 2, *, but: int | None = None) -> RunStatus:
    outcomes = [Outcome(rank, 0, SUCCEEDED, finished_at=9.0, trained_alone=rank != but) for rank in range(n)]
    return RunStatus("run", "local", [ReplicaState(end.rank, 0, SUCCEEDED, end) for end in outcomes])


def test_only_a_run_whose_replicas_all_trained_alone_warns_of_it() -> None:
    (told,) = alone(4).warnings
    assert told.text.startswith("None of the 4 replicas created a DiLoCo, so each trained alone.")
    assert (told.rank, told.at) == (None, 9.0)
    assert alone(1).warnings == []
    assert alone(4, but=2).warnings == []
    running = alone(2)
    states = [*running.replicas, ReplicaState(2, 0, ReplicaStatus.RUNNING)]
    assert RunStatus("run", "local", states).warnings == []


# Replicas that changed their models after `close()`


def changed(*marks: dict[str, float] | None, rounds: tuple[int, int] = (4, 4)) -> list[str]:
    """Return the warnings of a run whose replicas left these numbers of changed models."""
    outcomes = [
        Outcome(rank, 0, SUCCEEDED, finished_at=9.0, own_models=mark, reached={"round": rounds[rank % 2]})
        for rank, mark in enumerate(marks)
    ]
    states = [ReplicaState(end.rank, 0, SUCCEEDED, end) for end in outcomes]
    return [each.text for each in RunStatus("run", "local", states).warnings]


def test_only_replicas_that_changed_their_models_in_different_ways_are_warned_of() -> None:
    (text,) = changed({"main": 0.5}, None, {"main": 0.6})
    assert text.startswith("Replicas ended with different models: ranks 0, 2 changed theirs after DiLoCo was closed")
    assert "replicas model RUN" in text
    (text,) = changed({"main": 0.5, "main.also0": 0.1}, {"main": 0.5, "main.also0": 0.2})
    assert "ranks 0-1" in text
    assert changed(None, None) == []
    assert changed({"main": 0.5}, None) == []  # one rank saves the model for all
    assert changed({"main": 0.5}, {"main": 0.5000001}) == []  # the same change, on other processors
    assert changed({"generator": 0.5}, {"critic": 0.1}) == []


def test_replicas_of_different_rounds_have_one_warning_of_their_models() -> None:
    (text,) = changed({"main": 0.5}, {"main": 0.6}, rounds=(3, 4))
    assert "after round 3" in text


class TaskOf:
    """A task of a file, in a process that has made an optimizer."""

    def __init__(self, folder: Path, source: str = "x = 1") -> None:
        (folder / "train.py").write_text(source)
        self.record = TaskRecord.parse({"python": "3.12", "entrypoint": f"{folder}/train.py:__main__", "args": {}})
        self.replica = Replica(1, 2, "run", 0, "memory://x", claimed_nonce="n")

    def judge(self) -> bool:
        return has_trained_alone(self.replica, self.record)


@pytest.fixture
def with_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_alone, "_made_optimizer", lambda: True)
    monkeypatch.setattr(trained_alone, "sys", SimpleNamespace(modules={}))  # hides this file, which names REPLICA_RANK


@pytest.mark.usefixtures("with_optimizer")
def test_a_process_has_trained_alone_only_if_nothing_in_it_can_know_its_rank(tmp_path: Path) -> None:
    assert TaskOf(tmp_path).judge()
    assert not TaskOf(tmp_path, "import os; os.environ['REPLICA_RANK']").judge()
    knows = TaskOf(tmp_path)
    knows.replica.knows_rank = True
    assert not knows.judge()
    one = TaskOf(tmp_path)
    one.replica.world_size = 1
    assert not one.judge()
    pickled = TaskRecord.parse({"python": "3.12", "entrypoint": None, "callable_sha256": "0" * 64})
    assert not has_trained_alone(TaskOf(tmp_path).replica, pickled)


def test_only_the_construction_of_an_optimizer_is_training() -> None:
    code = """
import torch
from executors.worker.trained_alone import _made_optimizer
assert not _made_optimizer()
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
assert not _made_optimizer(), "inference, or a gradient, is no training"
torch.optim.AdamW(model.parameters())
assert _made_optimizer()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_an_odd_module_of_the_user_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    task = TaskOf(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", Odd("torch"))
    assert task.judge() is False
