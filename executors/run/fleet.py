"""Where the replicas of a run are, and the executor that each of them goes by."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from executors.errors import BackendError, CorruptObjectError, UnknownHandleError
from executors.native import KeepsOptions, NativeExecutor, Parent, Unfinished, restarts_replicas
from executors.protocol import ServerlessExecutor
from executors.registry import describe_executor, executor_class, executor_of_record, get_executor, is_given
from executors.run.run_index import as_noted
from executors.store import Store
from executors.task.added import Added, read_added
from executors.task.record import Placement, RunRecord


class Site:
    """A placement of a run, and its executor, which is made when it is needed first."""

    def __init__(self, placement: Placement, make: Callable[[], ServerlessExecutor]) -> None:
        self.placement = placement
        self._make = make
        self._executor: ServerlessExecutor | None = None

    @property
    def executor(self) -> ServerlessExecutor:
        """Raises: BackendError: the backend is not to be had here."""
        if self._executor is None:
            self._executor = self._make()
        return self._executor

    @property
    def native(self) -> NativeExecutor:
        """The executor, which can start single ranks.

        Raises:
            BackendError: it cannot, or the backend is not to be had here.
        """
        return check_single_ranks(self.executor)


class Fleet:
    """The placements of one run: those of its launch, and those that were added since, as far as they were read.

    Args:
        record: returns the run's record.
        given: an executor that a person gave, or several, or the name or class of one, for the launch's placement of
            its backend, and for what was added with the same options; or those of placements, by name.
        options: what this machine noted of the options of a placement's executor, by the placement's name; None:
            nothing.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        record: Callable[[], RunRecord],
        given: Sequence[ServerlessExecutor] | str | Mapping[str, ServerlessExecutor],
        options: Callable[[str], Mapping[str, Any] | None],
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._record = record
        self._named = given if isinstance(given, str) else None
        self._given = () if isinstance(given, str | Mapping) else tuple(given)
        self._options = options
        self._launched: list[Site] = []
        self._additions: list[Added | None] = []
        self._added: list[Site] = []
        self._reading = threading.Lock()
        self._of_places = dict(given) if isinstance(given, Mapping) else {}
        self._added_here: set[str] = set()
        self.trusts_store = False
        """Whether a person has said that what the store says is to be started."""
        self.named: frozenset[int] = frozenset()
        """Ranks that a person has said are to be started."""
        self._by_rank: dict[int, Site] = {}

    @property
    def sites(self) -> Sequence[Site]:
        """All that are known, those of the launch first."""
        if not self._launched:
            self._launched = [self._site(place) for place in self._record().placements]
        return [*self._launched, *self._added]

    @property
    def given(self) -> Sequence[ServerlessExecutor]:
        """The executors that the caller named, which need no record of the run to be made.

        Raises:
            BackendError: the backend of this name is not installed on this machine.
        """
        return [get_executor(self._named)] if self._named is not None else list(self._given)

    @property
    def groups(self) -> Sequence[Sequence[Site]]:
        """The same, those that were started with the same values: of the launch, and of each addition."""
        sites = self.sites
        return [sites[: len(self._launched)], *([site] for site in sites[len(self._launched) :])]

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of all placements that are known, in their order."""
        return sorted(rank for site in self.sites for rank in site.placement.ranks)

    def learn(self, ranks: Iterable[int]) -> None:
        """Read what was added since, if one of these ranks is nowhere that is known."""
        if {*ranks} - self._at.keys():
            self.read_added()

    def read_added(self) -> None:
        """Read what was added since."""
        with self._reading:  # of two threads, none adds what the other has added
            for added in read_added(self._store, self._run_id, self._record().world_size, self._additions):
                self._additions.append(added)
                if added is not None:
                    self._added.append(self._site(added))

    def additions(self) -> list[Added]:
        """Read what was added since, and return the records of all additions that can be read."""
        self.read_added()
        return [added for added in self._additions if added is not None]

    def add(self, added: Added, executor: NativeExecutor) -> None:
        """Note which executor this process itself adds ranks with."""
        self._of_places[added.name] = executor
        self._added_here.add(added.name)
        self.read_added()

    def site(self, rank: int) -> Site:
        """Return where a rank is.

        Raises:
            UnknownHandleError: it is nowhere that is known.
        """
        site = self._at.get(rank)
        if site is None:
            raise UnknownHandleError(f"Run {self._run_id!r} has no rank {rank}.")
        return site

    def backend(self, rank: int) -> str:
        """Name the backend that a rank is on."""
        return self.site(rank).placement.backend

    def may_start(self, rank: int) -> bool:
        """Return whether somebody here has said that replicas be started where a rank is.

        The task's digest vouches for the placements of the launch. What was added is believed of this process and this
        machine: else whoever can write to a bucket could have jobs started on the account of whoever watches the run.
        """
        place = self.site(rank).placement
        is_ours = not isinstance(place, Added) or self.is_added_here(place)
        return is_ours or rank in self.named or self.trusts_store

    def is_added_here(self, place: Added) -> bool:
        """Return whether this process or this machine added these ranks, as this very record says."""
        return place.name in self._added_here or self._options(place.name) is not None

    @property
    def backends(self) -> str:
        """Name the backend that all are on, or each with the number of its ranks, as in `slurm:4,modal:4`."""
        numbers: dict[str, int] = {}
        for site in self.sites:
            place = site.placement
            numbers[place.backend] = numbers.get(place.backend, 0) + len(place.ranks)
        return next(iter(numbers)) if len(numbers) == 1 else ",".join(f"{name}:{n}" for name, n in numbers.items())

    def options_of(self, backend: str) -> Mapping[str, Any]:
        """Return the options of the executor of a backend, by its name or class, as it is made here."""
        name = _backend_of(backend)
        found = [site for site in self.sites if site.placement.backend == name]
        if not found and ":" in backend:  # a class need not say its backend's name before it is made
            found = [*self.sites]
        executor = found[0].executor if found else None
        return executor.options_to_keep if isinstance(executor, KeepsOptions) else {}

    def known_options(self, site: Site) -> Collection[str]:
        """Name the options that a placement's executor is made with here."""
        executor = self._given_for(site.placement)
        if isinstance(executor, KeepsOptions):
            return {name for name, value in executor.options_to_keep.items() if is_given(value)}
        return self._options(site.placement.name) or ()

    @property
    def _at(self) -> Mapping[int, Site]:
        if (sites := self.sites) and sum(len(site.placement.ranks) for site in sites) != len(self._by_rank):
            self._by_rank = {rank: site for site in sites for rank in site.placement.ranks}
        return self._by_rank

    def _site(self, place: Placement) -> Site:
        return Site(place, lambda: self._executor_for(place))

    def _executor_for(self, place: Placement) -> ServerlessExecutor:
        if (executor := self._given_for(place)) is not None:
            return executor
        named = self._named
        if named is not None and len(self.sites) > 1 and _backend_of(named) != place.backend:
            named = None
        return executor_of_record(place, named=named, options=self._options(place.name))

    def _given_for(self, place: Placement) -> ServerlessExecutor | None:
        """Return the executor that a person gave for a placement.

        Another of the same backend may know nothing of its jobs, or start the next one in another cluster.
        """
        if place.name in self._of_places:
            return self._of_places[place.name]
        given = next((each for each in self._given if each.backend_name == place.backend), None)
        if given is None or not isinstance(place, Added):
            return given
        if (noted := self._options(place.name)) is not None:
            is_same = as_noted(given.options_to_keep if isinstance(given, KeepsOptions) else {}) == noted
        elif any(each.backend == place.backend for each in self._record().placements):
            described = describe_executor(given)
            is_same = described == {name: getattr(place, name) for name in described} and not place.unrecorded_options
        else:
            is_same = True  # what else would it be for
        return given if is_same else None


def _backend_of(named: str) -> str:
    """Return the backend of an executor that a person named, by its backend or class."""
    return str(getattr(executor_class(named), "backend_name", named)) if ":" in named else named


def parents_of(executor: NativeExecutor, replicas: Sequence[Unfinished]) -> list[Parent]:
    """Return what `NativeExecutor.parents` does; whose handle is another's counts as alive, and hides no other."""
    try:
        return executor.parents(replicas)
    except (CorruptObjectError, UnknownHandleError):
        if len(replicas) > 1:  # whose it is, is found out by asking for each
            return [parent for each in replicas for parent in parents_of(executor, [each])]
        return [Parent(is_alive=True) for _ in replicas]


def check_single_ranks(executor: ServerlessExecutor) -> NativeExecutor:
    """Return an executor that can start single ranks.

    Raises:
        BackendError: it cannot.
    """
    if not isinstance(executor, NativeExecutor) or not restarts_replicas(executor):
        raise BackendError(
            f"Backend {executor.backend_name!r} starts all ranks or none; it cannot be one of several in a run."
        )
    return executor
