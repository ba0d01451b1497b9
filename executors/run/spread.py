"""The executors of a run on several backends as one: what concerns a replica goes to the executor of its rank."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, TypeVar, cast

from executors.attempt import CLAIM, Attempt, collect_rows, half_way
from executors.errors import BackendError, LaunchError, ReplicasError, StoreError, UnknownHandleError
from executors.logs.readers import TailedLog
from executors.native import (
    EndedJobs,
    EndsJobs,
    JobsOfRun,
    KeepsOptions,
    KnowsInstallation,
    Log,
    NativeExecutor,
    Observation,
    Package,
    Parent,
    Recordable,
    TellsPreemption,
    Unfinished,
)
from executors.process import this_process
from executors.protocol import ReplicaHandle, ReplicaStatus, ServerlessExecutor
from executors.registry import describe_executor
from executors.run.fleet import Site
from executors.settings.run_spec import RunSpec
from executors.store import store_at
from executors.store.parallel import answered_within, in_parallel, in_threads, within
from executors.task.record import Placement

HEAD_START_S = 5.0  # the store's, before the services are asked to end what was started
STORE_S = 60.0  # how long Ctrl-C waits for the store, and for starts that end, once the services were asked
T = TypeVar("T")
S = TypeVar("S")


class SpreadExecutor:
    """Several executors, each with some ranks of a run.

    Args:
        sites: returns the placements of the run with their executors.
    """

    supports_inter_replica_network = False
    default_timeout_s: float | None = None  # each has its own
    recordable_options: ClassVar[Recordable] = {}
    options_to_keep: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, sites: Callable[[], Sequence[Site]]) -> None:
        self._sites = sites

    def __repr__(self) -> str:
        return f"SpreadExecutor({self.backend_name!r})"

    @property
    def backend_name(self) -> str:
        """Each with the number of its ranks, as in `slurm:4,modal:4`."""
        return ",".join(f"{site.placement.backend}:{len(site.placement.ranks)}" for site in self._sites())

    @property
    def parts(self) -> list[tuple[Placement, NativeExecutor]]:
        """The placements whose executors are to be had here."""
        found = []
        for site in self._sites():
            with contextlib.suppress(BackendError):
                found.append((site.placement, site.native))
        return found

    @property
    def needs_shared_rendezvous(self) -> bool:
        """Whether some replicas see no directory of this machine."""
        return any(executor.needs_shared_rendezvous for _, executor in self.parts)

    @property
    def ends_with_launcher(self) -> bool:
        """Whether some replicas of an attached run end with the process that launched it."""
        return any(executor.ends_with_launcher for _, executor in self.parts)

    @property
    def ships_code(self) -> bool:
        """Whether all replicas get a package of the code."""
        return all(executor.ships_code for _, executor in self.parts)

    @property
    def lease_s(self) -> float | None:
        """How long those replicas go on that need a lease, while no process renews it."""
        return max((executor.lease_s for _, executor in self.parts if executor.lease_s is not None), default=None)

    def with_terms(
        self, *, gpu: str | None, timeout_s: float | None, env: Sequence[str], secrets: Sequence[str]
    ) -> SpreadExecutor:
        """Return them as they are launched: what each is started with is part of its placement."""
        terms: Any = {"gpu": gpu, "env": tuple(sorted(env)), "secrets": tuple(sorted(secrets))}
        sites = [
            Site(replace(place, **terms, timeout_s=timeout_s or executor.default_timeout_s), lambda each=executor: each)  # type: ignore[misc]
            for place, executor in self.parts
        ]
        return SpreadExecutor(lambda: sites)

    def described(self) -> dict[str, Any]:
        """Return what the run's record says of them, as `describe_executor` does of one."""
        (_, first), *others = self.parts
        return {**describe_executor(first), "others": tuple(place for place, _ in others)}

    def warm_up(self) -> None:
        """Begin what takes long, at each."""
        for _, executor in self.parts:
            executor.warm_up()

    def check_launch(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        """Refuse what cannot work at any of them; see `NativeExecutor.check_launch`."""
        for place, executor in self.parts:
            limits: Any = {"gpu": gpu, "timeout": executor.default_timeout_s if timeout is None else timeout}
            executor.check_launch(len(place.ranks), entrypoint, entrypoint_args, **limits, secrets=secrets)

    def tells_preemption(self, gpu: str | None) -> bool:
        """Return whether the service of any part says when it takes a machine back; see `TellsPreemption`."""
        return any(isinstance(each, TellsPreemption) and each.tells_preemption(gpu) for _, each in self.parts)

    def installation_note(self, requirements: Sequence[str]) -> str:
        """Return the sentences of all parts, each once; see `KnowsInstallation`."""
        notes = [each.installation_note(requirements) for _, each in self.parts if isinstance(each, KnowsInstallation)]
        return " ".join(filter(None, dict.fromkeys(notes)))

    def package(self, entrypoint: str | Callable[..., Any]) -> Package | None:
        """Return what replicas on other machines need; raises ValueError where one is to have other requirements."""
        made = {place.backend: package for place, each in self.parts if (package := each.package(entrypoint))}
        for (one, its), (another, theirs) in pairwise(made.items()):
            if differing := sorted({*its.requirements} ^ {*theirs.requirements}):
                has, lacks = (one, another) if differing[0] in its.requirements else (another, one)
                raise ValueError(
                    f"Backend {has!r} installs {differing[0]!r}, and {lacks!r} does not, but replicas of one run have "
                    "the same requirements. Give both the same pip, or use an image or environment that has them."
                )
        return next(iter(made.values()), None)

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = None,
        run: RunSpec | None = None,
        tell: Callable[[str], None] = lambda words: None,
    ) -> list[ReplicaHandle]:
        """Start replicas at all their backends at once; see `NativeExecutor.launch_replicas`.

        Args:
            gpu, timeout: None: those of the placement of each.

        Raises:
            LaunchError: too few could be started; those that were, everywhere, were ended.
        """
        if run is None:
            raise ValueError("A run on several backends begins with executors.launch().")
        sites: dict[Site, list[int]] = {}
        for rank in run.ranks:
            sites.setdefault(self._at(rank), []).append(rank)

        def start(site: Site) -> list[ReplicaHandle]:
            place, ranks, executor = site.placement, sites[site], site.native
            limits: Any = {
                "gpu": place.gpu if gpu is None else gpu,
                "timeout": next((s for s in (timeout, place.timeout_s, executor.default_timeout_s) if s), None),
            }
            enough = run.settings.min_replicas
            least = None if enough is None else max(1, enough - (len(run.ranks) - len(ranks)))
            spec = replace(
                run,
                ranks=tuple(ranks),
                lease_s=None if run.lease_s is None else executor.lease_s,
            ).with_settings(
                min_replicas=None if least is None else min(least, len(ranks)),
                chaos=run.settings.chaos if place.backend == "local" else (),
            )
            return executor.launch_replicas(
                len(ranks), entrypoint, entrypoint_args, **limits, run=spec,
                tell=lambda words: tell(f"{place.backend}: {words}" if len(sites) > 1 else words),
            )  # fmt: skip

        if len(sites) == 1:
            return start(next(iter(sites)))
        return self._start_all(run, sites, start)

    def _start_all(
        self, run: RunSpec, sites: Mapping[Site, Sequence[int]], start: Callable[[Site], list[ReplicaHandle]]
    ) -> list[ReplicaHandle]:
        handles: dict[Site, list[ReplicaHandle]] = {}
        errors: dict[Site, ReplicasError | OSError] = {}
        begins = threading.Event()  # before, Ctrl-C would leave threads that start what nobody knows of

        def start_then(site: Site) -> list[ReplicaHandle]:
            begins.wait()
            return start(site)

        futures = dict(zip(sites, in_threads(start_then, [*sites], len(sites)), strict=True))
        try:
            begins.set()
            for site, future in futures.items():
                try:
                    handles[site] = future.result()
                except (ReplicasError, OSError) as error:
                    errors[site] = error
        except BaseException as interrupt:  # Ctrl-C
            self._end_all(run, futures.values(), interrupt)
            raise
        started = [handle for each in handles.values() for handle in each]
        enough = run.settings.min_replicas
        if not errors and (enough is None or len(started) >= enough):
            return sorted(started, key=lambda handle: handle.rank)
        for site, problem in errors.items():
            # What its executor has begun, that has ended; others may have begun some, too.
            self._abandon(filter(_take, _attempts(run, sites[site])), problem)
        if enough is not None and len(started) >= enough:
            for problem in errors.values():
                print(f"replicas: started with {len(started)} of {len(run.ranks)} replicas: {problem}", file=sys.stderr)
            return sorted(started, key=lambda handle: handle.rank)
        cause = next(iter(errors.values()), None)
        why = f"only {len(started)} of {len(run.ranks)} replicas could be started" if cause is None else str(cause)
        self._end(run, started, LaunchError(why))
        raise LaunchError(
            f"{why.rstrip('.')}. Those at other backends were ended, too.",
            rank=getattr(cause, "rank", None),
            cancelled=getattr(cause, "cancelled", False),
        ) from cause

    def _end_all(self, run: RunSpec, parts: Iterable[Future[list[ReplicaHandle]]], interrupt: BaseException) -> None:
        """End what is being started: an outcome comes last, for what has one is not ended any more."""
        print("replicas: ending what was begun; Ctrl-C again leaves it to end when it comes up", file=sys.stderr)
        # The services first: a store that does not answer keeps nothing running that is paid for.
        told = self.end_jobs(JobsOfRun(run.run_id, run.store_url, run.launched_at, run.ranks), _say)
        if not told.is_complete:
            _say(told.what_is_left)

        def leave_word() -> None:
            ours = [attempt for attempt in _attempts(run, run.ranks) if _take(attempt) or _is_ours(attempt)]
            for attempt in ours:
                with contextlib.suppress(ReplicasError):
                    attempt.request_cancel(half_way(interrupt))
            for part in parts:
                with contextlib.suppress(Exception):
                    self._end(run, part.result(), interrupt)
            self._abandon(ours, interrupt)

        with contextlib.suppress(StoreError):
            within(STORE_S, leave_word, run.store_url)

    def _abandon(self, attempts: Iterable[Attempt], error: BaseException) -> None:
        for attempt in attempts:
            with contextlib.suppress(ReplicasError):
                attempt.abandon(error)

    def _end(self, run: RunSpec, handles: Sequence[ReplicaHandle], error: BaseException) -> None:
        """End replicas that were started. The store has a moment to take their markers, then the services are asked."""
        ranks = tuple(handle.rank for handle in handles)
        (marked,) = in_threads(lambda _: self._abandon(_attempts(run, ranks), error), [None], 1)
        with contextlib.suppress(StoreError):
            answered_within(HEAD_START_S, marked, run.store_url)
        told = self.end_jobs(JobsOfRun(run.run_id, run.store_url, run.launched_at, ranks), _say)
        if not told.is_complete:
            _say(told.what_is_left)

        def end(handle: ReplicaHandle) -> None:
            with contextlib.suppress(ReplicasError):
                self.cancel(handle)

        in_parallel(end, [handle for handle in handles if (handle.rank, run.attempt) not in told.attempts])

    def end_jobs(self, run: JobsOfRun, tell: Callable[[str], None] = lambda words: None) -> EndedJobs:
        """End the jobs of a run at every service that it is on, all at the same time; see `EndsJobs.end_jobs`."""
        asked = [executor for _, executor in self.parts if isinstance(executor, EndsJobs)]
        return sum(in_parallel(lambda executor: executor.end_jobs(run, tell), asked), EndedJobs())

    def commands_to_end(self, run_id: str) -> str:
        """Return the commands of all services that the run is on; see `EndsJobs.commands_to_end`."""
        asked = [executor for _, executor in self.parts if isinstance(executor, EndsJobs)]
        return "   ".join(dict.fromkeys(executor.commands_to_end(run_id) for executor in asked))

    def describe_launch(
        self, run: RunSpec, *, gpu: str | None = None, timeout: float | None = None, requirements: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return what each would ask for, by its backend."""
        return {
            place.backend: executor.describe_launch(
                replace(run, ranks=place.ranks),
                gpu=gpu,
                timeout=executor.default_timeout_s if timeout is None else timeout,
                requirements=requirements,
            )
            for place, executor in self.parts
        }

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return the replica's status; where its backend is not to be had here, as the store tells it."""
        if (executor := self._at_hand(handle)) is not None:
            return ReplicaStatus(executor.poll(handle))
        attempt = Attempt.from_handle(handle, handle.backend_name).newest()
        if (outcome := attempt.outcome()) is not None:
            return outcome.status
        return ReplicaStatus.RUNNING if attempt.has(CLAIM) else ReplicaStatus.PENDING

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return the last lines of the replica's output, or why they are not to be had here."""
        try:
            executor = self._of(handle)
        except BackendError as error:
            return f"replicas: {error}"
        return executor.stream_logs(handle, n_lines=n_lines)

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica; where its backend is not to be had here, it finds the marker, also if it comes up late."""
        if (executor := self._at_hand(handle)) is not None:
            executor.cancel(handle)
            return
        attempt = Attempt.from_handle(handle, handle.backend_name).newest()
        attempt.request_cancel()
        if not attempt.has(CLAIM):
            attempt.record(attempt.ended(ReplicaStatus.CANCELLED, "cancelled"))

    def collect(self, handles: list[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for the replicas' outcomes, and return them in the order of `handles`."""
        return collect_rows(self.poll, self.backend_name, handles, timeout)

    def observe(self, replicas: Sequence[Unfinished]) -> list[Observation]:
        """Look at several replicas; of a backend that is not to be had here, only the store tells."""
        return self._in_groups(
            replicas, lambda executor, some: executor.observe(some), lambda error: Observation(doing=str(error))
        )

    def parents(self, replicas: Sequence[Unfinished]) -> list[Parent]:
        """Tell whether what supervised replicas lives on; where nobody here can know, it counts as alive."""
        return self._in_groups(
            replicas, lambda executor, some: executor.parents(some), lambda error: Parent(is_alive=True)
        )

    def open_log(self, handle: ReplicaHandle) -> Log:
        """Return the log of the attempt that a handle names, or why it is not to be had here."""
        if (executor := self._at_hand(handle)) is not None:
            return executor.open_log(handle)
        return TailedLog(lambda n_lines: self.stream_logs(handle, n_lines=n_lines))

    def find_handle(self, handle: ReplicaHandle, *, insists: bool = False) -> ReplicaHandle | None:
        """Find a replica that was announced only; None also where its backend is not to be had here."""
        executor = self._at_hand(handle)
        return None if executor is None else executor.find_handle(handle, insists=insists)

    def of(self, rank: int) -> ServerlessExecutor:
        """Return the executor of a rank.

        Raises:
            UnknownHandleError: the run has no such rank.
            BackendError: its backend is not to be had here.
        """
        return self._at(rank).executor

    def _of(self, handle: ReplicaHandle) -> NativeExecutor:
        return self._at(handle.rank).native

    def _at_hand(self, handle: ReplicaHandle) -> NativeExecutor | None:
        """Return the executor of a replica; None: its backend is not to be had here."""
        with contextlib.suppress(BackendError):
            return self._of(handle)
        return None

    def _at(self, rank: int) -> Site:
        found = next((site for site in self._sites() if rank in site.placement.ranks), None)
        if found is None:
            raise UnknownHandleError(f"The run has no rank {rank}.")
        return found

    def _in_groups(
        self,
        replicas: Sequence[Unfinished],
        ask: Callable[[NativeExecutor, Sequence[Unfinished]], Sequence[T]],
        instead: Callable[[BackendError], T],
    ) -> list[T]:
        """Ask each executor about its replicas; return the answers in the order of the replicas."""
        groups: dict[Site, list[int]] = {}
        for index, each in enumerate(replicas):
            groups.setdefault(self._at(each.handle.rank), []).append(index)
        found: dict[int, T] = {}
        for site, indexes in groups.items():
            try:
                answers = list(ask(site.native, [replicas[index] for index in indexes]))
            except UnknownHandleError:  # of one replica, also where it is a BackendError: who asks finds out whose
                raise
            except BackendError as error:
                answers = [instead(error) for _ in indexes]
            found |= dict(zip(indexes, answers, strict=True))
        return [found[index] for index in range(len(replicas))]


def _say(words: str) -> None:
    print(f"replicas: {words}", file=sys.stderr)


def _attempts(run: RunSpec, ranks: Sequence[int]) -> list[Attempt]:
    return [Attempt(store_at(run.store_url), run.run_id, rank, run.attempt) for rank in ranks]


def _take(attempt: Attempt) -> bool:
    """Begin an attempt that nobody has begun, so that nobody does any more; False if somebody has."""
    with contextlib.suppress(ReplicasError):
        return attempt.started_by() is None and attempt.claim_start(secrets.token_hex(16))
    return False


def _is_ours(attempt: Attempt) -> bool:
    """Return whether this process has begun an attempt."""
    with contextlib.suppress(ReplicasError):
        return attempt.started_by() == this_process()
    return False


def as_one(sites: Callable[[], Sequence[Site]]) -> ServerlessExecutor:
    """Return the executor of some placements: of several, all as one."""
    (first, *others), spread = sites(), cast(Any, SpreadExecutor(sites))
    return spread if others else first.executor


def options_to_note(executor: ServerlessExecutor) -> tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]:
    """Return the options of an executor, and where it is several, those of the others by their placements."""
    if isinstance(executor, SpreadExecutor):
        (_, first), *others = executor.parts
        return options_to_note(first)[0], {place.name: options_to_note(each)[0] for place, each in others}
    return (executor.options_to_keep if isinstance(executor, KeepsOptions) else {}), {}
