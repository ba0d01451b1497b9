"""ExecutorContract: tests that every executor must pass. Subclass it, supply an `executor`, and inherit the tests.

    class TestMyExecutor(ExecutorContract):
        @pytest.fixture
        def executor(self):
            return MyExecutor()

The tests use only the five methods and the two attributes of `ServerlessExecutor`. Some tests need an action that only
the backend can do, such as an eviction. Each such action is a method to override, and without it the test is skipped.
Name tests that are known to fail in `expected_failures`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest

from executors.errors import UnknownHandleError
from executors.launcher import launch
from executors.protocol import ReplicaHandle, ReplicaStatus, ServerlessExecutor
from executors.testing.helpers import JobCleanup, KnownGaps, eventually

ROW = {"rank", "status", "exit_code", "error", "result", "reason"}
# The number of replicas, the seconds for which they are watched, and the largest number of requests in that time: about
# one each second.
MANY, WATCHED_S, MOST_LOOKS = 64, 10.0, 12
TERMINAL = ("succeeded", "failed", "cancelled")


def task(name: str) -> str:
    """Return the entrypoint of a function in `executors.testing.tasks`.

    Args:
        name: the name of the function.

    Example:
        task("echo")
    """
    return f"executors.testing.tasks:{name}"


def statuses(executor: ServerlessExecutor, handles: Sequence[Any]) -> list[str]:
    """Return the status of each replica.

    Args:
        executor: the executor.
        handles: the handles of the replicas.

    Example:
        statuses(executor, handles)  # ["succeeded", "running"]
    """
    return [str(executor.poll(handle)) for handle in handles]


def _skip_without_json(handles: Sequence[Any]) -> None:
    if not all(hasattr(handle, "to_json") for handle in handles):
        pytest.skip("the handles of this executor have no to_json()")


class ExecutorContract(KnownGaps, JobCleanup):
    """Tests of an executor whose replicas succeed, fail, hang or are cancelled.

    The class has more than 20 methods, because each promise of an executor is one test.

    Example:
        class TestMyExecutor(ExecutorContract):
            @pytest.fixture
            def executor(self):
                return MyExecutor()

            def test_a_crash_is_seen(self, executor):
                handles = self.launched(executor, 2, task("hang"), {})
                self.hanging(executor, handles)
                self.kill(executor, handles[0])  # or self.evict(executor, handles[0])
                self.collected(executor, handles[:1])
                self.cancelled(self.another(executor), handles[1:])
                assert self.requests(executor) > (0, 0)
                unknown, count = self.never_launched(handles[0]), self.lose_reply(executor)
    """

    takes_callables: ClassVar[bool] = True
    """True if the entrypoint may be a function. False if it must be a name."""
    reaches_local_store: ClassVar[bool] = True
    """True if its replicas see this machine's files, so that `launch()` can use a directory of this machine."""
    patience_s: ClassVar[float] = 60.0
    """The longest time in seconds that a replica may take to start or to end."""

    @pytest.fixture
    def executor(self) -> ServerlessExecutor:
        """The executor under test."""
        raise NotImplementedError("Supply an `executor` fixture.")

    @pytest.fixture(autouse=True)
    def _leaves_nothing(self, executor: ServerlessExecutor) -> Iterator[None]:
        yield
        self.run_cleanups()

    def launched(self, executor: ServerlessExecutor, n: int, *asked: Any, **more: Any) -> list[Any]:
        """Launch replicas, and return their handles. The replicas are cancelled when the test ends.

        Args:
            executor: the executor of the test.
            n: the number of replicas.
            asked: the other positional arguments of `launch_replicas`.
            more: the keyword arguments of `ServerlessExecutor.launch_replicas`.
        """
        handles: list[Any] = executor.launch_replicas(n, *asked, **more)
        for handle in handles:
            self.add_cleanup(partial(executor.cancel, handle))
        return handles

    def another(self, executor: ServerlessExecutor) -> ServerlessExecutor:
        """Return an executor as another process would make it. By default it is made without arguments.

        Args:
            executor: the executor of the test.
        """
        return type(executor)()

    def kill(self, executor: ServerlessExecutor, handle: Any) -> None:
        """Kill a replica without using the executor, as `kill -9` does. Override this method.

        Args:
            executor: the executor of the test.
            handle: the handle of the replica.
        """
        pytest.skip("the test class does not override kill()")

    def lose_reply(self, executor: ServerlessExecutor) -> Callable[[], int]:
        """Make the next start succeed at the service and lose its answer. Override this method.

        Returns: a function that returns the number of jobs that were started since this call.

        Args:
            executor: the executor of the test.
        """
        pytest.skip("the test class does not override lose_reply()")

    def evict(self, executor: ServerlessExecutor, handle: Any) -> None:
        """End a replica as a service that takes its machine back: with a signal and some seconds. Override this method.

        Args:
            executor: the executor of the test.
            handle: the handle of the replica.
        """
        pytest.skip("the test class does not override evict()")

    def requests(self, executor: ServerlessExecutor) -> tuple[int, int]:
        """Return the number of requests that started jobs, and of requests that read them. Override this method.

        The first call may also make jobs wait from now on, so that none of them ends during the test.

        Args:
            executor: the executor of the test.
        """
        pytest.skip("the test class does not override requests()")

    def never_launched(self, handle: Any) -> Any:
        """Return the handle of a replica that was never launched.

        Args:
            handle: the handle of a replica that was launched.
        """
        if not isinstance(handle, ReplicaHandle):
            pytest.skip("the test class does not override never_launched()")
        return dataclasses.replace(handle, metadata={**handle.metadata, "run_id": "never-was"})

    def hanging(self, executor: ServerlessExecutor, handles: Sequence[Any]) -> None:
        """Wait until each replica has printed "hanging".

        Args:
            executor: the executor of the test.
            handles: the handles of these replicas.
        """
        for handle in handles:
            eventually(lambda handle=handle: "hanging" in executor.stream_logs(handle), within_s=self.patience_s)  # type: ignore[misc]

    def collected(self, executor: ServerlessExecutor, handles: Sequence[Any]) -> list[dict[str, Any]]:
        """Wait for the end of replicas, and return a row for each. The test fails after `patience_s` seconds.

        Args:
            executor: the executor of the test.
            handles: the handles of the replicas.
        """
        rows = executor.collect(list(handles), timeout=int(self.patience_s))
        assert [row["status"] for row in rows if row["status"] not in TERMINAL] == [], "a replica has not ended in time"
        return rows

    def cancelled(self, executor: ServerlessExecutor, handles: Sequence[Any]) -> list[dict[str, Any]]:
        """Cancel replicas, check that each was cancelled, and return a row for each.

        Args:
            executor: the executor of the test.
            handles: the handles of the replicas.
        """
        for handle in handles:
            executor.cancel(handle)
        rows = self.collected(executor, handles)
        ends = [(row["status"], row["reason"], row["result"]) for row in rows]
        assert ends == [("cancelled", "cancelled", None)] * len(rows)
        return rows

    # --- shape

    def test_it_is_an_executor_without_inheriting(self, executor: ServerlessExecutor) -> None:
        assert isinstance(executor, ServerlessExecutor)
        assert isinstance(executor.backend_name, str)
        assert executor.backend_name
        assert isinstance(executor.supports_inter_replica_network, bool)

    def test_handles_come_back_in_rank_order_and_are_plain_json(self, executor: ServerlessExecutor) -> None:
        handles = self.launched(executor, 2, task("echo"), {"a": 1})
        assert [handle.rank for handle in handles] == [0, 1]
        self.collected(executor, handles)
        _skip_without_json(handles)
        for handle in handles:
            record = json.loads(handle.to_json())
            assert record["rank"] == handle.rank
            assert record["backend_name"] == handle.backend_name == executor.backend_name
            assert ReplicaHandle.from_json(handle.to_json()) == handle

    # --- results

    def test_every_rank_calls_the_entrypoint_once_with_the_arguments(self, executor: ServerlessExecutor) -> None:
        text = "ä 'quoted' \"twice\" \n $HOME 🦦"
        args = {"text": text, "number": -1.5, "none": None, "list": [1, [True, {}]], "d": {"k": 2}}
        rows = self.collected(executor, self.launched(executor, 3, task("echo"), args))
        assert [row["result"] for row in rows] == [{"rank": rank, "args": args} for rank in range(3)]
        for rank, row in enumerate(rows):
            assert row.keys() >= ROW
            assert (row["rank"], row["status"], row["error"], row["reason"]) == (rank, "succeeded", None, None)

    def test_a_function_is_an_entrypoint_as_well(self, executor: ServerlessExecutor) -> None:
        if not self.takes_callables:
            pytest.skip("this executor accepts only entrypoints that are given by name")
        captured = {"by": "value"}

        def entrypoint(base: int) -> dict[str, Any]:
            import os

            return {"rank": base + int(os.environ["REPLICA_RANK"]), **captured}

        rows = self.collected(executor, self.launched(executor, 2, entrypoint, {"base": 10}))
        assert [row["result"] for row in rows] == [{"rank": 10, "by": "value"}, {"rank": 11, "by": "value"}]

    def test_the_rank_can_have_one_more_variable(self, executor: ServerlessExecutor) -> None:
        names = ["REPLICA_RANK", "MY_RANK"]
        args = {"names": names, "rank_env": "MY_RANK"}
        rows = self.collected(executor, self.launched(executor, 2, task("variables"), args))
        assert args == {"names": names, "rank_env": "MY_RANK"}, "the launch does not change the caller's arguments"
        assert [row["result"] for row in rows] == [{name: str(rank) for name in names} for rank in range(2)]

    def test_a_result_of_16_megabytes_arrives(self, executor: ServerlessExecutor) -> None:
        (row,) = self.collected(executor, self.launched(executor, 1, task("large"), {"n_bytes": 16 << 20}))
        assert row["status"] == "succeeded"
        assert row["result"] == "x" * (16 << 20)

    def test_rows_come_in_the_order_of_the_handles_given(self, executor: ServerlessExecutor) -> None:
        assert executor.collect([]) == []
        handles = self.launched(executor, 2, task("echo"), {})
        rows = self.collected(executor, [handles[1], handles[0]])
        assert [(row["rank"], row["result"]["rank"]) for row in rows] == [(1, 1), (0, 0)]
        assert [row["rank"] for row in self.collected(executor, handles)] == [0, 1]

    def test_two_launches_of_one_executor_stay_apart(self, executor: ServerlessExecutor) -> None:
        first = self.launched(executor, 2, task("echo"), {"launch": 1})
        second = self.launched(executor, 2, task("echo"), {"launch": 2})
        assert [row["result"]["args"]["launch"] for row in self.collected(executor, second)] == [2, 2]
        assert [row["result"]["args"]["launch"] for row in self.collected(executor, first)] == [1, 1]

    def test_one_failure_leaves_the_other_and_polling_cancelling_and_collecting_again_change_nothing(
        self, executor: ServerlessExecutor
    ) -> None:
        handles = self.launched(executor, 2, task("fail_on"), {"rank": 1})
        for handle in handles:
            eventually(lambda handle=handle: executor.poll(handle) in TERMINAL, within_s=self.patience_s)  # type: ignore[misc]
        rows = self.collected(executor, handles)
        assert [(row["status"], row["result"]) for row in rows] == [("succeeded", "fine"), ("failed", None)]
        for handle in handles:
            executor.cancel(handle)
        assert self.collected(executor, handles) == rows
        assert statuses(executor, handles) == [row["status"] for row in rows]

    def test_another_process_can_use_the_handles(self, executor: ServerlessExecutor) -> None:
        handles = self.launched(executor, 2, task("hang_on"), {"rank": 1})
        _skip_without_json(handles)
        other = self.another(executor)
        copies = [ReplicaHandle.from_json(handle.to_json()) for handle in handles]
        self.hanging(other, copies[1:])
        eventually(lambda: other.poll(copies[0]) == "succeeded", within_s=self.patience_s)
        other.cancel(copies[1])
        rows = self.collected(other, copies)
        assert [(row["status"], row["result"]) for row in rows] == [("succeeded", "done"), ("cancelled", None)]
        assert self.collected(executor, handles) == rows

    # --- polling and logs

    def test_a_status_is_one_of_five_words_and_running_while_a_replica_runs(self, executor: ServerlessExecutor) -> None:
        handles = self.launched(executor, 2, task("hang_on"), {"rank": 1})
        seen = set()

        def ended() -> bool:
            status = executor.poll(handles[0])
            assert isinstance(status, str)
            seen.add(str(status))
            return status in TERMINAL

        eventually(ended, within_s=self.patience_s, every_s=0.001)
        assert "succeeded" in seen <= {str(status) for status in ReplicaStatus}
        self.hanging(executor, handles[1:])
        assert statuses(executor, handles) == ["succeeded", "running"]
        self.cancelled(executor, handles[1:])

    def test_logs_have_both_streams_in_the_order_written_and_end_with_the_last_lines(
        self, executor: ServerlessExecutor
    ) -> None:
        handles = self.launched(executor, 1, task("talk"), {"n_lines": 500})
        self.collected(executor, handles)
        assert executor.stream_logs(handles[0], n_lines=3).splitlines() == ["line 497", "line 498", "line 499"]
        assert executor.stream_logs(handles[0]).splitlines() == [f"line {number}" for number in range(300, 500)]

    # --- failures

    def test_an_exception_is_a_failure_with_its_traceback(self, executor: ServerlessExecutor) -> None:
        (row,) = self.collected(executor, self.launched(executor, 1, task("fail"), {"message": "no luck, ä"}))
        assert (row["status"], row["reason"], row["result"]) == ("failed", "exception", None)
        assert "RuntimeError: rank 0: no luck, ä" in row["error"]
        assert "tasks.py" in row["error"], "the traceback names the user's file"
        assert type(row["exit_code"]) is int and row["exit_code"] != 0  # noqa: PT018

    def test_a_result_that_is_not_json_is_a_failure_that_names_its_place(self, executor: ServerlessExecutor) -> None:
        (row,) = self.collected(executor, self.launched(executor, 1, task("no_json"), {}))
        assert (row["status"], row["reason"], row["result"]) == ("failed", "result_not_serializable", None)
        assert "result['loss'][3]" in row["error"]
        assert "save_artifact" in row["error"]

    def test_an_exit_without_a_result_is_a_failure_with_the_exit_code(self, executor: ServerlessExecutor) -> None:
        ways: list[dict[str, Any]] = [{"code": 3, "how": "sys"}, {"code": 0, "how": "os"}, {"code": 3, "how": "os"}]
        launched = [self.launched(executor, 1, task("leave"), way) for way in ways]
        for way, handles in zip(ways, launched, strict=True):
            (row,) = self.collected(executor, handles)
            assert (row["status"], row["reason"], row["result"]) == ("failed", "no_result", None), way
            assert row["exit_code"] == way["code"], way
            assert row["error"], way

    def test_leaving_by_sys_exit_without_an_error_is_a_success(self, executor: ServerlessExecutor) -> None:
        for code in (0, None):
            (row,) = self.collected(executor, self.launched(executor, 1, task("leave"), {"code": code, "how": "sys"}))
            assert (row["status"], row["reason"], row["result"], row["error"]) == ("succeeded", None, None, None), code

    def test_a_replica_killed_from_outside_is_reported(self, executor: ServerlessExecutor) -> None:
        handles = self.launched(executor, 2, task("hang"), {})
        self.hanging(executor, handles)
        self.kill(executor, handles[1])
        eventually(lambda: executor.poll(handles[1]) in TERMINAL, within_s=self.patience_s)
        (row,) = self.collected(executor, [handles[1]])
        assert row["status"] == "failed"
        assert row["reason"] in ("signal", "lost", "preempted", "oom")
        assert row["error"]
        assert executor.poll(handles[0]) == "running"
        self.cancelled(executor, [handles[0]])

    def test_a_start_whose_answer_is_lost_is_found_and_not_done_twice(self, executor: ServerlessExecutor) -> None:
        count = self.lose_reply(executor)
        rows = self.collected(executor, self.launched(executor, 2, task("echo"), {}))
        assert [row["result"]["rank"] for row in rows] == [0, 1]
        assert count() == 2

    def test_an_eviction_is_preempted_in_status_and_in_the_decision(self, executor: ServerlessExecutor) -> None:
        if type(self).evict is ExecutorContract.evict:
            self.evict(executor, None)  # skips the test before a replica is started
        hurried = {"REPLICA_NOTICE_S": "0.1"}  # a short time to end, so that the test is fast
        over = launch(executor, task("hang"), 1, env=hurried)
        self.add_cleanup(over.cancel)
        kept = launch(executor, task("hang"), 1, env=hurried, restarts="0,backoff=0s")
        self.add_cleanup(kept.cancel)
        for run in (over, kept):
            self.hanging(executor, run.handles)
            self.evict(executor, run.handles[0])
        assert over.wait(self.patience_s)
        assert [outcome.reason for outcome in over.outcomes()] == ["preempted"]
        eventually(lambda: kept.wait(0.1) or kept.status().replicas[0].attempt == 1, within_s=self.patience_s)
        assert kept.status().restarts_by_reason == {"preempted": 1}

    def test_many_replicas_are_started_and_watched_by_few_requests(self, executor: ServerlessExecutor) -> None:
        n_starts, n_looks = self.requests(executor)
        handles = self.launched(executor, MANY, task("hang"), {})
        until = time.monotonic() + WATCHED_S
        while time.monotonic() < until:
            assert "succeeded" not in statuses(executor, handles)
        starts, looks = self.requests(executor)
        assert starts - n_starts == 1
        assert looks - n_looks <= MOST_LOOKS
        self.cancelled(executor, handles)

    # --- limits

    def test_a_time_limit_is_enforced(self, executor: ServerlessExecutor) -> None:
        (row,) = self.collected(executor, self.launched(executor, 1, task("hang"), {}, timeout=1))
        assert (row["status"], row["reason"], row["result"]) == ("failed", "timeout", None)
        assert row["error"]

    def test_a_time_limit_does_not_change_a_replica_that_has_ended(self, executor: ServerlessExecutor) -> None:
        for timeout in (4, 60):  # on a busy machine, even a task that returns at once may need more than 4 s
            rows = self.collected(executor, self.launched(executor, 2, task("hang_on"), {"rank": 1}, timeout=timeout))
            if rows[0]["status"] == "succeeded":
                break
        assert [(row["status"], row["reason"]) for row in rows] == [("succeeded", None), ("failed", "timeout")]

    def test_a_time_limit_is_enforced_against_a_replica_deaf_to_sigterm(self, executor: ServerlessExecutor) -> None:
        (row,) = self.collected(executor, self.launched(executor, 1, task("hang_deaf"), {}, timeout=1))
        assert (row["status"], row["reason"]) == ("failed", "timeout")

    def test_collects_own_time_limit_ends_nothing(self, executor: ServerlessExecutor) -> None:
        handles = self.launched(executor, 2, task("hang_on"), {"rank": 1})
        self.hanging(executor, handles[1:])
        eventually(lambda: executor.poll(handles[0]) == "succeeded", within_s=self.patience_s)
        for timeout in (0, 1):
            rows = executor.collect(handles, timeout=timeout)
            assert [row["status"] for row in rows] == ["succeeded", "running"]
            assert [(row["result"], row["reason"]) for row in rows] == [("done", None), (None, None)]
            assert executor.poll(handles[1]) == "running"
        self.cancelled(executor, handles[1:])

    # --- cancelling

    def test_a_cancelled_replica_stays_cancelled_and_the_others_continue(self, executor: ServerlessExecutor) -> None:
        handles = self.launched(executor, 2, task("hang"), {})
        self.hanging(executor, handles)
        self.cancelled(executor, handles[:1])
        assert executor.poll(handles[1]) == "running"
        rows = self.cancelled(executor, handles)
        assert statuses(executor, handles) == ["cancelled", "cancelled"]
        assert self.cancelled(executor, handles) == rows, "cancelling again changes nothing"
        assert "hanging" in executor.stream_logs(handles[0]), "the log of a cancelled replica can still be read"

    def test_cancelling_at_once_leaves_nothing_running(self, executor: ServerlessExecutor) -> None:
        handles = self.launched(executor, 2, task("hang"), {})
        self.cancelled(executor, handles)

    def test_a_replica_that_ignores_sigterm_can_still_be_cancelled(self, executor: ServerlessExecutor) -> None:
        handles = self.launched(executor, 1, task("hang_deaf"), {})
        self.hanging(executor, handles)
        self.cancelled(executor, handles)

    # --- mistakes of the caller

    def test_a_handle_that_was_never_launched_is_unknown_to_every_verb(self, executor: ServerlessExecutor) -> None:
        handles = self.launched(executor, 1, task("echo"), {})
        self.collected(executor, handles)
        unknown = self.never_launched(handles[0])
        for ask in (executor.poll, executor.stream_logs, executor.cancel, lambda handle: executor.collect([handle])):
            with pytest.raises((UnknownHandleError, LookupError)):
                ask(unknown)

    def test_less_than_one_replica_is_refused(self, executor: ServerlessExecutor) -> None:
        for n in (0, -1):
            with pytest.raises(ValueError, match=str(n)):
                self.launched(executor, n, task("echo"), {})

    def test_an_entrypoint_that_does_not_exist_is_refused_by_name(self, executor: ServerlessExecutor) -> None:
        for entrypoint in ("executors.testing.tasks:no_such", "no_such_module_at_all:f", "no_such.py:f"):
            with pytest.raises(Exception, match="no_such"):
                self.launched(executor, 1, entrypoint, {})

    def test_arguments_that_do_not_fit_are_refused_before_anything_starts(self, executor: ServerlessExecutor) -> None:
        for args, name in (({}, "needed"), ({"needed": 1, "unknown": 2}, "unknown")):
            with pytest.raises(TypeError, match=name):
                self.launched(executor, 1, task("not_callable_with_these"), args)

    def test_arguments_that_cannot_be_sent_are_refused(self, executor: ServerlessExecutor) -> None:
        with pytest.raises(TypeError):
            self.launched(executor, 1, task("echo"), {"thing": object()})

    # --- in launch()

    def test_it_works_in_launch(self, executor: ServerlessExecutor) -> None:
        if not self.reaches_local_store:
            pytest.skip("the replicas of this executor do not see the files of this machine")
        run = launch(executor, task("echo"), 2, args={"a": [1, "ä"]})
        self.add_cleanup(run.cancel)
        assert run.results() == [{"rank": rank, "args": {"a": [1, "ä"]}} for rank in range(2)]
        assert [outcome.status for outcome in run.outcomes()] == ["succeeded", "succeeded"]
