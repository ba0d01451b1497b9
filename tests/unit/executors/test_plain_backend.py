"""The backend of an executor with five verbs: the answers that it gives, and the abilities that it passes on."""

from __future__ import annotations

from typing import Any, cast

import pytest
from support.third_party import PopenExecutor

from executors import LocalProcessExecutor
from executors.backend import Backend, EndedJobs, JobsOfRun, PendingReplica, SupervisorStatus, as_backend, as_executor
from executors.protocol import ReplicaHandle, ServerlessExecutor

HANDLE = ReplicaHandle(0, "popen", {})


def plain(**abilities: Any) -> Backend:
    """Return the backend of an executor that has some abilities by structure."""
    executor = PopenExecutor()
    for name, ability in abilities.items():
        setattr(executor, name, ability)
    return as_backend(cast(ServerlessExecutor, executor))


def test_an_executor_of_a_user_comes_out_of_its_backend_as_it_was_given() -> None:
    executor = cast(ServerlessExecutor, PopenExecutor())
    assert as_executor(as_backend(executor)) is executor
    local = LocalProcessExecutor(preload=())
    assert as_backend(local) is local
    assert as_executor(local) is local


def test_five_verbs_alone_answer_every_question_without_an_ability() -> None:
    backend = plain()
    assert (backend.backend_name, backend.supports_inter_replica_network) == ("popen", True)
    assert not backend.knows_attempts
    assert not backend.starts_single_ranks
    assert not backend.carries_environment
    assert not backend.ends_with_launcher
    assert backend.is_cancelled_at_exit
    assert backend.needs_shared_rendezvous is None
    assert (backend.lease_s, backend.default_timeout_s) == (None, 3600)
    assert (backend.options_to_keep, backend.pip, backend.python_of_replicas) == ({}, (), None)
    assert (backend.price_per_hour("H100"), backend.reports_preemption("H100"), backend.ends_jobs) == (
        None,
        False,
        False,
    )
    assert backend.end_jobs(JobsOfRun("otter")) == EndedJobs()
    assert (backend.commands_to_end("otter"), backend.withdraw_jobs("file:///x", "otter", 0.0)) == ("", 0)
    assert backend.find_handle(HANDLE, insists=True) is None
    assert backend.supervisors([PendingReplica(HANDLE, 0)]) == [SupervisorStatus(is_alive=True)]


@pytest.mark.parametrize(
    ("abilities", "ask", "answer"),
    [
        ({"price_per_hour": lambda gpu: 2.5}, lambda it: it.price_per_hour("H100"), 2.5),
        ({"reports_preemption": lambda gpu: gpu == "H100"}, lambda it: it.reports_preemption("H100"), True),
        ({"python_of_replicas": "3.12"}, lambda it: it.python_of_replicas, "3.12"),
        ({"pip": ["einops"]}, lambda it: it.pip, ["einops"]),
        ({"withdraw_jobs": lambda *_: 3}, lambda it: it.withdraw_jobs("file:///x", "otter", 0.0), 3),
        (
            {"recordable_options": {"site": str}, "options_to_keep": {"site": "north"}},
            lambda it: (it.recordable_options, it.options_to_keep),
            ({"site": str}, {"site": "north"}),
        ),
        (
            {"end_jobs": lambda run, on_progress: EndedJobs(2), "commands_to_end": "end {}".format},
            lambda it: (it.ends_jobs, it.end_jobs(JobsOfRun("otter")).n_ended, it.commands_to_end("otter")),
            (True, 2, "end otter"),
        ),
    ],
)
def test_an_ability_that_a_users_executor_has_by_structure_is_asked(
    abilities: dict[str, Any], ask: Any, answer: Any
) -> None:
    assert ask(plain(**abilities)) == answer


def test_files_that_a_users_executor_can_remove_are_removed() -> None:
    removed: list[Any] = []
    plain(remove_files=lambda *run: removed.append(run)).remove_files("file:///x", "otter", 1.0)
    assert removed == [("file:///x", "otter", 1.0)]
    plain().remove_files("file:///x", "otter", 1.0)


def test_a_pickle_of_another_python_is_refused_if_the_executor_says_which_it_runs() -> None:
    plain().check_pickle("3.9")
    plain(python_of_replicas="3.9").check_pickle("3.9")
    with pytest.raises(ValueError, match=r"pickled by Python 3\.9, and replicas on 'popen' would run 3\.12"):
        plain(python_of_replicas="3.12").check_pickle("3.9")


def test_a_word_that_is_not_a_status_counts_as_running_and_never_as_success() -> None:
    backend = plain(poll=lambda handle: "done")
    assert backend.poll(HANDLE) == "running"
    assert [seen.status for seen in backend.observe([PendingReplica(HANDLE, 0)])] == ["running"]
