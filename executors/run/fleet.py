"""Where the replicas of a run are, and the executor that each of them goes by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from executors.errors import BackendError, UnknownHandleError
from executors.native import KeepsOptions, NativeExecutor, restarts_replicas
from executors.protocol import ServerlessExecutor
from executors.registry import executor_class, executor_of_record, is_given
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
        given: the executors, or the names or classes of some, that a person gave, each for its backend.
        options: what this machine noted of the options of a placement's executor, by its backend if it is of the
            launch, else by `Added.name`; None: nothing.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        record: Callable[[], RunRecord],
        given: Sequence[ServerlessExecutor | str],
        options: Callable[[str], Mapping[str, Any] | None],
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._record = record
        self._given = given
        self._options = options
        self._launched: list[Site] = []
        self._additions: list[Added | None] = []
        self._added: list[Site] = []
        self._own: dict[str, ServerlessExecutor] = {}
        self.trusts_store = False
        """Whether a person has said that what the store says is to be started."""
        self.named: frozenset[int] = frozenset()
        """Ranks that a person has said are to be started."""
        self._by_rank: dict[int, Site] = {}

    @property
    def sites(self) -> Sequence[Site]:
        """All that are known, those of the launch first."""
        if not self._launched:
            self._launched = [self._site(place, place.backend) for place in self._record().placements]
        return [*self._launched, *self._added]

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
        for added in read_added(self._store, self._run_id, self._record().world_size, self._additions):
            self._additions.append(added)
            if added is not None:
                self._added.append(self._site(added, added.name))

    def add(self, added: Added, executor: NativeExecutor) -> None:
        """Note which executor this process itself adds ranks with."""
        self._own[added.name] = executor
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
        return place.name in self._own or self._options(place.name) is not None

    @property
    def backends(self) -> str:
        """Name the backend that all are on, or each with the number of its ranks, as in `slurm:4,modal:4`."""
        numbers: dict[str, int] = {}
        for site in self.sites:
            place = site.placement
            numbers[place.backend] = numbers.get(place.backend, 0) + len(place.ranks)
        return next(iter(numbers)) if len(numbers) == 1 else ",".join(f"{name}:{n}" for name, n in numbers.items())

    def options_of(self, backend: str) -> Mapping[str, Any]:
        """Return the options of the executor of a backend, as it is made here."""
        site = next((site for site in self.sites if site.placement.backend == backend), self.sites[0])
        return site.executor.options_to_keep if isinstance(site.executor, KeepsOptions) else {}

    def known_options(self, site: Site) -> Collection[str]:
        """Name the options that a placement's executor is made with here."""
        place = site.placement
        if place.backend in {each.backend_name for each in self._given if not isinstance(each, str)} and isinstance(
            site.executor, KeepsOptions
        ):
            return {name for name, value in site.executor.options_to_keep.items() if is_given(value)}
        return self._options(place.name if isinstance(place, Added) else place.backend) or ()

    @property
    def _at(self) -> Mapping[int, Site]:
        if (sites := self.sites) and sum(len(site.placement.ranks) for site in sites) != len(self._by_rank):
            self._by_rank = {rank: site for site in sites for rank in site.placement.ranks}
        return self._by_rank

    def _site(self, place: Placement, name: str) -> Site:
        return Site(place, lambda: self._executor_for(place, name))

    def _executor_for(self, place: Placement, name: str) -> ServerlessExecutor:
        if name in self._own:
            return self._own[name]
        for given in self._given:
            if isinstance(given, str):
                if len(self.sites) == 1 or _backend_of(given) == place.backend:
                    return executor_of_record(place, named=given, options=self._options(name))
            elif given.backend_name == place.backend:
                return given
        return executor_of_record(place, options=self._options(name))


def _backend_of(named: str) -> str:
    """Return the backend of an executor that a person named, by its backend or class."""
    return str(getattr(executor_class(named), "backend_name", named)) if ":" in named else named


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
