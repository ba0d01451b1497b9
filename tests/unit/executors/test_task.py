"""Tests tasks and runs in a store: their content, refusals, and that only the launched task is unpickled."""

from __future__ import annotations

import hashlib
import json
import linecache
import re
import threading
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from support.new_runs import create_run
from support.records import read_json

from executors.errors import EntrypointArgumentsError, EntrypointError, RunExistsError, StoreError
from executors.store import MemoryStore
from executors.store.faulty import FaultyStore
from executors.store.file import FileStore
from executors.store.records import to_bytes
from executors.store.url import check_run_id, new_run_id
from executors.task.placeholders import fill
from executors.task.stored import read_task

ME = {"rank": 1, "run_id": "r", "attempt": 2, "world_size": 4}


def add(a: int, b: int = 1) -> int:
    return a + b


def test_a_callable_and_its_arguments_come_back() -> None:
    store = MemoryStore()
    offset = 100
    spec = create_run(store, "r", lambda a, b: a + b + offset, {"a": 1, "b": 2}, 2, backend="local", seed=7)
    task = read_task(store, "r", spec.task_digest)
    function, args = task.load(ME)
    assert function(**args) == 103
    assert (task.record.seed, spec.ranks, spec.world_size) == (7, (0, 1), 2)


def test_a_closure_with_a_variable_that_was_never_set_is_launched() -> None:
    def entrypoint(uses_it: bool) -> int:
        return never_set if uses_it else 1

    if ME["rank"] == 0:
        never_set = 2
    store = MemoryStore()
    spec = create_run(store, "r", entrypoint, {"uses_it": False}, 1, backend="local")
    function, args = read_task(store, "r", spec.task_digest).load(ME)
    assert function(**args) == 1


class Unconnected:
    def __getattr__(self, name: str) -> Any:
        if name == "__func__":
            raise RuntimeError("it is not connected")
        raise AttributeError(name)


def test_a_module_without_readable_source_is_pickled_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Holder:
        client = Unconnected()

    edited = "def main():\n    return [\n"  # the file has changed since its import
    lines = edited.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "<edited>", (len(edited), None, lines, "<edited>"))
    named: dict[str, Any] = {"__name__": "__main__", "Holder": Holder}
    exec(compile("def main():\n    return Holder.__name__", "<edited>", "exec"), named)
    store = MemoryStore()
    spec = create_run(store, "r", named["main"], {}, 1, backend="local")
    task = read_task(store, "r", spec.task_digest)
    function, _ = task.load(ME)
    assert function() == "Holder"
    assert "<edited>" not in task.record.sources


def test_rank_env_names_a_variable_and_is_not_an_argument() -> None:
    store = MemoryStore()
    spec = create_run(store, "r", add, {"a": 1, "rank_env": "MY_RANK"}, 1, backend="local")
    task = read_task(store, "r", spec.task_digest)
    assert (task.load(ME)[1], task.record.rank_env) == ({"a": 1}, "MY_RANK")


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ("out/${run_id}/${rank}-of-${world_size}.${attempt}", "out/r/1-of-4.2"),
        ("$${rank} costs $$5", "${rank} costs $$5"),
        ("$rank $HOME ${other} ${rank $", "$rank $HOME ${other} ${rank $"),
        ("$$$${rank}$${rank}", "$$${rank}${rank}"),
        (["$$E=mc^2$$", {"a": ("echo $$", "$${other} $$$")}], ["$$E=mc^2$$", {"a": ("echo $$", "$${other} $$$")}]),
        (["${rank}", {"a": "${rank}", "${rank}": 1}, ("${rank}",)], ["1", {"a": "1", "${rank}": 1}, ("1",)]),
        ([1, 2.5, None, True, b"${rank}"], [1, 2.5, None, True, b"${rank}"]),
    ],
)
def test_placeholders_are_filled_in_and_other_dollars_stay(given: object, filled: object) -> None:
    assert fill(given, ME) == filled
    store = MemoryStore()
    spec = create_run(store, "r", lambda value: value, {"value": given}, 4, backend="local")
    assert read_task(store, "r", spec.task_digest).load(ME)[1] == {"value": filled}


class Mode(StrEnum):
    FAST = "fast"


def test_an_argument_without_a_placeholder_is_passed_on_as_the_same_object() -> None:
    given: dict[str, Any] = {
        "deep": [{"text": "$$ $HOME"}, (1, [Mode.FAST])],
        "mixed": [["${rank}"], ["none"]],
        "mode": Mode.FAST,
    }
    filled = fill(given, ME)
    assert filled["mixed"] == [["1"], ["none"]]
    assert filled["deep"] is given["deep"]
    assert filled["mixed"][1] is given["mixed"][1]
    assert filled["mode"] is Mode.FAST
    assert given["mixed"] == [["${rank}"], ["none"]], "the caller's argument is not changed"


