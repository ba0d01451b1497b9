"""The class `Run`, which `launch` and `attach` return.

Other modules of this package get more from `view_of` and `manager_of`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from executors.backend import no_progress
from executors.errors import ReplicasError
from executors.metrics.metrics import Metrics, read_metrics
from executors.protocol import Outcome, ReplicaStatus, ServerlessExecutor
from executors.registry.run_placements import GivenExecutor
from executors.restarts.restart_view import counted
from executors.run.removal import remove
from executors.run.run_manager import RunManager
from executors.status import FoundWarning, RunStatus
from executors.store import Store
from executors.store.artifacts import Artifact
from executors.view.report.event_reader import Event
from executors.view.report.root_cause import raise_root_cause
from executors.view.run_logs import LineFilter, Ranks, Which, lines_of_members, log_pieces
from executors.view.run_view import RunView, all_artifacts

log = logging.getLogger(__name__)


# More than 20 methods: each of the 22 public names is an action or a property for users, and tests pin these names.
class Run:
    """One run: wait for it, read its state, logs and measurements, cancel it, collect its results.

    `launch` and `attach` return runs. A run is a context manager: at the end of the block, all replicas that still run
    are cancelled.

    Args:
        store: the store of the run.
        run_id: the id of the run.
        executor: the executor of the run, several executors, or the name of a backend. None: the backends that the
            run's record names.
        handles: the handles of a launch of this process, in rank order. None: another process launched the run.

    Example:
        with launch("local", "train.py:main", n=4) as run:
            print(run.results())
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        executor: GivenExecutor = None,
        handles: Sequence[Any] | None = None,
    ) -> None:
        view = RunView(store, run_id, executor=executor, handles=handles)
        self._manager = RunManager(view, is_launcher=handles is not None)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        view = view_of(self)
        try:
            about = f"{len(view.placements.ranks)} replicas on {view.backend!r}"
        except ReplicasError:  # in a list of runs, a run that cannot be read must not hide the others
            about = "cannot be read"
        return f"<Run {view.run_id!r}: {about}, {view.store.url}>"

    def _repr_html_(self) -> str:
        return self.status().to_html()

    @property
    def run_id(self) -> str:
        """The id of the run. On this machine, `attach` and the CLI find the run by it."""
        return view_of(self).run_id

    @property
    def url(self) -> str:
        """The run's address. `attach` finds the run by it from any machine that reaches the store."""
        return view_of(self).url

    @property
    def ranks(self) -> list[int]:
        """The launched ranks of the run, and the ranks that were added since."""
        return view_of(self).ranks

    @property
    def handles(self) -> list[Any]:
        """The handles of the replicas in rank order, for calls of the executor itself.

        An element is None if this process cannot read the handle of the replica, or if the replica has no handle yet.
        """
        return view_of(self).handles

    def status(self, *, reports: bool = True) -> RunStatus:
        """Return the state of the run and of every replica, with its last report.

        Args:
            reports: False leaves out the reports, which saves one request per replica at a bucket. Default: True.

        Raises:
            StoreError: the store cannot be read.
            BackendError: the backend cannot be asked.

        Example:
            print(attach("first-try").status().counts)
        """
        return view_of(self).status(reports=reports)

    def wait(self, timeout: float | None = None, *, n: int | None = None) -> bool:
        """Wait until every replica has ended. Ctrl-C ends the wait, and the run continues.

        Args:
            timeout: the longest wait, in seconds. None, the default: no limit.
            n: the number of replicas whose end is waited for. None, the default: all replicas.

        Returns: False if the time passed before that.

        Raises:
            ValueError: the run does not have `n` replicas.
            StoreError: the store did not answer for longer than this process tolerates, or refuses its access.
            BackendError: the backend did not answer for longer than this process tolerates, or is not installed here.

        Example:
            if not run.wait(timeout=3600):
                run.stop()
        """
        return self._manager.wait(timeout, n=n)

    def as_completed(self) -> Iterator[Outcome]:
        """Yield the outcome of each replica as soon as the replica has ended. The iterator ends with the run.

        A rank that is resumed during the iteration is yielded again when its new attempt ends.

        Raises:
            StoreError, BackendError: the store or the backend failed, as for `wait`.

        Example:
            for outcome in run.as_completed():
                print(outcome.rank, outcome.status)
        """
        return self._manager.as_completed()

    def results(self) -> list[Any]:
        """Wait for the end of the run, and return the value that each replica's entrypoint returned, in rank order.

        If the run has `min_replicas`, and at least that number of replicas gave a result, the result of each other
        replica is None. A rank that was cancelled alone, as with `cancel(rank=2)`, also has the result None if any
        other rank gave a result.

        Raises:
            ReplicaError: a replica gave no result. The error is the earliest failure, and its message is the traceback
                of the replica. The other failures are notes of the error.
            StoreError, BackendError: the store or the backend failed, as for `wait`.

        Example:
            losses = launch("local", "train.py:main", n=4).results()
        """
        self.wait()
        outcomes, view = self.outcomes(), view_of(self)
        n_done = sum(outcome.status is ReplicaStatus.SUCCEEDED for outcome in outcomes)
        if n_done < (view.record.settings.min_replicas or len(counted(view.reader.decisions, outcomes))):
            raise_root_cause(outcomes)
        return [outcome.result for outcome in outcomes]

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes in rank order, without waiting. A replica that has none is pending or running.

        Raises:
            StoreError: the store cannot be read.
            BackendError: the backend cannot be asked.

        Example:
            failed = [outcome.rank for outcome in run.outcomes() if outcome.status == "failed"]
        """
        return view_of(self).outcomes()

    def events(self, follow: bool = False, note: Callable[[str], None] | None = None) -> Iterator[Event]:
        """Yield the events of the run so far, in the order of time: launches, ends, hangs and decisions.

        Args:
            follow: True: continue with later events, until the run has ended. Default: False.
            note: called with a message for each record that cannot be read. None, the default: the message is logged
                as a warning.

        Raises:
            StoreError: the store cannot be read.

        Example:
            for event in run.events():
                print(event.kind, event.rank)
        """
        from executors.view.run_events import events_of

        return events_of(view_of(self), follow=follow, note=note or log.warning)

    def warnings(self, note: Callable[[str], None] | None = None) -> list[FoundWarning]:
        """Return the warnings of all attempts so far, and the warning of the run as a whole, the oldest first.

        Each text of an attempt is listed once, with its number of occurrences. The call makes one read for each attempt
        that has a warning.

        Args:
            note: called with a message for each record that cannot be read. None, the default: the message is logged
                as a warning.

        Raises:
            StoreError: the store cannot be read.

        Example:
            for warning in run.warnings():
                print(warning.rank, warning.text)
        """
        from executors.view.run_events import warnings_of

        return warnings_of(view_of(self), note or log.warning)

    @overload
    def logs(
        self,
        rank: Ranks = None,
        tail: int = 200,
        follow: Literal[False] = False,
        *,
        attempt: Which = None,
        grep: str | None = None,
        since: float | None = None,
        member: int | None = None,
    ) -> str: ...

    @overload
    def logs(
        self, rank: Ranks = None, tail: int = 200, *, follow: Literal[True], attempt: Which = None,
        grep: str | None = None, member: int | None = None,
    ) -> Iterator[str]: ...  # fmt: skip

    def logs(
        self,
        rank: Ranks = None,
        tail: int = 200,
        follow: bool = False,
        *,
        attempt: Which = None,
        grep: str | None = None,
        since: float | None = None,
        member: int | None = None,
    ) -> str | Iterator[str]:
        """Return the last lines of the output of replicas. With several ranks, each line begins with `[rank]`.

        Args:
            rank: one rank, or several. None, the default: all ranks.
            tail: the number of lines of each replica, or of each attempt if `attempt` is "all". Default: 200.
            follow: True: return an iterator over these and all later lines, which ends with the run. If a rank is
                resumed during the iteration, the iterator continues with the new attempt. Default: False.
            attempt: the number of an attempt, or "all". None, the default: the newest attempt of each rank.
            grep: a regular expression. Only lines in which it is found are returned. None: every line.
            since: seconds before now. Only lines since then are returned. It cannot be combined with `follow`. None: no
                limit.
            member: the number of a process, in replicas that have several. Only its lines are returned. The lines of
                process 1 begin with `[1] `, and the lines of process 0 with no number. None, the default: the lines of
                all processes.

        Raises:
            ValueError: the run has no such rank, attempt or member, or `since` is given and the times of lines are not
                known.
            BackendError: no log could be read.

        Example:
            print(run.logs(rank=2, tail=50))
        """
        since = None if since is None else time.time() - since
        view = view_of(self)
        ranks = view.ranks if rank is None else [rank] if isinstance(rank, int) else rank
        members = {} if member is None else lines_of_members(view, {each: [member] for each in ranks})
        lines = LineFilter(grep=re.compile(grep) if grep else None, since=since, members=members)
        pieces = log_pieces(view, rank, tail, follow, attempt, lines)
        return pieces if follow else "".join(pieces)

    def metrics(self) -> Metrics:
        """Return the measurements of the run on one time line, and the amounts of work that were counted, dropped or
        lost.

        Raises:
            StoreError: the store cannot be read.

        Example:
            pandas.DataFrame(run.metrics().to_dict())
        """
        view = view_of(self)
        return read_metrics(view.store, view.run_id, view.record)

    def artifacts(self, rank: int) -> list[Artifact]:
        """List the files that a rank saved with `save_artifact`, in any of its attempts.

        If several attempts saved a file of the same name, the file of the newest attempt is listed. Files of the newest
        attempt come first. Objects whose names are not relative paths are left out; `replicas collect` names them.

        Args:
            rank: the rank.

        Raises:
            ValueError: the run has no such rank.
            StoreError: the store cannot be read.

        Example:
            for artifact in run.artifacts(rank=0):
                print(artifact.name)
        """
        return [artifact for artifact in all_artifacts(view_of(self), rank) if artifact.problem is None]

    def model(
        self,
        *,
        step: int | None = None,
        rounds: int | None = None,
        name: str = "main",
        dtype: Literal["live", "float32"] = "live",
        outer_optimizer: Callable[..., Any] | None = None,
    ) -> dict[str, Any]:
        """Return the model that the run has trained, after its newest round, as tensors by name.

        The model is read from the run's store alone, also while replicas train. Digests prove each object that is read.
        The trained parameters and float buffers are averages; `save_model` describes the other tensors.

        Args:
            step: the step of the run. The newest round at or before it is taken. None: the newest round. Rounds older
                than the second newest snapshot are deleted.
            rounds: the number of a round. The newest round up to this number is taken. None: the newest round.
            name: the name of the DiLoCo, as given to `DiLoCo(name=…)`. Default "main".
            dtype: "live", the default, for the dtypes of the model, or "float32" for the averaged values.
            outer_optimizer: the run's own outer optimizer, as given to `DiLoCo(outer_optimizer=…)`. Without it, only
                snapshots of such a run are available. None, the default: the run uses the usual one.

        Raises:
            RunNotFoundError: the run has no DiLoCo of this name.
            DiLoCoError: the store no longer has this round. The message names the rounds that it has.
            ValueError: the run is signed, and this machine does not have its key.
            MissingDependencyError: torch is not installed on this machine.

        Example:
            model.load_state_dict(attach("first-try").model())
        """
        from executors.view.run_model import read_run_model

        found = read_run_model(
            view_of(self), step=step, name=name, rounds=rounds, dtype=dtype, outer_optimizer=outer_optimizer
        )
        return dict(found.tensors)

    def save_model(
        self,
        path: str | Path,
        *,
        step: int | None = None,
        rounds: int | None = None,
        name: str = "main",
        dtype: Literal["live", "float32"] = "live",
        outer_optimizer: Callable[..., Any] | None = None,
    ) -> Any:
        """Write the model that the run has trained to a safetensors file. An existing file is replaced.

        Frozen parameters, and buffers that are not averaged, come from one replica. The file contains them if they are
        small: at most 256 MiB at the beginning of the run, and 64 MiB of buffers later.

        Args:
            path: the path of the file.
            step: the step of the run. The newest round at or before it is taken. None: the newest round.
            rounds: the number of a round. The newest round up to this number is taken. None: the newest round.
            name: the name of the DiLoCo. Default "main".
            dtype: "live", the default, for the dtypes of the model, or "float32" for the averaged values.
            outer_optimizer: the outer optimizer of the run, as `model` describes it. None, the default: the run uses
                the usual one.

        Returns: the content of the file, as `rounds`, `step`, `tensors`, `missing` (names of the model that the file
            does not have) and `notes`.

        Raises:
            OSError: the file cannot be written.
            RunNotFoundError, DiLoCoError, ValueError, MissingDependencyError: as for `model`.

        Example:
            run.save_model("model.safetensors")
            model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
        """
        from executors.view.run_model import save_run_model

        return save_run_model(
            view_of(self), Path(path), step=step, name=name, rounds=rounds, dtype=dtype, outer_optimizer=outer_optimizer
        )

    def report(self, path: str | Path) -> Path:
        """Write the present state of the run as one self-contained HTML page, and return the path of the page.

        Args:
            path: the file. An existing file is replaced.

        Raises:
            OSError: the folder does not exist, or the file cannot be written.
            StoreError, BackendError: the state of the run cannot be read.

        Example:
            run.report("run.html")
        """
        from executors.view.run_page import write_report

        return write_report(view_of(self), Path(path))

    def show(self) -> None:
        """Show the run in a cell of a notebook: status, progress and loss, renewed every second until it has ended.

        Returns at once. Any number of cells may show the run.

        Example:
            attach("first-try").show()
        """
        self._manager.show()

    def cancel(self, rank: Ranks = None) -> None:
        """Cancel one replica, several, or all replicas that still run. The other replicas are not changed.

        When the call returns, local replicas have ended, and each service has accepted to end its jobs. A service may
        take longer to end a container. The call does not wait for a store that does not answer. It asks the service all
        the same, and a line on stderr names the store.

        A queue that has ended the replicas of a job may hold the job and start it again. The cancel of a whole run
        deletes such jobs as well, also if the run has ended.

        Args:
            rank: one rank, or several. None, the default: all ranks.

        Raises:
            BackendError: a service did not end some jobs. The message says which, and how to end them. If the store
                answers, it has the cancel markers of these replicas all the same.
            ValueError: the run has no such rank.

        Example:
            attach("first-try").cancel(rank=3)
        """
        self._manager.cancel([rank] if isinstance(rank, int) else rank)

    def stop(self, within_s: float = 600.0, wait: Callable[[float], bool] | None = None) -> None:
        """Let each replica finish its round and end, and return when all replicas have ended. `replicas resume`
        continues the run later.

        Each replica ends after its next round, or when its entrypoint reads `replica.ending_s`. A replica that has not
        ended after `within_s` seconds is cancelled.

        Args:
            within_s: how long replicas have to finish their round, in seconds. Default: 600.
            wait: the function that waits for the end of the run. Its argument is the longest wait in seconds, and it
                returns False if the run still runs after that. None, the default: `wait` of this run.

        Raises:
            ValueError: `within_s` is not a time.
            BackendError: as for `cancel`.

        Example:
            attach("first-try").stop(within_s=300)
        """
        self._manager.stop(within_s, wait)

    def add(
        self,
        executor: str | ServerlessExecutor,
        n: int,
        *,
        gpu: str | None = None,
        timeout: float | None = None,
        secrets: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        detach: bool = False,
        task_digest: str | None = None,
        trust_bucket: bool = False,
        on_progress: Callable[[str], None] | None = None,
    ) -> list[int]:
        """Start `n` more replicas of the run, on any backend that reaches its rendezvous, and return their ranks.

        The new replicas have ranks beyond the ranks of the launch, and join the others at the next round. From then on
        `wait`, `results`, `cancel` and all other methods include them. Their `world_size` is the number of replicas of
        the launch, which never changes. `Replica.shard` explains their share of the data. The run's `max_cost` does not
        limit them.

        Args:
            executor: the name of a backend, or an executor. If the run was launched without code for other machines,
                replicas on other machines get the code of this folder.
            n: the number of replicas.
            gpu: the GPU of each replica, such as "H100:2". "" means no GPU. None, the default: the GPU of the launch.
            timeout: the time limit of each replica, in seconds. None, the default: the limit of the launch.
            secrets: the names of secrets. None, the default: the secrets of the launch, if the backend is one of the
                launch's.
            env: the environment variables of the launch, which are not recorded. None, the default: no variables.
            detach: True: the replicas continue when this process ends. They also continue if the whole run was detached
                after its launch: by a resume with `detach`, or by a user who ended `replicas watch`. Default: False.
            task_digest: the digest of the task of a run that another machine launched, as `replicas status` shows it
                there. None, the default: this machine launched the run.
            trust_bucket: True: start the task of a run that another machine launched, without its digest. Default:
                False.
            on_progress: called with a few words on the progress of the start, if it takes long. None, the default:
                nothing is reported.

        Raises:
            ValueError: the run has ended, or a value of its environment, or its key, is missing.
            UntrustedTaskError: another machine launched the run, and neither `task_digest` nor `trust_bucket` is given.
            BackendError: the backend cannot start single ranks, or does not reach the rendezvous. `LaunchError` if it
                refused a replica.

        Example:
            new_ranks = attach("first-try").add("modal", 2, gpu="H100")
        """
        from executors.run.addition import AdditionRequest

        asked = AdditionRequest(
            n=n, gpu=gpu, timeout=timeout, env=env, secrets=secrets, detach=detach, task_digest=task_digest,
            trust_bucket=trust_bucket,
        )  # fmt: skip
        return self._manager.add(executor, asked, on_progress or no_progress)

    def remove(self, on_progress: Callable[[str], None] | None = None) -> None:
        """Delete everything that the run left, on this machine and in its store.

        If an earlier removal was interrupted, this one finishes it.

        Args:
            on_progress: called with a few words on the progress, if the removal takes long. None, the default: nothing
                is reported.

        Raises:
            RunExistsError: a replica still runs, or is about to be started.
            StoreError: some objects could not be deleted, or the store does not answer.

        Example:
            attach("first-try").remove()
        """
        remove(view_of(self), on_progress or no_progress)


def view_of(run: Run) -> RunView:
    """Return the view of a run.

    It reads more than `Run` shows: the record, the store, the placements and pieces of logs.

    It is for other modules of this package, and not part of the public interface.

    Args:
        run: the run.

    Example:
        view_of(attach("first-try")).record.created_at
    """
    return run._manager.view


def manager_of(run: Run) -> RunManager:
    """Return the manager of a run, which watches, restarts and ends the run in this process.

    It is for other modules of this package, and not part of the public interface.

    Args:
        run: the run.

    Example:
        manager_of(attach("first-try")).tolerance
    """
    return run._manager
