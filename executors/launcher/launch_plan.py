"""A launch that was checked: what it would write and ask for, and its start."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executors.backend import as_executor
from executors.errors import BackendError, RunExistsError, StoreError
from executors.launcher.checks import (
    check_chaos,
    check_directory,
    check_environment,
    check_named,
    check_pickle,
    check_spares,
    check_working_directory,
    resolved,
    with_policy,
    with_tracker,
)
from executors.launcher.source_run import check_source
from executors.module_search import describe_hidden
from executors.protocol import ServerlessExecutor
from executors.registry import check_executor, describe_executor, get_executor, import_path
from executors.restarts.orders import abandon_run
from executors.run.placements import Placements, as_placements
from executors.run.prices import affordable_s, usd_per_hour
from executors.run.run_index import KNOWN_BY, keep_key, local_store, locate, remember
from executors.settings import GATHER_S
from executors.shipping.checkout import Checkout, GitQuery
from executors.shipping.script_header import check_python, script_header, script_of
from executors.store import open_store
from executors.store.parallel import within
from executors.store.record_names import RUN_RECORD, run_exists
from executors.store.records import to_bytes
from executors.store.run_key import drop_key, hold_key
from executors.store.state_folder import state_path
from executors.store.url import address_of, default_rendezvous, directory_of, new_run_id, shared_rendezvous
from executors.task.code_package import Package
from executors.task.create import NewRun, plan_run, write_run
from executors.task.launch_request import LaunchRequest
from executors.task.record import RunRecord

if TYPE_CHECKING:
    from executors.run.run import Run

STORE_S = 20.0  # how long a store is waited for once a launch has failed, or has nothing left but to tidy up
NEEDED_SOON = ("executors.run.run", "executors.store.file", "platformdirs")


@dataclass(frozen=True)
class LaunchPlan:
    """A launch that was checked, and has neither written nor started anything."""

    request: LaunchRequest
    """With everything that was left to the executor or to us filled in, but for `run_id`."""
    placements: Placements
    """Which backend starts which ranks."""
    run_id: str
    package: Package | None
    checkout: Checkout
    """What git says of the code that is launched."""
    key: str | None = field(default=None, repr=False)
    """The key of the signed run that this one starts from, which is its own, too."""

    def start(self, on_progress: Callable[[str], None] = lambda words: None) -> Run:
        """Write the run and start its replicas. If that fails half-way, the run is left cancelled, not waiting.

        Of one whose task could not be written nothing is left.

        Args:
            on_progress: gets a few words on how far the start is, where it takes long.
        """
        from executors.attempt.handles import keep_handles
        from executors.restarts.launch_starter import StartSpec
        from executors.restarts.lease import finish_start, hold_lease, with_lease
        from executors.run.canceller import end_started
        from executors.run.run import Run

        request, placements, settings = self.request, self.placements, self.request.settings
        store = local_store() if request.rendezvous is None else open_store(request.rendezvous)
        known = None if request.run_id is None else locate(self.run_id)
        if known is not None and (known != store.url or run_exists(store, self.run_id)):
            raise RunExistsError(
                f"Run {self.run_id!r} exists at {known}. Look at it with executors.attach({self.run_id!r}) or "
                f"`replicas status {self.run_id}`. Choose another run id, or `replicas rm {self.run_id}`."
            )
        new = self._planned(store.url)
        if note := self.installation_note():
            print(f"replicas: {note}", file=sys.stderr)
        write_run(store, self.run_id, new)
        spec = new.spec
        lease = None
        is_asked = False
        try:
            options, more = placements.options_to_note()
            remember(self.run_id, store.url, spec.task_digest, options, settings.secrets, more)
            keep_key(self.run_id, spec.key)
            drop_key(store.url, self.run_id)  # of an earlier run of this id, which was removed
            hold_key(store.url, self.run_id, spec.key)
            limits: Any = {"gpu": settings.gpu, "timeout": settings.timeout}
            args = request.args or {}
            spec = with_lease(spec, placements.lease_s, detach=settings.detach)
            lease = hold_lease(store, spec)
            if request.rendezvous is None and placements.needs_shared_rendezvous is None:
                name = placements.backend_name
                print(f"replicas: the replicas of backend {name!r} must see {store.url}", file=sys.stderr)
            is_asked = True
            started = placements.launch_replicas(
                settings.n, request.entrypoint, args, **limits, run=spec, on_progress=on_progress
            )
            # The handles of a five-verb executor may be objects of any type. They come in the order of the ranks.
            of_ranks = {h.rank: h for h in started} if placements.knows_attempts else dict(enumerate(started))
            handles = [of_ranks.get(rank) for rank in range(settings.n)]
            finish_start(lease, spec)
            with contextlib.suppress(StoreError):  # a copy, which saves requests
                within(STORE_S, lambda: keep_handles(store, self.run_id, 0, handles), store.url)
            run = Run(store, self.run_id, executor=placements, handles=handles)
            run.record = RunRecord.parse(to_bytes(new.record))  # not what the store says by now, which others may write
            if not settings.detach and placements.knows_attempts:
                run.keep_here([StartSpec(spec.with_settings(spares=0), request.entrypoint, limits)], lease)
        except BaseException as error:
            if lease is not None:
                lease.end()
            if is_asked:  # the services first, because the store may not answer
                end_started(placements, spec, error)
            with contextlib.suppress(StoreError):
                cause = error
                within(STORE_S, lambda: abandon_run(store, self.run_id, settings.n, cause), store.url)
            raise
        return run

    def usd_per_hour(self) -> float | None:
        """Return what an hour of all replicas costs in US dollars; None: nobody tells, or not now."""
        settings = self.request.settings
        with contextlib.suppress(BackendError):
            return usd_per_hour(self.placements, settings.n + settings.spares, settings.gpu)
        return None

    def installation_note(self) -> str:
        """Return a sentence if each container first installs torch, with what avoids it; else an empty one."""
        return "" if self.package is None else self.placements.installation_note(self.package.requirements)

    def dry_run(self) -> dict[str, Any]:
        """Check what `start` would still check, and return as JSON what it would write and ask for.

        Values of environment variables are masked.

        Raises:
            RunExistsError: the chosen run id is taken.
            StoreError: the rendezvous cannot be used.
            EntrypointError: the task cannot travel.
        """
        settings, placements, url = self.request.settings, self.placements, self._check_store()
        new = self._planned(url)
        requirements = () if self.package is None else self.package.requirements
        limits: Any = {"gpu": settings.gpu, "timeout": settings.timeout}
        asked = placements.describe_launch(new.spec, **limits, requirements=requirements)
        return {
            "dry_run": True,
            "run_id": self.run_id,
            "url": address_of(url, self.run_id),
            "executor": import_path(placements.executor),
            "timeout_s": settings.timeout,
            "usd_per_hour": self.usd_per_hour(),
            RUN_RECORD: new.record,
            "task/task.json": json.loads(new.task),
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
        """Check the rendezvous and the run id, leaving a directory as it is; return the url."""
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


def plan_launch(request: LaunchRequest, executor: str | ServerlessExecutor) -> LaunchPlan:
    """Check everything about a launch but its store. Raises what `launch` does."""
    check_working_directory()
    given = get_executor(executor) if isinstance(executor, str) else check_executor(executor)
    placements = as_placements(given, request.settings.n)
    if request.settings.min_replicas is None and request.settings.gather_s != GATHER_S:
        raise ValueError("gather_s= (--gather) waits for what min_replicas= can do without: give both.")
    request = resolved(request)
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
    check_spares(placements, request)
    request, key = check_source(request, placements)
    check_pickle(placements, request)
    check_named(request)
    chaos = tuple(check_chaos(placements, request)) if settings.chaos else ()
    request = replace(request, rendezvous=rendezvous).with_settings(timeout=timeout, chaos=chaos)
    settings = request.settings
    names: Any = {"env": list(request.env or ()), "secrets": settings.secrets}
    placements = placements.with_limits(gpu=settings.gpu, timeout_s=timeout, **names)
    args = request.args or {}
    with contextlib.closing(GitQuery(Path.cwd())) as look:
        placements.warm_up()
        for module in NEEDED_SOON:  # meanwhile other processes warm up, and ask git
            importlib.import_module(module)
        placements.check_launch(
            settings.n, request.entrypoint, args, gpu=settings.gpu, timeout=timeout, secrets=settings.secrets
        )
        package = placements.package(request.entrypoint)
        if package is not None and rendezvous is None:  # for other machines, which see directories of this one
            request = replace(request, rendezvous=default_rendezvous())
        if package is not None and settings.tracker is not None:
            package = with_tracker(package, settings.tracker)
        return LaunchPlan(request, placements, request.run_id or new_run_id(), package, look.result(), key)
