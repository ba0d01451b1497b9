"""Check the run whose model a launch starts from, before anything is written."""

from __future__ import annotations

from executors.backend import Backend
from executors.errors import BackendError, ReplicasError
from executors.registry.run_index import needed_key
from executors.restarts.decision_log import DecisionLog, extensions_of
from executors.store.run_key import parse_key
from executors.store.url import directory_of
from executors.task.launch_request import LaunchRequest


def find_source_run(request: LaunchRequest, backend: Backend) -> tuple[LaunchRequest, str | None]:
    """Find the run that a launch starts from.

    Args:
        request: the launch, which has `from_run`.
        backend: the executor or the placements that start the replicas.

    Returns:
        The request with the address of that run, and the key of that run. The new run has the same key. None: that run
        is not signed.

    Raises:
        RunNotFoundError: there is no such run, or none of its replicas has begun to train.
        ValueError: the run is signed and its key is not on this machine, or the launch is signed and the run is not.
        BackendError: the replicas cannot read the store of that run.
    """
    from executors.run.run import view_of

    assert request.settings.from_run is not None
    from executors.run.lookup import attach
    from executors.view.run_model import load_reader

    source = attach(request.settings.from_run)
    view = view_of(source)
    record = view.record
    if backend.needs_shared_rendezvous and directory_of(view.store.url):
        raise BackendError(
            f"Run {source.run_id!r} is in {view.store.url}, a directory that replicas on "
            f"{backend.backend_name!r} do not see. Start from a run at a bucket, or load its model in your script: "
            f"replicas model {source.run_id} --out model.safetensors"
        )
    if request.settings.signed and record.key_id is None:
        raise ValueError(
            f"Run {source.run_id!r} is not signed, so nothing proves its model to a signed run. Remove --signed, or "
            f"load the model in your script: replicas model {source.run_id} --out model.safetensors"
        )
    key = None if record.key_id is None else needed_key(source.run_id, record.key_id)
    try:
        check = load_reader("source")
    except ReplicasError:  # the training package is not installed here: the replicas check it themselves
        pass
    else:
        found = None if key is None else parse_key(key)
        extensions = extensions_of(DecisionLog(view.store, source.run_id, key=key).read())
        check(view.store, source.run_id, found, request.settings.from_step, extensions)
    signed = request.settings.signed or key is not None
    return request.with_settings(from_run=source.url, signed=signed), key
