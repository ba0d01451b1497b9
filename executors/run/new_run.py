"""Writes a new run for the method `launch_replicas`, which a caller may use without `launch()`."""

from __future__ import annotations

import contextlib

from executors.backend import Backend, as_executor
from executors.errors import StoreError
from executors.registry import describe_executor
from executors.registry.run_index import local_store, remember
from executors.settings.run_spec import StartSpec
from executors.store import open_store
from executors.store.url import default_rendezvous, new_run_id, shared_rendezvous
from executors.task.create import create_run
from executors.task.launch_request import LaunchRequest


def write_new_run(backend: Backend, request: LaunchRequest) -> StartSpec:
    """Check a launch, write its run, and return the values that start its replicas.

    The run is in `$REPLICAS_RENDEZVOUS` if the backend's replicas are on other machines, else in the directory of
    this user's runs.

    Args:
        backend: the backend that starts the replicas.
        request: the entrypoint, its arguments, and the settings.

    Raises:
        ValueError, BackendError, EntrypointError: the launch cannot work; see `Backend.check_launch`.
        StoreError: the run cannot be written.

    Example:
        backend.start_ranks(write_new_run(backend, LaunchRequest.of("train.py:main", n=2)))
    """
    settings = request.settings
    url = default_rendezvous() if backend.ships_code else None
    if backend.needs_shared_rendezvous:
        url = shared_rendezvous(backend.backend_name, url, request.entrypoint, settings.n)
    backend.check_launch(request)
    store = local_store() if url is None else open_store(url)
    described, package = describe_executor(as_executor(backend)), backend.package(request.entrypoint)
    spec = create_run(request, new_run_id(), store, described, package)
    with contextlib.suppress(StoreError):  # without this note, a resume needs the task's digest or --trust-bucket
        remember(spec.run_id, spec.store_url, spec.task_digest, backend.options_to_keep)
    return StartSpec(spec, request.entrypoint, settings.gpu, settings.timeout)
