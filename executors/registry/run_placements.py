"""Reads the placements of a run from its records: the launch, and each later addition of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from executors.backend import Backend, as_backend, as_executor
from executors.errors import UnknownHandleError
from executors.protocol import ServerlessExecutor
from executors.registry import describe_executor, executor_class, executor_of_record, get_executor, is_given
from executors.registry.placements import PlacedBackend, Placements
from executors.registry.run_index import as_noted
from executors.store import Store
from executors.task.addition_record import Addition, read_additions
from executors.task.record import Placement, RunRecord

GivenExecutor = ServerlessExecutor | Sequence[ServerlessExecutor] | str | None
"""An executor that a user gives to find a run, or several, or the name or class of one."""


def executors_in(given: GivenExecutor) -> list[Any]:
    """Return the given executors as a list. An element may also be the name or the class of an executor.

    Args:
        given: the executors of the user. If it is the `executor` of a run on several backends, its parts are returned.

    Example:
        executors_in([SlurmExecutor(), ModalExecutor()])
    """
    if isinstance(given, Placements):
        return [as_executor(backend) for _, backend in given.installed]
    if isinstance(given, list | tuple):
        return [*given]
    return [] if given is None else [given]


class RunPlacements(Placements):
    """The placements of one run, as far as they were read from its records.

    Args:
        store: the store of the run.
        run_id: its id.
        record: returns the run's record.
        given: an executor that the user gave, or several, or the name or class of one. It starts the ranks of the
            launch on its backend, and also added ranks that have the same options.
        options: returns the options that this machine noted for an executor, by the name of its placement. None: no
            note.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        record: Callable[[], RunRecord],
        given: GivenExecutor,
        options: Callable[[str], Mapping[str, Any] | None],
    ) -> None:
        super().__init__()
        self._store = store
        self._run_id = run_id
        self._record = record
        self._options = options
        self._named = given if isinstance(given, str) else None
        self._given: Sequence[Backend] = ()
        self._of_places: dict[str, Backend] = {}
        if isinstance(given, Placements) and len(given.placed) > 1:
            self._of_places = {place.name: backend for place, backend in given.installed}
        elif not isinstance(given, str):
            self._given = [as_backend(each, store) for each in executors_in(given)]
        self._launched: list[PlacedBackend] = []
        self._additions: list[Addition | None] = []
        self._added: list[PlacedBackend] = []
        self._reading = threading.Lock()
        self._added_here: set[str] = set()
        self.trusts_store = False
        """True if the user trusts the records of the store, as with --trust-bucket."""
        self.named: frozenset[int] = frozenset()
        """Ranks that the user has named to be started."""
        self._by_rank: dict[int, PlacedBackend] = {}

    @property
    def placed(self) -> Sequence[PlacedBackend]:
        """All placements that are known: first the launch's, then each addition."""
        if not self._launched:
            self._launched = [self._placed(place) for place in self._record().placements]
        return [*self._launched, *self._added]

    @property
    def given(self) -> Sequence[Backend]:
        """The backends that the user named or gave, for which no record of the run is needed.

        Raises:
            BackendError: the backend of this name is not installed on this machine.
        """
        named = [] if self._named is None else [as_backend(get_executor(self._named), self._store)]
        return [*named, *self._given, *self._of_places.values()]

    @property
    def groups(self) -> Sequence[Placements]:
        """The placements in groups that were started with the same values: the launch, and each addition."""
        places = self.placed
        n = len(self._launched)
        return [self.some(places[:n]), *(self.some([placed]) for placed in places[n:])]

    def at(self, rank: int) -> PlacedBackend:
        """Return the placement of a rank.

        Args:
            rank: the number of a replica.

        Raises:
            UnknownHandleError: no placement that is known has this rank.

        Example:
            run.placements.at(3).backend
        """
        placed = self._at.get(rank)
        if placed is None:
            raise UnknownHandleError(f"Run {self._run_id!r} has no rank {rank}.")
        return placed

    # --- ranks that were added

    def learn(self, ranks: Iterable[int]) -> None:
        """Read new additions if none of the known placements has one of these ranks.

        Args:
            ranks: ranks that have written something to the store.

        Example:
            placements.learn([4, 5])
        """
        if {*ranks} - self._at.keys():
            self.read_added()

    def read_added(self) -> None:
        """Read the additions that were recorded since the last call.

        Example:
            placements.read_added()
        """
        with self._reading:  # so that two threads do not read the same addition twice
            for added in read_additions(self._store, self._run_id, self._record().world_size, self._additions):
                self._additions.append(added)
                if added is not None:
                    self._added.append(self._placed(added))

    def additions(self) -> list[Addition]:
        """Read the new additions, and return the records of all additions that can be read.

        Example:
            placements.additions()[-1].ranks
        """
        self.read_added()
        return [added for added in self._additions if added is not None]

    def add(self, added: Addition, backend: Backend) -> None:
        """Note the backend with which this process adds ranks.

        Args:
            added: the record of the ranks.
            backend: their backend.

        Example:
            placements.add(added, backend)
        """
        self._of_places[added.name] = backend
        self._added_here.add(added.name)
        self.read_added()

    def may_start(self, rank: int) -> bool:
        """Return True if this machine is allowed to start replicas at the placement of a rank.

        The task's digest proves the placements of the launch. An addition is trusted if this process or this machine
        made it. Otherwise any process that can write to the bucket could start jobs on the account of each user
        who watches the run.

        Args:
            rank: the number of a replica.

        Example:
            run.placements.may_start(4)
        """
        place = self.at(rank).placement
        is_ours = not isinstance(place, Addition) or self.is_added_here(place)
        return is_ours or rank in self.named or self.trusts_store

    def is_added_here(self, place: Addition) -> bool:
        """Return True if this process or this machine added these ranks, and the record was not changed since.

        Args:
            place: the record of an addition.

        Example:
            placements.is_added_here(added)
        """
        return place.name in self._added_here or self._options(place.name) is not None

    # --- options of executors

    def options_of(self, backend: str) -> Mapping[str, Any]:
        """Return the options with which the executor of a backend is made on this machine.

        Args:
            backend: the name of the backend, or its class as "pkg.mod:Class".

        Raises:
            BackendError: the backend is not installed on this machine.

        Example:
            run.placements.options_of("slurm")
        """
        name = _backend_name(backend)
        found = [placed for placed in self.placed if placed.placement.backend == name]
        if not found and ":" in backend:  # the class alone may not know the name of its backend
            found = [*self.placed]
        return found[0].backend.options_to_keep if found else {}

    def known_options(self, place: Placement) -> Collection[str]:
        """Return the names of the options with which a placement's executor is made on this machine.

        Args:
            place: the placement.

        Example:
            run.placements.known_options(run.placements.at(0).placement)
        """
        if (given := self._given_for(place)) is not None:
            return {name for name, value in given.options_to_keep.items() if is_given(value)}
        return self._options(place.name) or ()

    @property
    def _at(self) -> Mapping[int, PlacedBackend]:
        if (places := self.placed) and sum(len(placed.placement.ranks) for placed in places) != len(self._by_rank):
            self._by_rank = {rank: placed for placed in places for rank in placed.placement.ranks}
        return self._by_rank

    def _placed(self, place: Placement) -> PlacedBackend:
        return PlacedBackend(place, lambda: self._backend_for(place))

    def _backend_for(self, place: Placement) -> Backend:
        if (given := self._given_for(place)) is not None:
            return given
        named = self._named
        if named is not None and len(self.placed) > 1 and _backend_name(named) != place.backend:
            named = None
        return as_backend(executor_of_record(place, named=named, options=self._options(place.name)), self._store)

    def _given_for(self, place: Placement) -> Backend | None:
        """Return the backend that the user gave for a placement. None if the user gave none that fits.

        The backend must be the same object. Another executor of the same kind may not know the placement's jobs, or may
        start the next job in another cluster.
        """
        if place.name in self._of_places:
            return self._of_places[place.name]
        given = next((each for each in self._given if each.backend_name == place.backend), None)
        if given is None or not isinstance(place, Addition):
            return given
        if (noted := self._options(place.name)) is not None:
            is_same = as_noted(given.options_to_keep) == noted
        elif any(each.backend == place.backend for each in self._record().placements):
            described = describe_executor(as_executor(given))
            is_same = described == {name: getattr(place, name) for name in described} and not place.unrecorded_options
        else:
            is_same = True  # the user gives it for this placement, which is the only one of its backend
        return given if is_same else None


def _backend_name(named: str) -> str:
    """Return the name of the backend that the user named, by its name or class."""
    return str(getattr(executor_class(named), "backend_name", named)) if ":" in named else named
