"""The inline executor keeps the contract of an executor, except for tests of processes and several replicas."""

from __future__ import annotations

from typing import ClassVar

import pytest

from executors import InlineExecutor, ReplicaHandle, ServerlessExecutor
from executors.testing import ExecutorContract
from executors.testing.executor_contract import task

ONE = "one process is one replica"
NO_LIMIT = "no process ends the caller's own process at its time limit"
TERMINAL = "its output goes where the process prints"


class TestInlineExecutor(ExecutorContract):
    expected_failures: ClassVar[dict[str, str]] = {
        "test_handles_come_back_in_rank_order_and_are_plain_json": ONE,
        "test_every_rank_calls_the_entrypoint_once_with_the_arguments": ONE,
        "test_a_function_is_an_entrypoint_as_well": ONE,
        "test_the_rank_can_have_one_more_variable": ONE,
        "test_rows_come_in_the_order_of_the_handles_given": ONE,
        "test_two_launches_of_one_executor_stay_apart": ONE,
        "test_one_failure_leaves_the_other_and_polling_cancelling_and_collecting_again_change_nothing": ONE,
        "test_another_process_can_use_the_handles": ONE,
        "test_a_status_is_one_of_five_words_and_running_while_a_replica_runs": ONE,
        "test_logs_have_both_streams_in_the_order_written_and_end_with_the_last_lines": TERMINAL,
        "test_a_replica_killed_from_outside_is_reported": ONE,
        "test_a_time_limit_is_enforced": NO_LIMIT,
        "test_a_time_limit_does_not_change_a_replica_that_has_ended": ONE,
        "test_a_time_limit_is_enforced_against_a_replica_deaf_to_sigterm": NO_LIMIT,
        "test_collects_own_time_limit_ends_nothing": ONE,
        "test_a_cancelled_replica_stays_cancelled_and_the_others_continue": ONE,
        "test_cancelling_at_once_leaves_nothing_running": ONE,
        "test_it_works_in_launch": ONE,
    }

    @pytest.fixture
    def executor(self) -> ServerlessExecutor:
        return InlineExecutor()

    def test_a_replica_that_ignores_sigterm_can_still_be_cancelled(self, executor: ServerlessExecutor) -> None:
        pytest.skip("the launch of this backend returns only when the replica has ended")

    def test_an_exit_without_a_result_is_a_failure_with_the_exit_code(self, executor: ServerlessExecutor) -> None:
        (row,) = self.collected(executor, executor.launch_replicas(1, task("leave"), {"code": 3, "how": "sys"}))
        assert (row["status"], row["reason"], row["exit_code"]) == ("failed", "no_result", 3)

    def test_its_one_replica_has_a_handle_that_is_plain_json(self, executor: ServerlessExecutor) -> None:
        (handle,) = executor.launch_replicas(1, task("echo"), {"a": [1, "ä"], "rank_env": "MY_RANK"})
        assert ReplicaHandle.from_json(handle.to_json()) == handle
        (row,) = self.collected(InlineExecutor(), [handle])
        assert (row["status"], row["result"]) == ("succeeded", {"rank": 0, "args": {"a": [1, "ä"]}})

    def test_an_exception_is_an_outcome_with_its_traceback(self, executor: ServerlessExecutor) -> None:
        (row,) = self.collected(executor, executor.launch_replicas(1, task("fail"), {"message": "no luck, ä"}))
        assert (row["status"], row["reason"]) == ("failed", "exception")
        assert "RuntimeError: rank 0: no luck, ä" in row["error"]
