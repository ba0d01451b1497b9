"""What every executor has to keep. Subclass it, supply `executor`, and inherit the tests.

    class TestMyExecutor(ExecutorContract):
        @pytest.fixture
        def executor(self):
            return MyExecutor()

Nothing but the five verbs and two attributes is asked of it. What only the backend can do is a hook, and a test that
needs a hook which is not there is skipped. Known gaps go to `expected_failures`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from executors.protocol import ReplicaHandle, ReplicaStatus, ServerlessExecutor
from executors.testing.executor_endings import TERMINAL, ExecutorEndings, started, statuses, task
from executors.testing.known_gaps import KnownGaps
from executors.testing.waiting import eventually

ROW = {"rank", "status", "exit_code", "error", "result", "reason"}


class ExecutorContract(ExecutorEndings, KnownGaps):
    """What one user of an executor sees while all goes well; `ExecutorEndings` has the rest."""

    takes_callables: ClassVar[bool] = True
    """Whether the entrypoint may be a function."""
    reaches_local_store: ClassVar[bool] = True
    """Whether its replicas see this machine's files, so that `launch()` can use a directory here."""

    @pytest.fixture
    def executor(self) -> ServerlessExecutor:
        """The executor under test."""
        raise NotImplementedError("Supply an `executor` fixture.")

    def another(self, executor: ServerlessExecutor) -> ServerlessExecutor:
        """Return an executor as another process would make it: default-constructed."""
        return type(executor)()

    # --- shape

    def test_it_is_an_executor_without_inheriting(self, executor: ServerlessExecutor) -> None:
        assert isinstance(executor, ServerlessExecutor)
        assert isinstance(executor.backend_name, str)
        assert executor.backend_name
        assert isinstance(executor.supports_inter_replica_network, bool)

    def test_handles_come_back_in_rank_order(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(3, task("echo"), {})
        assert [handle.rank for handle in handles] == [0, 1, 2]
        self.collected(executor, handles)

    def test_handles_are_plain_json(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(2, task("echo"), {"a": 1})
        _skip_without_json(handles)
        for handle in handles:
            record = json.loads(handle.to_json())
            assert record["rank"] == handle.rank
            assert record["backend_name"] == handle.backend_name == executor.backend_name
            assert ReplicaHandle.from_json(handle.to_json()) == handle
        self.collected(executor, handles)

    # --- results

    def test_every_rank_calls_the_entrypoint_once_with_the_arguments(self, executor: ServerlessExecutor) -> None:
        args = {
            "text": "ä 'quoted' \"twice\" \n $HOME 🦦",
            "number": -1.5,
            "none": None,
            "list": [1, [True, {}]],
            "d": {"k": 2},
        }
        rows = self.collected(executor, executor.launch_replicas(3, task("echo"), args))
        assert [row["result"] for row in rows] == [{"rank": rank, "args": args} for rank in range(3)]

    def test_a_row_has_all_that_is_known(self, executor: ServerlessExecutor) -> None:
        (row,) = self.collected(executor, executor.launch_replicas(1, task("echo"), {}))
        assert row.keys() >= ROW
        assert (row["rank"], row["status"], row["error"], row["reason"]) == (0, "succeeded", None, None)

    def test_a_function_is_an_entrypoint_as_well(self, executor: ServerlessExecutor) -> None:
        if not self.takes_callables:
            pytest.skip("this executor takes names only")
        captured = {"by": "value"}

        def entrypoint(base: int) -> dict[str, Any]:
            import os

            return {"rank": base + int(os.environ["REPLICA_RANK"]), **captured}

        rows = self.collected(executor, executor.launch_replicas(2, entrypoint, {"base": 10}))
        assert [row["result"] for row in rows] == [{"rank": 10, "by": "value"}, {"rank": 11, "by": "value"}]

    def test_the_rank_can_have_one_more_variable(self, executor: ServerlessExecutor) -> None:
        names = ["REPLICA_RANK", "MY_RANK"]
        handles = executor.launch_replicas(2, task("variables"), {"names": names, "rank_env": "MY_RANK"})
        rows = self.collected(executor, handles)
        assert [row["result"] for row in rows] == [{name: str(rank) for name in names} for rank in range(2)]

    def test_the_callers_arguments_are_left_as_they_were(self, executor: ServerlessExecutor) -> None:
        args: dict[str, Any] = {"names": ["REPLICA_RANK"], "rank_env": "MY_RANK"}
        self.collected(executor, executor.launch_replicas(1, task("variables"), args))
        assert args == {"names": ["REPLICA_RANK"], "rank_env": "MY_RANK"}

    def test_a_result_of_16_megabytes_arrives(self, executor: ServerlessExecutor) -> None:
        (row,) = self.collected(executor, executor.launch_replicas(1, task("large"), {"n_bytes": 16 << 20}))
        assert row["status"] == "succeeded"
        assert row["result"] == "x" * (16 << 20)

    def test_rows_come_in_the_order_of_the_handles_given(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(3, task("echo"), {})
        rows = self.collected(executor, [handles[2], handles[0]])
        assert [(row["rank"], row["result"]["rank"]) for row in rows] == [(2, 2), (0, 0)]
        assert [row["rank"] for row in self.collected(executor, handles)] == [0, 1, 2]

    def test_collecting_nothing_is_nothing(self, executor: ServerlessExecutor) -> None:
        assert executor.collect([]) == []

    def test_two_launches_of_one_executor_stay_apart(self, executor: ServerlessExecutor) -> None:
        first = executor.launch_replicas(2, task("echo"), {"launch": 1})
        second = executor.launch_replicas(2, task("echo"), {"launch": 2})
        assert [row["result"]["args"]["launch"] for row in self.collected(executor, second)] == [2, 2]
        assert [row["result"]["args"]["launch"] for row in self.collected(executor, first)] == [1, 1]

    def test_collecting_after_polling_still_has_the_result(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(2, task("echo"), {})
        for handle in handles:
            eventually(lambda handle=handle: executor.poll(handle) == "succeeded", within_s=self.patience_s)  # type: ignore[misc]
        assert [row["result"]["rank"] for row in self.collected(executor, handles)] == [0, 1]

    def test_collecting_twice_gives_the_same(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(2, task("fail_on"), {"rank": 1})
        rows = self.collected(executor, handles)
        assert self.collected(executor, handles) == rows
        assert statuses(executor, handles) == [row["status"] for row in rows] == ["succeeded", "failed"]

    def test_another_process_can_use_the_handles(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(2, task("hang_on"), {"rank": 1})
        _skip_without_json(handles)
        other = self.another(executor)
        copies = [ReplicaHandle.from_json(handle.to_json()) for handle in handles]
        eventually(lambda: "hanging" in other.stream_logs(copies[1]), within_s=self.patience_s)
        eventually(lambda: other.poll(copies[0]) == "succeeded", within_s=self.patience_s)
        other.cancel(copies[1])
        rows = self.collected(other, copies)
        assert [(row["status"], row["result"]) for row in rows] == [("succeeded", "done"), ("cancelled", None)]
        assert self.collected(executor, handles) == rows

    # --- polling and logs

    def test_a_replica_is_pending_or_running_until_it_ends(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(1, task("hang"), {})
        started(executor, handles, self.patience_s)
        assert statuses(executor, handles) == ["running"]
        self.cancelled(executor, handles)

    def test_a_status_is_one_of_five_words(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(1, task("echo"), {})
        seen = set()

        def ended() -> bool:
            status = executor.poll(handles[0])
            assert isinstance(status, str)
            seen.add(str(status))
            return status in TERMINAL

        eventually(ended, within_s=self.patience_s, every_s=0.001)
        assert seen <= {str(status) for status in ReplicaStatus}
        assert "succeeded" in seen

    def test_logs_have_both_streams_in_the_order_written(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(2, task("talk"), {"n_lines": 30})
        self.collected(executor, handles)
        for handle in handles:
            lines = [line for line in executor.stream_logs(handle).splitlines() if line.startswith("line ")]
            assert lines == [f"line {number}" for number in range(30)]

    def test_logs_end_with_the_last_lines(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(1, task("talk"), {"n_lines": 500})
        self.collected(executor, handles)
        assert executor.stream_logs(handles[0], n_lines=3).splitlines() == ["line 497", "line 498", "line 499"]
        assert len(executor.stream_logs(handles[0]).splitlines()) == 200

    def test_logs_can_be_read_while_a_replica_runs(self, executor: ServerlessExecutor) -> None:
        handles = executor.launch_replicas(1, task("hang"), {})
        eventually(lambda: "hanging" in executor.stream_logs(handles[0]), within_s=self.patience_s)
        self.cancelled(executor, handles)
        assert "hanging" in executor.stream_logs(handles[0]), "and after it was cancelled"

    # --- in launch()

    def test_it_works_in_launch(self, executor: ServerlessExecutor) -> None:
        if not self.reaches_local_store:
            pytest.skip("its replicas do not see this machine's files")
        from executors import launch

        run = launch(executor, task("echo"), 2, args={"a": [1, "ä"]})
        assert run.results() == [{"rank": rank, "args": {"a": [1, "ä"]}} for rank in range(2)]
        assert [outcome.status for outcome in run.outcomes()] == ["succeeded", "succeeded"]


def _skip_without_json(handles: Sequence[Any]) -> None:
    if not all(hasattr(handle, "to_json") for handle in handles):
        pytest.skip("its handles are objects of its own")
