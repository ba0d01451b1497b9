"""The backends of a run, one or several. A question about a rank is passed on to the backend that runs the rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

from executors.attempt import Attempt, collect_rows
from executors.backend import (
    Backend,
    EndedJobs,
    JobsOfRun,
    Observation,
    PendingReplica,
    SupervisorStatus,
    as_backend,
    as_executor,
    no_progress,
)
from executors.errors import BackendError, CorruptObjectError, UnknownHandleError
from executors.logs.log import Log
from executors.logs.readers import TailedLog
from executors.protocol import ReplicaHandle, ReplicaStatus, ServerlessExecutor
from executors.registry import describe_executor
from executors.registry.start_together import Part, start_parts
from executors.settings.run_spec import StartSpec
from executors.store.parallel import in_parallel
from executors.task.code_package import Package
from executors.task.launch_request import LaunchRequest
from executors.task.record import Placement

T = TypeVar("T")


class PlacedBackend:
    """A placement of a run with its backend. The backend is made when it is first needed.

    Args:
        placement: some ranks, and the values that start their attempts.
        make: returns the backend. It raises BackendError if the backend is not installed on this machine.
    """

    def __init__(self, placement: Placement, make: Callable[[], Backend]) -> None:
        self.placement = placement
        self._make = make
        self._backend: Backend | None = None

    @property
    def backend(self) -> Backend:
        """The backend of these ranks.

        Raises:
            BackendError: the backend is not installed on this machine.
        """
        if self._backend is None:
            self._backend = self._make()
        return self._backend


class PlacedRanks:
    """Knows the backend of each rank of a run, and which backends are installed on this machine.

    Args:
        places: the placements with their backends.
        is_part: True if the run also has other placements. Default: False.

    Example:
        run.placements.name_at(3)  # "modal"
    """

    def __init__(self, places: Sequence[PlacedBackend] = (), *, is_part: bool = False) -> None:
        self._places = places
        self._is_part = is_part

    @property
    def placed(self) -> Sequence[PlacedBackend]:
        """The placements with their backends: first the launch's, then each addition."""
        return self._places

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of all placements that are known, in their order."""
        return sorted(rank for placed in self.placed for rank in placed.placement.ranks)

    def at(self, rank: int) -> PlacedBackend:
        """Return the placement of a rank.

        Args:
            rank: the number of a replica.

        Raises:
            UnknownHandleError: no placement has this rank.

        Example:
            run.placements.at(3).backend
        """
        found = next((placed for placed in self.placed if rank in placed.placement.ranks), None)
        if found is None:
            raise UnknownHandleError(f"The run has no rank {rank}.")
        return found

    def name_at(self, rank: int) -> str:
        """Return the name of the backend that has a rank.

        Args:
            rank: the number of a replica.

        Example:
            run.placements.name_at(3)  # "modal"
        """
        return self.at(rank).placement.backend

    @property
    def _only(self) -> PlacedBackend | None:
        """The placement of a run that has exactly one. None if the run has several."""
        return self.placed[0] if len(self.placed) == 1 and not self._is_part else None

    @property
    def installed(self) -> list[tuple[Placement, Backend]]:
        """The placements whose backends are installed on this machine.

        Raises:
            BackendError: the only backend is not installed.
        """
        return [(placed.placement, backend) for placed in self.placed if (backend := self._backend(placed)) is not None]

    def _backend(self, placed: PlacedBackend) -> Backend | None:
        """Return the backend of a placement.

        None if the run has several backends and this one is not installed here.
        """
        if self._only is not None:
            return placed.backend
        with contextlib.suppress(BackendError):
            return check_single_ranks(placed.backend)
        return None

    def _backend_of(self, handle: ReplicaHandle) -> Backend | None:
        """Return the backend of a replica. None if the run has several backends and this one is not installed here."""
        # Handles of an executor outside this project need not have a rank, so the only placement comes first.
        return self._backend(self._only or self.at(handle.rank))

    def _backends(self) -> Iterator[Backend]:
        return (backend for _, backend in self.installed)


# More than 20 methods: Placements implement the whole interface of a Backend for all backends of a run.
class Placements(PlacedRanks, Backend):
    """The backends of a run's ranks, with the interface of one Backend.

    Launcher, reader, canceller and controller work in the same way with one backend and with several. If a run has only
    one backend and it is not installed on this machine, its methods raise an error. If it is one of several, the states
    of its replicas come from the store, and their supervisors count as alive.

    Example:
        Placements([PlacedBackend(placement, make)]).start_ranks(start)
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.backend_name!r})"

    def some(self, places: Sequence[PlacedBackend]) -> Placements:
        """Return an object that has only some of these placements.

        Args:
            places: the placements to keep.

        Example:
            placements.some(placements.placed[:1])
        """
        return Placements(places, is_part=self._only is None)

    @property
    def executor(self) -> ServerlessExecutor:
        """The executor that the user gave. With several backends, it is this object.

        Raises:
            BackendError: the only backend is not installed on this machine.
        """
        return self if self._only is None else as_executor(self._only.backend)

    # --- properties of the backends, combined

    @property
    def backend_name(self) -> str:
        """The name of the backend, or of each with the number of its ranks, as in `slurm:4,modal:4`."""
        numbers: dict[str, int] = {}
        for placed in self.placed:
            place = placed.placement
            numbers[place.backend] = numbers.get(place.backend, 0) + len(place.ranks)
        return next(iter(numbers)) if len(numbers) == 1 else ",".join(f"{name}:{n}" for name, n in numbers.items())

    @property
    def supports_inter_replica_network(self) -> bool:
        """True if the run has one backend, and its replicas can connect to each other."""
        return self._only is not None and self._only.backend.supports_inter_replica_network

    @property
    def needs_shared_rendezvous(self) -> bool | None:
        """True if some replicas cannot see a directory of this machine. None if this is not known."""
        answers = [backend.needs_shared_rendezvous for backend in self._backends()]
        return None if answers == [None] else any(answers)

    @property
    def ends_with_launcher(self) -> bool:
        """True if some replicas of an attached run end when their launching process ends."""
        return any(backend.ends_with_launcher for backend in self._backends())

    @property
    def is_cancelled_at_exit(self) -> bool:
        """True if some replicas of an attached run can be ended by the launching process only."""
        return any(backend.is_cancelled_at_exit for backend in self._backends())

    @property
    def ships_code(self) -> bool:
        """True if all replicas get a package of the code."""
        return all(backend.ships_code for backend in self._backends())

    @property
    def knows_attempts(self) -> bool:
        """True if all backends record attempts, and start later ones."""
        return all(backend.knows_attempts for backend in self._backends())

    @property
    def starts_single_ranks(self) -> bool:
        """True if all backends can start a single rank, with a supervisor that watches and restarts it."""
        return all(backend.starts_single_ranks for backend in self._backends())

    @property
    def carries_environment(self) -> bool:
        """True if environment variables, secrets and the key of a signed run reach all replicas."""
        return all(backend.carries_environment for backend in self._backends())

    @property
    def ends_jobs(self) -> bool:
        """True if some replicas are jobs of a service, which `end_jobs` can end without the run's store."""
        return any(backend.ends_jobs for backend in self._backends())

    @property
    def lease_s(self) -> float | None:
        """The seconds that replicas continue after the last renewal of their lease.

        None if no replica needs a lease.
        """
        return max((backend.lease_s for backend in self._backends() if backend.lease_s is not None), default=None)

    @property
    def default_timeout_s(self) -> float | None:
        """The time limit of the only backend.

        None: no limit, or the run has several backends with limits of their own.
        """
        return None if self._only is None else self._only.backend.default_timeout_s

    def price_per_hour(self, gpu: str | None) -> float | None:
        """Return the price of one replica per hour at the only backend.

        None: not known, or the run has several backends.
        """
        return None if self._only is None else self._only.backend.price_per_hour(gpu)

    def reports_preemption(self, gpu: str | None) -> bool:
        """Return True if the service of any backend reports that it took a machine back."""
        return any(backend.reports_preemption(gpu) for backend in self._backends())

    def installation_note(self, requirements: Sequence[str]) -> str:
        """Return the notes of all backends on installation. Equal sentences are returned once."""
        notes = [backend.installation_note(requirements) for backend in self._backends()]
        return " ".join(filter(None, dict.fromkeys(notes)))

    # --- before a launch

    def with_limits(
        self, *, gpu: str | None, timeout_s: float | None, env: Sequence[str], secrets: Sequence[str]
    ) -> Placements:
        """Return these placements with the given GPU, time limit, environment variables and secrets.

        Args:
            gpu: the GPU of each replica. None: no GPU.
            timeout_s: seconds that each replica may run. None: the default of each backend.
            env: the names of environment variables. Their values are not recorded.
            secrets: the names of secrets.

        Example:
            placements.with_limits(gpu=None, timeout_s=60.0, env=[], secrets=[])
        """
        names: Any = {"env": tuple(sorted(env)), "secrets": tuple(sorted(secrets))}

        def with_limits(place: Placement, backend: Backend) -> PlacedBackend:
            limit_s = timeout_s or backend.default_timeout_s
            return PlacedBackend(replace(place, gpu=gpu, timeout_s=limit_s, **names), lambda: backend)

        return Placements([with_limits(place, backend) for place, backend in self.installed])

    def options_to_note(self) -> tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]:
        """Return the options of the first executor, and the options of each other executor by the name of its
        placement.
        """
        (_, first), *others = self.installed
        return first.options_to_keep, {place.name: backend.options_to_keep for place, backend in others}

    def warm_up(self, entrypoint: str | Callable[..., Any]) -> None:
        """Let each backend begin the slow parts of a start.

        Args:
            entrypoint: the entrypoint of the launch.
        """
        for backend in self._backends():
            backend.warm_up(entrypoint)

    def check_launch(self, request: LaunchRequest) -> None:
        """Raise an error if one of the backends refuses the launch; see `Backend.check_launch`.

        Each backend checks the number of replicas in its placement.
        """
        asked_s = request.settings.timeout
        for place, backend in self.installed:
            limit_s = backend.default_timeout_s if asked_s is None else asked_s
            backend.check_launch(request.with_settings(n=len(place.ranks), timeout=limit_s))

    def check_pickle(self, pickled_by: str, whose: str = "The callable") -> None:
        """Check that replicas at each backend can load a pickle; see `Backend.check_pickle`."""
        for backend in self._backends():
            backend.check_pickle(pickled_by, whose)

    def package(self, entrypoint: str | Callable[..., Any]) -> Package | None:
        """Return the package of code for replicas on other machines. None: no backend needs one.

        Args:
            entrypoint: the entrypoint of the launch.

        Raises:
            ValueError: two backends would install different requirements.
        """
        made = {place.backend: package for place, each in self.installed if (package := each.package(entrypoint))}
        for (one, its), (another, theirs) in pairwise(made.items()):
            if differing := sorted({*its.requirements} ^ {*theirs.requirements}):
                has, lacks = (one, another) if differing[0] in its.requirements else (another, one)
                raise ValueError(
                    f"Backend {has!r} installs {differing[0]!r}, and {lacks!r} does not, but replicas of one run have "
                    "the same requirements. Give both the same pip, or use an image or environment that has them."
                )
        return next(iter(made.values()), None)

    def describe_start(self, start: StartSpec, requirements: Sequence[str] = ()) -> dict[str, Any]:
        """Return the request that the backend would send. With several backends: one request for each, by name."""
        asked = {
            place.backend: backend.describe_start(
                replace(
                    start if self._only is not None else start.with_spec(ranks=place.ranks),
                    timeout_s=backend.default_timeout_s if start.timeout_s is None else start.timeout_s,
                ),
                requirements,
            )
            for place, backend in self.installed
        }
        return asked if self._only is None else next(iter(asked.values()))

    # --- starting ranks of a run

    def start_ranks(self, start: StartSpec, on_progress: Callable[[str], None] = no_progress) -> list[ReplicaHandle]:
        """Start ranks at their backends, all at the same time; see `Backend.start_ranks`.

        Raises:
            LaunchError: too few replicas could be started. The started replicas have been ended, on every backend.
        """
        if self._only is not None:  # this also starts spares, whose numbers are not ranks
            return self._start_at(self._only, start.ranks, start, on_progress)
        ranks: dict[PlacedBackend, list[int]] = {}
        for rank in start.ranks:
            ranks.setdefault(self.at(rank), []).append(rank)
        # The backend of a part is made when the part starts. If one backend is not installed, the other parts still
        # start.
        parts = [
            Part(placed.placement.backend, tuple(its), functools.partial(self._start_at, placed, tuple(its), start))
            for placed, its in ranks.items()
        ]
        # One backend ends its own replicas if the start fails. With several, the other backends' replicas are ended,
        # too.
        return parts[0].start(on_progress) if len(parts) == 1 else start_parts(self, start.spec, parts, on_progress)

    def _start_at(
        self, placed: PlacedBackend, ranks: tuple[int, ...], start: StartSpec, on_progress: Callable[[str], None]
    ) -> list[ReplicaHandle]:
        """Start the ranks of one placement. Values that the start does not set come from the placement.

        Args:
            placed: the placement.
            ranks: the ranks to start.
            start: the whole start, of which these ranks are a part.
            on_progress: called with a short text on the progress.
        """
        place = placed.placement
        backend = placed.backend if self._only is not None else check_single_ranks(placed.backend)
        settings, needed = start.spec.settings, start.spec.settings.min_replicas
        if needed is not None:  # if all other ranks start, this part needs only the rest of `min_replicas`
            needed = min(max(1, needed - (len(start.ranks) - len(ranks))), len(ranks))
        limit_s = place.timeout_s or backend.default_timeout_s if start.timeout_s is None else start.timeout_s
        order = replace(start, gpu=place.gpu if start.gpu is None else start.gpu, timeout_s=limit_s)
        order = order.with_spec(ranks=ranks, lease_s=None if start.spec.lease_s is None else backend.lease_s)
        chaos = settings.chaos if place.backend == "local" else ()
        return backend.start_ranks(order.with_settings(min_replicas=needed, chaos=chaos), on_progress)

    # --- the five methods of the protocol

    def launch_replicas(self, *asked: Any, **more: Any) -> list[ReplicaHandle]:
        """Raise an error, because `executors.launch()` must begin a run on several backends.

        Raises:
            ValueError: always.
        """
        raise ValueError("A run on several backends begins with executors.launch().")

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return the replica's status. It comes from the store if the backend is not installed on this machine."""
        if (backend := self._backend_of(handle)) is not None:
            return backend.poll(handle)
        attempt = Attempt.from_handle(handle, handle.backend_name).newest()
        if (outcome := attempt.outcome()) is not None:
            return outcome.status
        return ReplicaStatus.RUNNING if attempt.has_started() else ReplicaStatus.PENDING

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return the last lines of the replica's output, or the reason why they are not available on this machine."""
        if (backend := self._backend_of(handle)) is not None:
            return backend.stream_logs(handle, n_lines=n_lines)
        return f"replicas: {self._why_missing(handle.rank)}"

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica.

        If its backend is not installed on this machine, the replica reads a cancel marker in the store and ends.
        """
        if (backend := self._backend_of(handle)) is not None:
            backend.cancel(handle)
            return
        attempt = Attempt.from_handle(handle, handle.backend_name).newest()
        attempt.request_cancel()
        if not attempt.has_started():  # a replica that starts later reads the marker
            attempt.record(attempt.new_outcome(ReplicaStatus.CANCELLED, "cancelled"))

    def collect(self, handles: list[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for the replicas' outcomes, and return them in the order of `handles`."""
        if self._only is not None:
            return self._only.backend.collect(handles, timeout=timeout)
        return collect_rows(self.poll, self.backend_name, handles, timeout)

    # --- replicas that were started

    def observe(self, replicas: Sequence[PendingReplica]) -> list[Observation]:
        """Return the backends' observations of several replicas.

        If a backend is not installed, its replicas get this as a note.
        """
        return self._in_groups(
            replicas, lambda backend, some: backend.observe(some), lambda error: Observation(doing=str(error))
        )

    def supervisors(self, replicas: Sequence[PendingReplica]) -> list[SupervisorStatus]:
        """Return the state of supervisors. They count as alive if their backend is not installed on this machine."""
        return self._in_groups(
            replicas, lambda backend, some: backend.supervisors(some), lambda _: SupervisorStatus(is_alive=True)
        )

    def open_log(self, handle: ReplicaHandle) -> Log:
        """Return the log of the attempt that a handle names, or a log that gives the reason why it is not available."""
        if (backend := self._backend_of(handle)) is not None:
            return backend.open_log(handle)
        return TailedLog(lambda n_lines: self.stream_logs(handle, n_lines=n_lines))

    def find_handle(self, handle: ReplicaHandle, *, insists: bool = False) -> ReplicaHandle | None:
        """Find a replica that has no handle yet. None if there is no such replica, or if its backend is not installed
        on this machine.
        """
        backend = self._backend_of(handle)
        return None if backend is None else backend.find_handle(handle, insists=insists)

    # --- ending

    def end_jobs(self, run: JobsOfRun, on_progress: Callable[[str], None] = lambda words: None) -> EndedJobs:
        """End the jobs of a run at all its services, in parallel; see `Backend.end_jobs`."""
        asked = [backend for backend in self._backends() if backend.ends_jobs]
        return sum(in_parallel(lambda backend: backend.end_jobs(run, on_progress), asked), EndedJobs())

    def commands_to_end(self, run_id: str) -> str:
        """Return the shell commands that end the jobs at all services of the run; see `Backend.commands_to_end`."""
        asked = [backend for backend in self._backends() if backend.ends_jobs]
        return "   ".join(dict.fromkeys(backend.commands_to_end(run_id) for backend in asked))

    def _in_groups(
        self,
        replicas: Sequence[PendingReplica],
        ask: Callable[[Backend, Sequence[PendingReplica]], Sequence[T]],
        instead: Callable[[BackendError], T],
    ) -> list[T]:
        """Ask each backend about its own replicas, and return the answers in the order of the replicas.

        Args:
            replicas: the replicas, at any of the backends.
            ask: asks one backend about its replicas.
            instead: returns the answer for a replica whose backend fails or is not installed. It is used if there are
                several.
        """
        if self._only is not None:  # an error of the only backend is raised
            return [*ask(self._only.backend, replicas)]
        groups: dict[PlacedBackend, list[int]] = {}
        for index, each in enumerate(replicas):
            groups.setdefault(self.at(each.handle.rank), []).append(index)
        found: dict[int, T] = {}
        for placed, indexes in groups.items():
            try:
                answers = list(ask(check_single_ranks(placed.backend), [replicas[index] for index in indexes]))
            except UnknownHandleError:  # the caller must find the replica with the wrong handle
                raise
            except BackendError as error:
                answers = [instead(error) for _ in indexes]
            found |= dict(zip(indexes, answers, strict=True))
        return [found[index] for index in range(len(replicas))]

    def _why_missing(self, rank: int) -> str:
        try:
            check_single_ranks(self.at(rank).backend)
        except BackendError as error:
            return str(error)
        return ""


