"""What `replicas doctor --backend NAME` looks at: the SDK, the account, the rendezvous, and with --probe a replica."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from executors.cli.findings import Finding, look_at_store, tried
from executors.errors import BackendError, ReplicasError

PROBE_LIMIT_S = 900.0
ACCOUNT_CHECK_S = 60.0
WRITE_ADVICE = "Credentials that may only read cannot be used by replicas; see the README on S3."


def examine_backend(name: str, options: Mapping[str, Any], rendezvous: str | None, probe: bool) -> Iterator[Finding]:
    """Look at a backend; stop where what follows could only repeat the first failure."""
    from executors.registry import get_executor

    try:
        executor: Any = get_executor(name, options)
    except (ReplicasError, ValueError, TypeError) as error:
        yield Finding("backend", "wrong", str(error), "See: replicas backends")
        return
    url = rendezvous
    if hasattr(executor, "check_account"):
        yield _sdk(executor)
        yield tried("account", lambda: _account(executor), "Nothing can be launched until that is mended.")
        try:
            from executors.shared_rendezvous import shared_rendezvous

            url = shared_rendezvous(name, rendezvous, "train.py:main", 2)
        except BackendError as error:
            yield Finding("rendezvous", "wrong", str(error), "Both sides meet there; any S3 bucket will do.")
            return
    if url is not None:
        rendezvous_found = look_at_store(url)
        yield rendezvous_found
        if url.startswith("s3:") and rendezvous_found.state != "wrong":
            yield from _bucket(url)
    if probe:
        yield tried("probe", lambda: _probe(executor, url), "Its logs tell more, if it got so far: replicas ls")


def _sdk(executor: Any) -> Finding:
    from importlib.metadata import version

    package = executor.sdk
    return Finding("sdk", "ok", f"{package} {version(package)}")


def _account(executor: Any) -> str:
    executor.check_account(1, None, ACCOUNT_CHECK_S, ())
    return f"{executor.vendor} accepts these credentials"


def _bucket(url: str) -> Iterator[Finding]:
    """Look at what of a bucket and its credentials would hurt a long run. What may not be asked is left out."""
    from executors.store import open_store
    from executors.store.opening import reach_from_elsewhere

    def credentials() -> str:
        _, found = reach_from_elsewhere(open_store(url))
        return "temporary" if "AWS_SESSION_TOKEN" in found else "lasting"

    finding = tried("credentials", credentials, "Replicas get them as a secret of the backend.")
    if finding.found == "temporary":
        advice = "Replicas get these: a run that outlives them cannot go on. Use lasting ones for long runs."
        finding = Finding("credentials", "note", "temporary", advice)
    yield finding
    with contextlib.suppress(ReplicasError, ValueError):
        store: Any = open_store(url)
        for what, problem, advice in store.settings_that_hurt():
            yield Finding(what, "note", problem, advice)


def _probe(executor: Any, rendezvous: str | None) -> str:
    from executors.launching import launch

    limit_s = PROBE_LIMIT_S
    run = launch(executor, "executors.probe:look_around", 1, rendezvous=rendezvous, timeout=limit_s)
    try:
        (seen,) = run.results()
    except BaseException:
        run.cancel()
        raise
    run.remove()
    return ", ".join(f"{name} {value}" for name, value in seen.items() if value)
