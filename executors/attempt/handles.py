"""Copies the handles of one launch into one object, and reads the job of a replica from its handle.

With this object, the first look at a run in a bucket makes one read instead of one per replica. The object is only a
copy. The `handle.json` of each attempt counts, and is read for each handle that the copy lacks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from executors.attempt import Attempt, parse_handle
from executors.attempt.signed_record import find_signed, write_signed
from executors.errors import CorruptObjectError, StoreError, UnknownHandleError
from executors.protocol import ReplicaHandle
from executors.store import Store
from executors.store.records import Fields, find_record, json_object, list_of, to_bytes
from executors.store.run_key import held_key
from executors.store.url import is_near

MAX_BYTES = 16 << 20
PAGE = re.compile(r"https?://[!-~]{1,500}")
log = logging.getLogger(__name__)


def keep_handles(store: Store, run_id: str, attempt: int, handles: Sequence[Any]) -> None:
    """Write a copy of the handles of a launch, if the store is a bucket, where each read is a request.

    Args:
        store: the store of the run.
        run_id: the run.
        attempt: the number of the attempts.
        handles: the handles. Objects of other types are left out.
    """
    found = [handle for handle in handles if isinstance(handle, ReplicaHandle)]
    if len(found) > 1 and not is_near(store.url):
        with contextlib.suppress(StoreError):
            data = to_bytes({"handles": [json.loads(handle.to_json()) for handle in found]})
            run_key = held_key(store.url, run_id)
            if run_key is None:
                store.put_if_absent(_key(run_id, attempt), data)
            else:
                write_signed(store, _key(run_id, attempt), data, run_key)


def kept_handles(store: Store, run_id: str, attempt: int, backend_of: Callable[[int], str]) -> dict[int, ReplicaHandle]:
    """Return the handles of a launch by rank from the copy. The result is empty if there is no readable copy.

    Args:
        store: the store of the run.
        run_id: the run.
        attempt: the number of the attempts.
        backend_of: returns the name of a rank's backend.
    """

    def parse(data: Any, key: str, url: str) -> dict[int, ReplicaHandle]:
        found = [parse_handle(each, key, url) for each in Fields(data, key, url).take("handles", list_of(json_object))]
        return {
            each.rank: Attempt(store, run_id, each.rank, attempt).rebind_handle(each, backend_of(each.rank))
            for each in found
        }

    try:
        run_key = held_key(store.url, run_id)
        if run_key is not None:
            return find_signed(store, _key(run_id, attempt), parse, MAX_BYTES, run_key) or {}
        return find_record(store, _key(run_id, attempt), parse, MAX_BYTES) or {}
    except (CorruptObjectError, UnknownHandleError) as error:
        log.warning("Reading the handle of each replica instead: %s", error)
        return {}


def _key(run_id: str, attempt: int) -> str:
    return f"{run_id}/handles/{attempt}.json"


def page_of_job(handle: Any) -> str | None:
    """Return the url of the page of a replica's job at its service, from its handle. None: the handle has none.

    Args:
        handle: the handle, which may be an object of any type.

    Example:
        page_of_job(run.handles[0])
    """
    job = handle.metadata.get("job") if isinstance(handle, ReplicaHandle) else None
    page = job.get("url") if isinstance(job, dict) else None
    return page if isinstance(page, str) and PAGE.fullmatch(page) else None


def name_of_job(handle: Any) -> str | None:
    """Return the page or the id of a replica's job at its service. The id comes from the service, so escape it.

    Args:
        handle: the handle, which may be an object of any type.

    Example:
        name_of_job(run.handles[0])
    """
    job = handle.metadata.get("job") if isinstance(handle, ReplicaHandle) else None
    parts = [str(job[name]) for name in ("id", "task") if name in job] if isinstance(job, dict) else []
    return page_of_job(handle) or (f"job {'_'.join(parts)}" if parts else None)
