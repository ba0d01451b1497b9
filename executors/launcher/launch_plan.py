"""`plan_launch()` checks a launch. The `LaunchPlan` that it returns writes and starts the run, or describes both."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from executors.backend import affordable_s, as_executor, no_progress
from executors.errors import BackendError, RunExistsError
from executors.launcher.checks import (
    check_command,
    check_directory,
    check_environment,
    check_faults,
    check_named,
    check_pickle,
    check_procs,
    check_rules,
    check_spares,
    check_working_directory,
    resolved,
    with_package,
    with_policy,
    with_tracker,
)
from executors.launcher.source_run import find_source_run
from executors.module_search import describe_hidden
from executors.notices.targets import needs_apprise, resolve_targets
from executors.protocol import ServerlessExecutor
from executors.registry import check_executor, describe_executor, get_executor, import_path
from executors.registry.placements import Placements, as_placements
from executors.registry.run_index import KNOWN_BY, local_store, locate, remember_launch
from executors.restarts.orders import abandon_run
from executors.settings import GATHER_S
from executors.settings.notify import KINDS
from executors.settings.run_spec import StartSpec
from executors.shipping.checkout import Checkout, GitQuery
from executors.shipping.script_header import check_python, script_header, script_of
from executors.store import open_store
from executors.store.record_names import RUN_RECORD, run_exists
from executors.store.records import to_bytes
from executors.store.state_folder import state_path
from executors.store.url import address_of, default_rendezvous, directory_of, new_run_id, shared_rendezvous
from executors.task.code_package import Package
from executors.task.create import NewRun, plan_run, write_run
from executors.task.launch_request import LaunchRequest
from executors.task.record import RunRecord

if TYPE_CHECKING:
    from executors.run.run import Run

NEEDED_SOON = ("executors.run.run", "executors.store.file", "platformdirs")


class DryRunDocument(TypedDict):
    """A launch that was checked and not started. Values of environment variables are masked."""

    dry_run: bool
    """True."""
    run_id: str
    """The name that the run would have."""
    url: str
    """The address that the run would have."""
    executor: str
    """The class of the executor, as `package.module:Class`."""
    timeout_s: float | None
    """The time limit of each replica, in seconds. Null: none."""
    usd_per_hour: float | None
    """The price of all replicas, in US dollars per hour. Null: not known."""
    run_record: dict[str, Any]
    """The record of the run, as it would be stored. `settings` has one field for each setting, such as `procs`: the
    number of processes of each replica, null for one."""
    task_record: dict[str, Any]
    """The record of the task, as it would be stored. `entrypoint` names a function or script. Without it, `command` has
    the words of a command."""
    request: dict[str, Any]
    """The request to the backend. With several backends: a request for each, by name."""


@dataclass(frozen=True)
class LaunchPlan:
    """A launch that was checked, and has neither written nor started anything."""

    request: LaunchRequest
    """The request of the user. All defaults are filled in, except `run_id`."""
    placements: Placements
    """The backends, each with the ranks that it starts."""
    run_id: str
    package: Package | None
    checkout: Checkout
    """The state of the code that is launched, as Git reports it."""
    key: str | None = field(default=None, repr=False)
    """The key of the signed run that this run starts from. This run has the same key. None: it starts from none."""

    def start(self, on_progress: Callable[[str], None] = no_progress) -> Run:
        """Write the run and start its replicas.

        If the task cannot be written, nothing is left of the run. If the start fails later, the run is left cancelled.

        Args:
            on_progress: called with a few words on the progress, if the start takes long. Default: nothing is reported.

        Raises:
            RunExistsError: the chosen run id is taken.
            LaunchError: too few replicas could be started. Those that were started have been ended.
            BackendError: the backend cannot be used.
            StoreError: the rendezvous cannot be used.

        Example:
            run = plan_launch(LaunchRequest.of("train.py:main", n=4), "local").start()
        """
        from executors.restarts.lease import new_lease, with_lease
        from executors.run.run import Run, manager_of, view_of
        from executors.run.start_attempts import StartPlan, start_attempts

        request, placements, settings = self.request, self.placements, self.request.settings
        store = local_store() if request.rendezvous is None else open_store(request.rendezvous)
        known = None if request.run_id is None else locate(self.run_id)
        if known is not None and (known != store.url or run_exists(store, self.run_id)):
            raise _exists(self.run_id, known)
        new = self._planned(store.url)
        if note := self.installation_note():
            print(f"replicas: {note}", file=sys.stderr)
        write_run(store, self.run_id, new)
        spec = with_lease(new.spec, placements.lease_s, detach=settings.detach)
        if spec.notify and (price := self.usd_per_hour()) is not None:
            spec = replace(spec, usd_per_hour=price / (settings.n + settings.spares))
        start = StartSpec(spec, request.entrypoint, settings.gpu, settings.timeout)

        def prepare() -> None:
            remember_launch(spec, *placements.options_to_note())
            if request.rendezvous is None and placements.needs_shared_rendezvous is None:
                name = placements.backend_name
                print(f"replicas: the replicas of backend {name!r} must see {store.url}", file=sys.stderr)

        started = start_attempts(
            StartPlan(
                store=store,
                backend=placements,
                orders=[start],
                lease=new_lease(store, spec),
                prepare=prepare,
                undo=lambda error, _: abandon_run(store, self.run_id, settings.n, error),
            ),
            on_progress,
        )
        handles = [started.handles.get(rank) for rank in range(settings.n)]
        run = Run(store, self.run_id, executor=placements, handles=handles)
        # The record as it was written. Another process may have changed the record in the store since then.
        view_of(run).record = RunRecord.parse(to_bytes(new.record))
        if not settings.detach and placements.knows_attempts:
            manager_of(run).restart_here([start.with_settings(spares=0)], started.lease)
        if not settings.detach:
            manager_of(run).notify_here(spec)
        return run

    def usd_per_hour(self) -> float | None:
        """Return the price of all replicas in US dollars per hour. None if the price is not known at the moment."""
        settings = self.request.settings
        with contextlib.suppress(BackendError):
            if (price := self.placements.price_per_hour(settings.gpu)) is not None:
                return price * (settings.n + settings.spares)
        return None

    def installation_note(self) -> str:
        """Return a sentence if each container first installs torch, with advice on how to avoid that. Otherwise return
        an empty text.
        """
        return "" if self.package is None else self.placements.installation_note(self.package.requirements)

    def dry_run(self) -> DryRunDocument:
        """Make the last checks of `start`, and return as JSON the records and the request that `start` would make.

        Values of environment variables are masked.

        Raises:
            RunExistsError: the chosen run id is taken.
            StoreError: the rendezvous cannot be used.
            EntrypointError: the task cannot be sent to replicas.
        """
        settings, placements, url = self.request.settings, self.placements, self._check_store()
        new = self._planned(url)
        requirements = () if self.package is None else self.package.requirements
        start = StartSpec(new.spec, self.request.entrypoint, settings.gpu, settings.timeout)
        asked = placements.describe_start(start, requirements)
        return {
            "dry_run": True,
            "run_id": self.run_id,
            "url": address_of(url, self.run_id),
            "executor": import_path(placements.executor),
            "timeout_s": settings.timeout,
            "usd_per_hour": self.usd_per_hour(),
            "run_record": new.record,
            "task_record": json.loads(new.task),
            "request": asked,
        }

    def _planned(self, store_url: str) -> NewRun:
        """Compose the run and its task."""
        # A backend may have completed its options while it checked the launch, such as the user's namespace.
        places = [
            replace(each.placement, **describe_executor(as_executor(each.backend))) for each in self.placements.placed
        ]
        about = self.checkout.about
        return plan_run(self.request, self.run_id, store_url, places, self.package, code=about, key=self.key)

    def _check_store(self) -> str:
        """Check the rendezvous and the run id, and return the url of the rendezvous. A directory is not changed."""
        known_here = state_path() / self.run_id
        if any(os.path.isfile(known_here / name) for name in KNOWN_BY):
            raise RunExistsError(f"Run {self.run_id!r} exists. Choose another run id, or `replicas rm {self.run_id}`.")
        rendezvous = state_path() if self.request.rendezvous is None else self.request.rendezvous
        directory = directory_of(rendezvous)
        if directory is None:
            store = open_store(rendezvous)
            taken, url = run_exists(store, self.run_id), store.url
        else:
            check_directory(directory.absolute())
            taken, url = os.path.isfile(directory / self.run_id / RUN_RECORD), directory.absolute().as_uri()
        if taken:
            raise RunExistsError(f"Run {self.run_id!r} exists at {url}. Choose another run id.")
        return url


def _check_is_free(run_id: str, given: str | Path | None) -> None:
    """Refuse a run id that is taken, before the code is packed, which may take minutes.

    Another launch may still take the id afterwards. `LaunchPlan.start` refuses that.
    """
    known = locate(run_id) if state_path().is_dir() else None  # a dry run must not create the state directory
    rendezvous = state_path() if given is None else given
    if (directory := directory_of(rendezvous)) is None:
        store = open_store(rendezvous)
        taken, url = run_exists(store, run_id), store.url
        is_elsewhere = known not in (None, url)
    else:
        taken, url = os.path.isfile(directory / run_id / RUN_RECORD), directory.absolute().as_uri()
        noted = None if known is None else directory_of(known)
        # One of the two paths may lead through a symbolic link.
        is_elsewhere = known is not None and (noted is None or noted.resolve() != directory.resolve())
    if taken or is_elsewhere:
        raise _exists(run_id, known or url)


def _exists(run_id: str, url: str) -> RunExistsError:
    return RunExistsError(
        f"Run {run_id!r} exists at {url}. Look at it with executors.attach({run_id!r}) or `replicas status {run_id}`. "
        f"Choose another run id, or `replicas rm {run_id}`."
    )


def plan_launch(
    request: LaunchRequest, executor: str | ServerlessExecutor, *, has_new_name: bool = False
) -> LaunchPlan:
    """Check everything about a launch except its store. Raises the same errors as `launch`.

    Args:
        request: the request of the user.
        executor: the executor, or its name.
        has_new_name: True if the run id of the request was made for this launch, so that no other run can have it.
            Default: the store is asked whether it has the run.
    """
    check_working_directory()
    given = get_executor(executor) if isinstance(executor, str) else check_executor(executor)
    placements = as_placements(given, request.settings.n)
    if request.settings.min_replicas is None and request.settings.gather_s != GATHER_S:
        raise ValueError(
            "gather_s= (--gather) has an effect only with min_replicas= (--min-replicas). Give both, or remove it."
        )
    # The URLs are checked first, because a run that cannot report must not start.
    if request.notify:
        request = replace(request, notify=resolve_targets(request.notify))
    request = resolved(request)
    if request.notify and request.settings.notify_on is None:
        request = request.with_settings(notify_on=",".join(KINDS))  # its record shows that the run sends notifications
    settings = request.settings
    rendezvous, timeout = request.rendezvous, settings.timeout
    if placements.needs_shared_rendezvous:
        rendezvous = shared_rendezvous(placements.backend_name, rendezvous, request.entrypoint, settings.n)
    if settings.max_cost is not None:
        affordable = affordable_s(placements, settings.n + settings.spares, settings.gpu, settings.max_cost)
        timeout = affordable if timeout is None else min(timeout, affordable)
    if timeout is None:
        timeout = placements.default_timeout_s
    check_environment(placements, request)
    request = with_policy(placements, request)
    if (script := script_of(request.entrypoint)) is not None:
        check_python(script_header(script), script)
        if words := describe_hidden(script):
            print(f"replicas: {words}", file=sys.stderr)
    check_rules(placements, request)
    check_spares(placements, request)
    check_procs(placements, request)
    check_command(placements, request)
    key = None
    if settings.from_run is not None:
        request, key = find_source_run(request, placements)
    check_pickle(placements, request)
    check_named(request)
    chaos = tuple(check_faults(placements, request)) if settings.chaos else ()
    request = replace(request, rendezvous=rendezvous).with_settings(timeout=timeout, chaos=chaos)
    settings = request.settings
    names: Any = {"env": list(request.env or ()), "secrets": settings.secrets}
    placements = placements.with_limits(gpu=settings.gpu, timeout_s=timeout, **names)
    if request.run_id is not None and not has_new_name:
        _check_is_free(request.run_id, rendezvous)
    with contextlib.closing(GitQuery(Path.cwd())) as look:
        placements.warm_up(request.entrypoint)
        for module in NEEDED_SOON:  # while this process imports, other processes warm up and ask git
            importlib.import_module(module)
        placements.check_launch(request)
        package = placements.package(request.entrypoint)
        if package is not None and rendezvous is None:  # for other machines, which see the directories of this machine
            request = replace(request, rendezvous=default_rendezvous())
        if package is not None and settings.tracker is not None:
            package = with_tracker(package, settings.tracker)
        if package is not None and any(map(needs_apprise, request.notify)):
            package = with_package(package, "apprise")
        return LaunchPlan(request, placements, request.run_id or new_run_id(), package, look.result(), key)