@pytest.mark.parametrize("text", ["nothing to fill in", "${rank}"])
def test_arguments_that_hold_themselves_travel_and_one_object_given_twice_stays_one(text: str) -> None:
    around: list[Any] = [text]
    around.append((around, {"around": around}))
    store = MemoryStore()
    entrypoint = lambda around, twice: around[0]  # noqa: E731
    spec = create_run(store, "r", entrypoint, {"around": around, "twice": [around, around]}, 4, backend="local")
    function, args = read_task(store, "r", spec.task_digest).load(ME)
    arrived = args["around"]
    assert function(**args) == text.replace("${rank}", "1")
    assert arrived[1][0] is arrived[1][1]["around"] is args["twice"][0] is args["twice"][1] is arrived


def test_arguments_nested_as_deeply_as_a_pickle_takes_are_filled_in() -> None:
    lists: Any = "${rank}"
    for _ in range(10_000):
        lists = [lists]
    filled = fill(lists, ME)
    while isinstance(filled, list):
        (filled,) = filled
    assert filled == "1"


def test_a_hundred_megabytes_of_arguments_travel() -> None:
    store = MemoryStore()
    spec = create_run(store, "r", lambda data: len(data), {"data": b"x" * (100 << 20)}, 1, backend="local")
    function, args = read_task(store, "r", spec.task_digest).load(ME)
    assert function(**args) == 100 << 20


def test_a_task_that_no_replica_would_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.task.create.MAX_TASK_BYTES", 100_000)
    monkeypatch.setattr("executors.task.stored.MAX_TASK_BYTES", 100_000)
    store = MemoryStore()
    for entrypoint in (add, "operator:add"):
        with pytest.raises(EntrypointArgumentsError, match=r"add and its arguments are 100,\d+ bytes, more than"):
            create_run(store, "r", entrypoint, {"a": "x" * 100_000}, 1, backend="local")
        assert not list(store.list(""))
    create_run(store, "r", add, {"a": "x" * 90_000}, 1, backend="local")


def test_values_of_environment_and_secrets_are_never_recorded() -> None:
    store = MemoryStore()
    spec = create_run(store, "r", add, {"a": 1}, 1, backend="local", env={"TOKEN": "hunter2"}, secret_names=["KEY"])
    stored = b"".join(bytes(store.get(entry.key)) for entry in store.list(""))
    assert b"hunter2" not in stored
    assert "hunter2" not in repr(spec)
    assert read_json(store, "r/run.json")["placements"][0]["env"] == ["TOKEN"]
    assert read_json(store, "r/run.json")["placements"][0]["secrets"] == ["KEY"]


def test_a_taken_run_id_is_an_error_that_explains_how_to_attach_and_changes_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    create_run(store, "mine", add, {"a": 1}, 1, backend="local")
    before = {entry.key: bytes(store.get(entry.key)) for entry in store.list("")}
    address = f"{store.url}/mine"  # this machine does not know the run by its id
    said = f"exists at {store.url}. Look at it with executors.attach('{address}') or `replicas status {address}`"
    with pytest.raises(RunExistsError, match=re.escape(said)):
        create_run(store, "mine", add, {"a": 2}, 1, backend="local")
    assert {entry.key: bytes(store.get(entry.key)) for entry in store.list("")} == before


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("verb", "key", "fault"),
    [
        ("put", "*/callable.pkl", {"action": "error"}),
        ("put", "*/task.json", {"action": "lost"}),
        ("put", "*/task.json", {"before": interrupt}),
        ("put_if_absent", "*/run.json", {"action": "lost"}),
        ("put_if_absent", "*/run.json", {"after": interrupt}),
    ],
)
def test_a_run_whose_task_could_not_be_written_does_not_exist(verb: Any, key: str, fault: dict[str, Any]) -> None:
    store = FaultyStore(MemoryStore(), seed=0)
    store.fail_at(verb, key=key, **fault)
    with pytest.raises((StoreError, KeyboardInterrupt)):
        create_run(store, "r", add, {"a": 1}, 1, backend="local")
    assert not list(store.list(""))


