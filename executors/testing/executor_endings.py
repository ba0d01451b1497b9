"""How replicas end, and what an executor has to tell of it: the part of `ExecutorContract` where things go wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from executors.errors import UnknownHandleError
from executors.protocol import ReplicaHandle, ServerlessExecutor
from executors.testing.waiting import eventually

TERMINAL = ("succeeded", "failed", "cancelled")


def task(name: str) -> str:
    """Name an entrypoint of the contract."""
    return f"executors.testing.tasks:{name}"


def statuses(executor: ServerlessExecutor, handles: Sequence[Any]) -> list[str]:
    return [str(executor.poll(handle)) for handle in handles]


def started(executor: ServerlessExecutor, handles: Sequence[Any], within_s: float) -> None:
    """Wait until replicas that hang have said so."""
    for handle in handles:
        eventually(lambda handle=handle: "hanging" in executor.stream_logs(handle), within_s=within_s)  # type: ignore[misc]


class ExecutorEndings:
    """Failures, limits, cancellation, and mistakes of the caller."""

    patience_s: ClassVar[float] = 60.0
    """How long a replica may take to start or to end."""

    def kill(self, executor: ServerlessExecutor, handle: Any) -> None:
        """End a replica behind the executor's back, as an eviction or `kill -9` does."""
        pytest.skip("no way is given to kill a replica behind this executor's back")

    def never_launched(self, handle: Any) -> Any:
        """Return a handle like this one, of a replica that never was."""
        if not isinstance(handle, ReplicaHandle):
            pytest.skip("no way is given to make a handle of a replica that never was")
        return dataclasses.replace(handle, metadata={**handle.metadata, "run_id": "never-was"})

    def collected(self, executor: ServerlessExecutor, handles: Sequence[Any]) -> list[dict[str, Any]]:
        """Wait for the end of replicas, and no longer than patience allows."""
        rows = executor.collect(list(handles), timeout=int(self.patience_s))
        assert [row["status"] for row in rows if row["status"] not in TERMINAL] == [], "not ended in time"
        return rows

    def cancelled(self, executor: ServerlessExecutor, handles: Sequence[Any]) -> list[dict[str, Any]]:
        """Cancel replicas and see that they are."""
        for handle in handles:
            executor.cancel(handle)
        rows = self.collected(executor, handles)
        assert [(row["status"], row["reason"]) for row in rows] == [("cancelled", "cancelled")] * len(rows)
        assert [row["result"] for row in rows] == [None] * len(rows)
        return rows

    # --- failures

    def test_an_exception_is_a_failure_with_its_traceback(self, executor: ServerlessExecutor) -> None:
        rows = self.collected(executor, executor.launch_replicas(2, task("fail"), {"message": "no luck, ä"}))
        for rank, row in enumerate(rows):
            assert (row["status"], row["reason"], row["result"]) == ("failed", "exception", None)
            assert f"RuntimeError: rank {rank}: no luck, ä" in row["error"]
            assert "tasks.py" in row["error"], "the traceback names the user's file"
            assert row["exit_code"] not in (0, None)

    def test_one_failure_does_not_touch_the_others(self, executor: ServerlessExecutor) -> None:
        rows = self.collected(executor, executor.launch_replicas(3, task("fail_on"), {"rank": 1}))
        assert [(row["status"], row["result"]) for row in rows] == [
            ("succeeded", "fine"),
            ("failed", None),
            ("succeeded", "fine"),
        ]

    def test_a_result_that_is_no_json_is_a_failure_that_names_its_place(self, executor: ServerlessExecutor) -> None:
        (row,) = self.collected(executor, executor.launch_replicas(1, task("no_json"), {}))
        assert (row["status"], row["reason"], row["result"]) == ("failed", "result_not_serializable", None)
        assert "result['loss'][3]" in row["error"]
        assert "save_artifact" in row["error"]

    @pytest.mark.parametrize("how", ["sys", "os"])
    @pytest.mark.parametrize("code", [0, 3])
    def test_leaving_without_a_result_is_a_failure_that_keeps_the_code(
        self, executor: ServerlessExecutor, code: int, how: str
    ) -> None:
        (row,) = self.collected(executor, executor.launch_replicas(1, task("leave"), {"code": code, "how": how}))
        assert (row["status"], row["reason"], row["result"]) == ("failed", "no_result", None)
        assert row["exit_code"] == code
        assert row["error"]

    def test_a_replica_killed_from_outside_is_reported(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(2, task("hang"), {})
        started(executor, handles, self.patience_s)
        self.kill(executor, handles[1])
        eventually(lambda: executor.poll(handles[1]) in TERMINAL, within_s=self.patience_s)
        (row,) = self.collected(executor, [handles[1]])
        assert row["status"] == "failed"
        assert row["reason"] in ("signal", "lost", "preempted", "oom")
        assert row["error"]
        assert executor.poll(handles[0]) == "running"
        self.cancelled(executor, [handles[0]])

    # --- limits

    def test_a_time_limit_is_enforced(self, executor: ServerlessExecutor) -> None:
        (row,) = self.collected(executor, executor.launch_replicas(1, task("hang"), {}, timeout=1))
        assert (row["status"], row["reason"], row["result"]) == ("failed", "timeout", None)
        assert row["error"]

    def test_a_time_limit_is_enforced_against_a_replica_deaf_to_sigterm(self, executor: ServerlessExecutor) -> None:
        (row,) = self.collected(executor, executor.launch_replicas(1, task("hang_deaf"), {}, timeout=1))
        assert (row["status"], row["reason"]) == ("failed", "timeout")

    def test_a_time_limit_does_not_touch_who_is_done(self, executor: ServerlessExecutor) -> None:
        rows = self.collected(executor, executor.launch_replicas(2, task("hang_on"), {"rank": 1}, timeout=4))
        assert [(row["status"], row["reason"]) for row in rows] == [("succeeded", None), ("failed", "timeout")]

    @pytest.mark.parametrize("timeout", [0, 1])
    def test_collects_own_time_limit_ends_nothing(self, executor: ServerlessExecutor, timeout: int) -> None:
        handles = executor.launch_replicas(2, task("hang_on"), {"rank": 1})
        started(executor, handles[1:], self.patience_s)
        eventually(lambda: executor.poll(handles[0]) == "succeeded", within_s=self.patience_s)
        rows = executor.collect(handles, timeout=timeout)
        assert [row["status"] for row in rows] == ["succeeded", "running"]
        assert [(row["result"], row["reason"]) for row in rows] == [("done", None), (None, None)]
        assert executor.poll(handles[1]) == "running"
        self.cancelled(executor, handles[1:])

    # --- cancelling

    def test_what_is_cancelled_stays_cancelled(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(2, task("hang"), {})
        started(executor, handles, self.patience_s)
        rows = self.cancelled(executor, handles)
        assert statuses(executor, handles) == ["cancelled", "cancelled"]
        assert self.collected(executor, handles) == rows

    def test_cancelling_one_leaves_the_others(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(2, task("hang"), {})
        started(executor, handles, self.patience_s)
        self.cancelled(executor, handles[:1])
        assert executor.poll(handles[1]) == "running"
        self.cancelled(executor, handles[1:])

    def test_cancelling_again_is_no_error(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(1, task("hang"), {})
        rows = self.cancelled(executor, handles)
        assert self.cancelled(executor, handles) == rows

    def test_cancelling_at_once_leaves_nothing_running(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(3, task("hang"), {})
        self.cancelled(executor, handles)

    def test_a_replica_deaf_to_sigterm_is_cancelled_all_the_same(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(1, task("hang_deaf"), {})
        started(executor, handles, self.patience_s)
        self.cancelled(executor, handles)

    @pytest.mark.parametrize("name", ["echo", "fail"])
    def test_cancelling_who_has_ended_changes_nothing(self, executor: ServerlessExecutor, name: str) -> None:
        handles = executor.launch_replicas(1, task(name), {"message": "x"} if name == "fail" else {})
        rows = self.collected(executor, handles)
        executor.cancel(handles[0])
        assert self.collected(executor, handles) == rows
        assert statuses(executor, handles) == [rows[0]["status"]]

    # --- mistakes of the caller

    def test_a_handle_that_was_never_launched_is_unknown_to_every_verb(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(1, task("echo"), {})
        self.collected(executor, handles)
        stranger = self.never_launched(handles[0])
        for ask in (executor.poll, executor.stream_logs, executor.cancel, lambda handle: executor.collect([handle])):
            with pytest.raises((UnknownHandleError, LookupError)):
                ask(stranger)

    @pytest.mark.parametrize("n", [0, -1])
    def test_less_than_one_replica_is_refused(self, executor: ServerlessExecutor, n: int) -> None:
        with pytest.raises(ValueError, match=str(n)):
            executor.launch_replicas(n, task("echo"), {})

    @pytest.mark.parametrize(
        "entrypoint", ["executors.testing.tasks:no_such", "no_such_module_at_all:f", "no_such.py:f"]
    )
    def test_an_entrypoint_that_is_not_there_is_refused_by_name(
        self, executor: ServerlessExecutor, entrypoint: str
    ) -> None:
        with pytest.raises(Exception, match="no_such"):
            executor.launch_replicas(1, entrypoint, {})

    @pytest.mark.parametrize("args", [{}, {"needed": 1, "unknown": 2}])
    def test_arguments_that_do_not_fit_are_refused_before_anything_starts(
        self, executor: ServerlessExecutor, args: dict[str, int]
    ) -> None:
        with pytest.raises(TypeError, match="unknown" if args else "needed"):
            executor.launch_replicas(1, task("not_callable_with_these"), args)

    def test_arguments_that_cannot_travel_are_refused(self, executor: ServerlessExecutor) -> None:
        with pytest.raises(TypeError):
            executor.launch_replicas(1, task("echo"), {"thing": object()})
