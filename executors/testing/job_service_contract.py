"""JobServiceContract: tests that every job service must pass.

Subclass it, supply three methods, and inherit the tests.

class TestMyJobs(JobServiceContract):
    @pytest.fixture
    def service(self):
        return MyJobs()

    def another(self, service):
        return MyJobs(**service.options)

    def unknown(self, service):
        return {"id": "never-was"}
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest

from executors.backends.jobs.service import (
    RUN_LABEL,
    STORE_LABEL,
    UNKNOWN,
    ForeignJobError,
    JobId,
    JobKey,
    JobService,
    JobServiceError,
    JobSpec,
    JobState,
)
from executors.errors import BackendError
from executors.replica import RANK
from executors.testing.helpers import JobCleanup, KnownGaps, eventually

OTHERS: list[dict[str, Any]] = [
    *({"rank": 4}, {"attempt": 2}, {"run_id": "another"}, {"store_url": "s3://bucket/other"}),
    {"launched_at": 1.8e9},  # another run with the same id, launched after this run was removed
]
SAY_RANK = (  # Python code that prints the rank, which a job finds in the same variables as the bootstrap
    "import os; e = os.environ; "
    "print('rank', e.get('REPLICA_RANK') or e['REPLICA_RANKS'].split(',')[int(e['JOB_COMPLETION_INDEX'])])"
)
HANG = "print('hanging', flush=True); import time; time.sleep(600)"


class JobServiceContract(KnownGaps, JobCleanup):
    """Tests of each call to a service that works. Each backend has its own tests for the errors of its service.

    The class has more than 20 methods, because each promise of `JobService` is one test.

    Example:
        class TestMyJobs(JobServiceContract):
            @pytest.fixture
            def service(self):
                return MyJobs()

            def test_a_job_prints(self, service):
                job_id = self.started(service, self.job("print('hanging')"))
                assert self.ended(self.another(service), job_id).exit_code == 0
                assert self.unknown(service) != job_id
                more = [self.begun(service, self.job("pass")), *self.begun_together(service, [self.job("pass")])]
                if self.checks_secrets(service): ...
    """

    gpu: ClassVar[str | None] = None
    """The GPU of each job. None: no GPU."""
    patience_s: ClassVar[float] = 60.0
    """The longest time in seconds until a job runs, and until its end is reported."""

    @pytest.fixture
    def service(self) -> JobService:
        """The service under test."""
        raise NotImplementedError("Supply a `service` fixture.")

    @pytest.fixture(autouse=True)
    def _leaves_nothing(self, service: JobService) -> Iterator[None]:
        yield
        self.run_cleanups()

    def another(self, service: JobService) -> JobService:
        """Return the service as another process would make it. Override this method.

        Args:
            service: the service of the test.
        """
        raise NotImplementedError

    def unknown(self, service: JobService) -> JobId:
        """Return the id of a job that the service does not know. Override this method.

        Args:
            service: the service of the test.
        """
        raise NotImplementedError

    def checks_secrets(self, service: JobService) -> bool:
        """Return True if this account may find out that a secret does not exist. The default is True.

        Args:
            service: the service of the test.
        """
        return True

    def job(self, code: str, **changes: Any) -> JobSpec:
        """Return a job that runs Python code.

        Args:
            code: the code.
            changes: other values of the fields of `JobSpec`.
        """
        key = JobKey("s3://bucket/contract", f"contract-{secrets.token_hex(4)}", 3, 1)
        made = JobSpec(key, ("python", "-u", "-c", code), (), {}, {}, gpu=self.gpu, limit_s=300)
        return replace(made, **changes)

    def begun(self, service: JobService, job: JobSpec) -> JobId:
        """Start a job, and return its id. The job is stopped when the test ends.

        Args:
            service: the service of the test.
            job: the job to start.
        """
        job_id = service.start(job)
        self.add_cleanup(partial(service.stop, job_id))
        return job_id

    def begun_together(self, service: JobService, jobs: Sequence[JobSpec]) -> list[JobId]:
        """Start jobs in one call, and return their ids. The jobs are stopped when the test ends.

        Args:
            service: the service of the test.
            jobs: the jobs to start.
        """
        ids = list(service.start_jobs(jobs))
        for job_id in ids:
            self.add_cleanup(partial(service.stop, job_id))
        return ids

    def ended(self, service: JobService, job_id: JobId) -> JobState:
        """Wait for the end of a job, and return its state.

        Args:
            service: the service of the test.
            job_id: the job.
        """
        eventually(lambda: service.state(job_id).has_ended, "the job has ended", within_s=self.patience_s)
        return service.state(job_id)

    def started(self, service: JobService, job: JobSpec, line: str = "hanging") -> JobId:
        """Start a job, wait until it prints a line, and return its id.

        Args:
            service: the service of the test.
            job: the job to start.
            line: the line to wait for.
        """
        job_id = self.begun(service, job)
        eventually(lambda: line in service.logs(job_id, 10), f"the job prints {line!r}", within_s=self.patience_s)
        return job_id

    def test_the_account_can_be_used_and_a_secret_that_is_not_there_is_refused_by_name(
        self, service: JobService
    ) -> None:
        service.check_account(self.gpu, 60, ())
        if not self.checks_secrets(service):
            pytest.skip("this account may not list secrets")
        with pytest.raises(BackendError, match="'NOT_THERE'"):
            service.check_account(self.gpu, 60, ["NOT_THERE"])

    def test_a_job_runs_its_command_with_its_environment_and_credentials(self, service: JobService) -> None:
        code = "import os; print(os.environ['PLAIN'], os.environ['SECRET'])"
        value = "ä 'quoted' \"twice\" $HOME"
        job_id = self.begun(service, self.job(code, env={"PLAIN": value}, credentials={"SECRET": "hush"}))
        state = self.ended(service, job_id)
        assert (state.reason, state.exit_code) == (None, 0)
        eventually(lambda: service.logs(job_id, 10) == f"{value} hush\n", within_s=self.patience_s)

    def test_a_job_that_runs_into_its_limit_is_ended(self, service: JobService) -> None:
        state = self.ended(service, self.begun(service, self.job(HANG, limit_s=1)))
        assert state.reason == "timeout"

    def test_a_job_runs_until_it_is_stopped_and_stopping_it_again_is_not_an_error(self, service: JobService) -> None:
        job_id = self.started(service, self.job(HANG))
        assert not service.state(job_id).has_ended
        service.stop(job_id)
        assert self.ended(service, job_id).exit_code != 0
        service.stop(job_id)
        assert "hanging" in service.logs(job_id, 10), "the log outlives the job"

    def test_the_last_lines_of_a_log_are_read(self, service: JobService) -> None:
        job_id = self.begun(service, self.job("for n in range(300): print('line', n)"))
        self.ended(service, job_id)
        eventually(lambda: service.logs(job_id, 2) == "line 298\nline 299\n", within_s=self.patience_s)
        assert len(service.logs(job_id, 200).splitlines()) == 200
        assert service.logs(job_id, 0) == ""

    def test_a_log_that_is_followed_has_each_line_once(self, service: JobService) -> None:
        code = "import time\nfor n in range(20): print('line', n % 3); time.sleep(0.05)"
        job_id = self.begun(service, self.job(code))
        log, found = service.open_log(job_id), list[str]()

        def has_ended() -> bool:
            ended = service.state(job_id).has_ended
            found.extend(line for part in log.lines(100, has_ended=ended) for line in part)
            return ended and len(found) >= 20

        eventually(has_ended, "the log has all lines", within_s=self.patience_s)
        log.close()
        assert found == [f"line {number % 3}\n" for number in range(20)]

    def test_a_job_that_has_ended_is_found(self, service: JobService) -> None:
        job = self.job("pass")
        job_id = self.begun(service, job)
        self.ended(service, job_id)
        assert service.find(job.key) == [job_id]

    def test_a_job_is_found_by_its_key_alone(self, service: JobService) -> None:
        job = self.job(HANG)
        assert service.find(job.key) == []
        job_id = self.begun(service, job)
        assert eventually(lambda: service.find(job.key), within_s=self.patience_s) == [job_id]
        for other in OTHERS:
            assert service.find(replace(job.key, **other)) == [], other
        service.stop(job_id)

    def test_a_run_of_which_only_the_id_is_known_is_found_and_ended_and_no_other(self, service: JobService) -> None:
        if not service.lists_running:
            pytest.skip("the service does not list the jobs of a run")
        job = self.job(HANG)
        other_store = replace(job, key=replace(job.key, store_url="s3://bucket/other"))
        other_run = replace(job, key=replace(job.key, run_id=f"{job.key.run_id}-2"))
        mine, elsewhere, others = (self.started(service, each) for each in (job, other_store, other_run))
        asking = self.another(service)  # the process that lost the store may be on another machine

        def listed(labels: Mapping[str, str]) -> list[JobId]:
            return sorted((each.job for each in asking.running_jobs(labels)), key=repr)

        labels = {RUN_LABEL: job.key.run_id}
        eventually(lambda: listed(labels) == sorted([mine, elsewhere], key=repr), within_s=self.patience_s)
        stores = {each.labels[STORE_LABEL] for each in asking.running_jobs(labels)}
        assert stores == {key.run_labels[STORE_LABEL] for key in (job.key, other_store.key)}, "the labels differ"
        assert listed(job.key.run_labels) == [mine], "the list has the id that start() returned"
        assert listed({RUN_LABEL: "never-was"}) == []
        asking.stop(mine)
        eventually(lambda: listed(job.key.run_labels) == [], "ended jobs are not listed", within_s=self.patience_s)
        assert not any(service.state(each).has_ended for each in (elsewhere, others))
        for each in (elsewhere, others):
            service.stop(each)

    def test_the_services_own_commands_that_end_a_run_name_the_run_or_its_jobs(self, service: JobService) -> None:
        known = {"id": "job-of-mine", "namespace": "me", "sandbox_id": "sb-of-mine"}
        for job_ids in ([], [known]):
            commands = service.commands_to_end("otter-of-mine", job_ids)
            assert re.search("(otter|job|sb)-of-mine", commands), commands
            assert "\n" not in commands, "the commands are one line, because a message contains them"
        assert "otter-of-mine" in service.commands_to_end("otter-of-mine"), (
            "the commands name the run, because its jobs are not known"
        )
        many = service.commands_to_end("otter-of-mine", [known] * 1000)
        assert len(many) < 2000, "a message names a few jobs, and how to list the others"

    def test_a_run_id_that_was_removed_and_launched_again_does_not_get_the_old_runs_jobs(
        self, service: JobService
    ) -> None:
        old = self.job("print('of old')")
        old_id = self.begun(service, old)
        self.ended(service, old_id)
        new = replace(old, key=replace(old.key, launched_at=1.8e9), command=self.job("print('of new')").command)
        assert service.find(new.key) == []
        new_id = self.begun(service, new)
        self.ended(service, new_id)
        eventually(lambda: service.logs(new_id, 10) == "of new\n", within_s=self.patience_s)
        assert new_id != old_id
        assert old_id not in service.find(new.key)

    def test_of_two_jobs_of_a_key_the_older_comes_first_or_the_second_is_not_started(self, service: JobService) -> None:
        job = self.job(HANG)
        expected = [self.started(service, job)]
        with contextlib.suppress(JobServiceError):
            expected += [job_id for job_id in [self.begun(service, job)] if job_id not in expected]
        eventually(lambda: service.find(job.key) == expected, within_s=self.patience_s)
        for job_id in expected:
            service.stop(job_id)

    def test_jobs_of_a_group_start_in_one_call_and_are_each_found_and_stopped_by_themselves(
        self, service: JobService
    ) -> None:
        if not service.starts_together:
            pytest.skip("the service starts each job by itself")
        job = self.job(f"{SAY_RANK}; {HANG}")
        jobs = [replace(job, key=replace(job.key, rank=rank), env={RANK: str(rank)}) for rank in (1, 4, 2)]
        ids = [
            *self.begun_together(service, jobs[:2]),
            *self.begun_together(service, jobs[2:]),
        ]  # two groups with the same name
        for each, job_id in zip(jobs, ids, strict=True):
            said = f"rank {each.key.rank}\nhanging\n"
            eventually(lambda job_id=job_id, said=said: service.logs(job_id, 10) == said, within_s=self.patience_s)  # type: ignore[misc]
            assert service.find(each.key) == [job_id]
            assert service.verify(job_id, each.key) == job_id
        with pytest.raises(ForeignJobError):
            service.verify(ids[0], jobs[1].key)
        service.stop(ids[0])
        self.ended(service, ids[0])
        assert not any(service.state(job_id).has_ended for job_id in ids[1:])
        for job_id in ids[1:]:
            service.stop(job_id)
            self.ended(service, job_id)

    def test_a_job_is_verified_for_its_own_key_alone(self, service: JobService) -> None:
        job = self.job("pass")
        job_id = self.begun(service, job)
        assert service.verify(job_id, job.key) == job_id
        for other in OTHERS:
            with pytest.raises(ForeignJobError, match="names a job that"):
                service.verify(job_id, replace(job.key, **other))
        for hostile in ({}, dict.fromkeys(job_id, 5), dict.fromkeys(job_id, "../x"), dict.fromkeys(job_id, "x" * 500)):
            with pytest.raises(ForeignJobError):
                service.verify(hostile, job.key)
        self.ended(service, job_id)

    def test_a_job_that_is_gone_is_lost_and_nothing_about_it_is_an_error(self, service: JobService) -> None:
        job_id = self.unknown(service)
        assert service.state(job_id) == UNKNOWN
        assert service.logs(job_id, 10) == ""
        service.stop(job_id)
        assert service.verify(job_id, self.job("pass").key) == job_id

    def test_the_states_of_several_jobs_at_once_are_the_states_of_each_job(self, service: JobService) -> None:
        job = self.job(HANG)
        other = replace(job, key=replace(job.key, rank=4))
        ids = {each.key: self.started(service, each) for each in (job, other)}
        for key, state in self.another(service).states(ids).items():
            assert state == service.state(ids[key])
        more = {**ids[other.key], "url": "https://elsewhere"}
        of_another_run = replace(job.key, run_id="another")
        for wrong in ({of_another_run: ids[job.key]}, {job.key: more}, {job.key: {"id": 5}}, {}):
            assert service.states(wrong) == {}, "a job with wrong labels is not shown"
        if service.states_name_ranks:
            assert service.states({job.key: ids[other.key]}) == {}
        service.stop(ids[job.key])
        self.ended(service, ids[job.key])
        assert all(state.has_ended for key, state in service.states(ids).items() if key == job.key)
        service.stop(ids[other.key])
        self.ended(service, ids[other.key])

    def test_another_process_can_use_an_id_that_travelled_as_json(self, service: JobService) -> None:
        job = self.job(HANG)
        job_id = json.loads(json.dumps(self.started(service, job)))
        other = self.another(service)
        assert other.find(job.key) == [job_id]
        assert other.verify(job_id, job.key) == job_id
        eventually(lambda: other.logs(job_id, 10) == "hanging\n", within_s=self.patience_s)
        other.stop(job_id)
        assert self.ended(service, job_id).has_ended

    def test_threads_start_jobs_and_read_their_exit_codes(self, service: JobService) -> None:
        jobs = [self.job(f"import sys; sys.exit({code})") for code in range(4)]
        with ThreadPoolExecutor(4) as pool:
            states = list(pool.map(lambda job: self.ended(service, self.begun(service, job)), jobs))
        assert [(state.reason, state.exit_code) for state in states] == [(None, code) for code in range(4)]

    def test_the_description_of_a_job_is_json_and_shows_no_secret(self, service: JobService) -> None:
        job = self.job("pass", env={"MINE": "my-own-value"}, credentials={"SECRET": "hush"})
        text = json.dumps(service.describe(job))
        assert all(word in text for word in ("MINE", "SECRET", job.key.name))
        assert not any(value in text + repr(job) + repr(service) for value in ("my-own-value", "hush"))