def test_a_launch_whose_answer_was_lost_takes_back_no_run_of_another() -> None:
    inner = MemoryStore()
    create_run(inner, "r", add, {"a": 1}, 1, backend="local")
    before = {entry.key: bytes(inner.get(entry.key)) for entry in inner.list("")}
    store = FaultyStore(inner, seed=0)
    store.fail_at("put_if_absent", key="*/run.json", action="lost")
    with pytest.raises(StoreError, match="its reply was lost"):
        create_run(store, "r", add, {"a": 2}, 1, backend="local")
    assert {entry.key: bytes(inner.get(entry.key)) for entry in inner.list("")} == before


@pytest.mark.parametrize("run_id", ["", "-a", "A", "a b", "a/b", "a.b", "a" * 41, "ä"])
def test_a_run_id_that_is_not_a_legal_name_on_every_service_is_refused(run_id: str) -> None:
    with pytest.raises(ValueError, match="Bad run id"):
        check_run_id(run_id)


def test_generated_run_ids_are_good_ones() -> None:
    for _ in range(200):
        check_run_id(new_run_id())


def test_arguments_that_are_no_json_are_refused_for_an_entrypoint_given_by_name() -> None:
    store = MemoryStore()
    with pytest.raises(EntrypointArgumentsError, match="are sent as JSON"):
        create_run(store, "r", "mod:f", {"a": object()}, 1, backend="local")
    assert not list(store.list(""))


def test_a_callable_that_does_not_take_the_arguments_is_refused_before_anything_is_written() -> None:
    store = MemoryStore()
    with pytest.raises(EntrypointArgumentsError, match=r"missing a required argument: 'a'.*signature is .a: "):
        create_run(store, "r", add, {}, 1, backend="local")
    with pytest.raises(TypeError):
        create_run(store, "r", add, {"c": 1}, 1, backend="local")
    assert not list(store.list(""))


def test_an_object_that_cannot_be_pickled_is_refused_by_name_with_the_remedy() -> None:
    lock = threading.Lock()
    with pytest.raises(EntrypointError, match=r"cannot be pickled.*train\.py:main"):
        create_run(MemoryStore(), "r", lambda: lock, {}, 1, backend="local")


def test_a_task_that_was_changed_in_the_store_is_not_run() -> None:
    store = MemoryStore()
    spec = create_run(store, "r", add, {"a": 1}, 1, backend="local")
    record = read_json(store, "r/task/task.json")
    store.put("r/task/task.json", to_bytes({**record, "seed": 3}))
    with pytest.raises(StoreError, match="is not what was launched"):
        read_task(store, "r", spec.task_digest).load(ME)


def test_a_pickle_that_was_changed_in_the_store_is_not_unpickled() -> None:
    store = MemoryStore()
    spec = create_run(store, "r", add, {"a": 1}, 1, backend="local")
    store.put("r/task/callable.pkl", b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(StoreError, match=r"callable\.pkl.* is not what was launched"):
        read_task(store, "r", spec.task_digest).load(ME)


def test_readings_that_fail_or_differ_from_the_launch_are_tried_again() -> None:
    inner = MemoryStore()
    spec = create_run(inner, "r", add, {"a": 1}, 1, backend="local")
    store = FaultyStore(inner, seed=0)
    store.fail_at("get", key="*/task.json", action="error")
    store.fail_at("get", key="*/callable.pkl", action="lost")
    cutting = FaultyStore(store, seed=1, truncate=0.4)
    function, args = read_task(cutting, "r", spec.task_digest).load(ME)
    assert function(**args) == 2
    assert len(store.log) == 2
    assert [line for line in cutting.log if "cut from" in line]


def test_a_pickle_of_another_python_is_refused_by_name_before_unpickling() -> None:
    store = MemoryStore()
    create_run(store, "r", add, {"a": 1}, 1, backend="local")
    record: dict[str, Any] = read_json(store, "r/task/task.json")
    task = to_bytes({**record, "python": "3.9"})
    store.put("r/task/task.json", task)
    store.put("r/task/callable.pkl", b"not a pickle")
    with pytest.raises(EntrypointError) as caught:
        read_task(store, "r", hashlib.sha256(task).hexdigest()).load(ME)
    assert str(caught.value).startswith("The callable was pickled by Python 3.9, this replica runs 3.")
    assert str(caught.value).endswith("Use the same version, or an importable entrypoint.")


def test_run_json_has_the_user_the_entrypoint_and_the_time() -> None:
    store = MemoryStore()
    create_run(store, "r", add, {"a": 1}, 3, backend="local")
    record = json.loads(bytes(store.get("r/run.json")))
    assert record["settings"]["n"] == 3
    assert record["entrypoint"].endswith("test_task.add")
    assert {"created_at", "created_by", "placements", "cwd", "python"} <= set(record)