def as_placements(executor: ServerlessExecutor, n: int) -> Placements:
    """Return the placements of a new launch.

    Args:
        executor: the executor that the user gives. Placements are returned unchanged.
        n: the number of replicas.

    Example:
        as_placements(LocalProcessExecutor(), 4).ranks  # [0, 1, 2, 3]
    """
    if isinstance(executor, Placements):
        return executor
    backend = as_backend(executor)
    place = Placement(**describe_executor(executor), ranks=tuple(range(n)))
    return Placements([PlacedBackend(place, lambda: backend)])


def check_single_ranks(backend: Backend) -> Backend:
    """Return the backend if it can start single ranks.

    Args:
        backend: the backend.

    Raises:
        BackendError: it starts all ranks or none.

    Example:
        check_single_ranks(as_backend(executor))
    """
    if not backend.starts_single_ranks:
        raise BackendError(
            f"Backend {backend.backend_name!r} starts all ranks or none; it cannot be one of several in a run."
        )
    return backend


def known_supervisors(backend: Backend, replicas: Sequence[PendingReplica]) -> list[SupervisorStatus]:
    """Return the state of each supervisor, as far as it is known.

    If a handle names the job of another replica, this replica counts as supervised. The other answers are not affected.

    Args:
        backend: the backend, or the placements of the run.
        replicas: replicas that have ended.

    Example:
        known_supervisors(run.placements, [PendingReplica(handle, attempt=0)])
    """
    try:
        return backend.supervisors(replicas)
    except (CorruptObjectError, UnknownHandleError):
        if len(replicas) > 1:  # asking for each replica alone finds the one with the wrong handle
            return [found for each in replicas for found in known_supervisors(backend, [each])]
        return [SupervisorStatus(is_alive=True) for _ in replicas]
