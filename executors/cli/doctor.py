"""The verb `doctor`, which checks this machine, a backend and a store."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from executors.backend import Backend, as_backend
from executors.cli.documents import CheckDocument, DoctorDocument
from executors.cli.options import BackendOptions, RendezvousOption, complete_backend, parse_values
from executors.cli.output import FAILED, JsonOption, Output
from executors.cli.verb_help import describe
from executors.errors import BackendError, ReplicasError, StoreError
from executors.process import CAN_SUPERVISE, inotify_limit, open_inotify
from executors.protocol import ServerlessExecutor

if TYPE_CHECKING:
    from executors.run.run import Run

LOW_DISK_BYTES = 1 << 30
STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}
PROBE_LIMIT_S = 900.0
# the longest time in seconds until a file system with a cache shows a file that another machine has written
LOG_LIMIT_S = 60.0
WITHOUT_INOTIFY = (
    "Replicas therefore poll their rendezvous, which is slower. On Linux, raise fs.inotify.max_user_instances, or: "
    "pip install inotify_simple"
)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        what: the thing that was checked, in one or two words.
        state: `ok`, `note` for advice, or `wrong`.
        found: the result as text.
        advice: the remedy. Empty: none is needed.
    """

    what: str
    state: Literal["ok", "note", "wrong"]
    found: str
    advice: str = ""

    def to_json(self) -> CheckDocument:
        """Return everything as plain JSON."""
        return {"what": self.what, "state": self.state, "found": self.found, "advice": self.advice}


@describe(
    examples=[
        "replicas doctor",
        "replicas doctor --notify env:SLACK_URL",
        "replicas doctor --backend modal --rendezvous s3://BUCKET/runs --probe",
    ],
    exit_codes={0: "All is ready.", FAILED: "Something is wrong. The line in red names it."},
)
def doctor(
    backend: Annotated[
        str,
        Option(
            "--backend",
            "-b",
            metavar="NAME",
            help="The backend to check, or pkg.mod:Class.",
            autocompletion=complete_backend,
        ),
    ] = "local",
    probe: Annotated[bool, Option("--probe", help="Also start one replica, and show its report.")] = False,
    gpu: Annotated[
        str | None, Option(metavar="GPU", help="The GPU of the replicas to check for, as in H100. Default: none.")
    ] = None,
    option: BackendOptions = None,
    rendezvous: RendezvousOption = None,
    notify: Annotated[
        list[str] | None, Option("--notify", metavar="URL", help="Also send a test notification. Repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check this machine, a backend, a rendezvous, and the URLs of notifications."""
    from rich.text import Text

    from executors.worker.probe import describe_environment

    output = Output(as_json)
    options = parse_values("--option", option)
    facts = describe_environment()
    findings: list[CheckResult] = []
    if not as_json:
        for name, value in facts.items():
            output.print(f"{'':5}  {name:<16}  {value}", "dim")
    checks = itertools.chain(
        _check_packages(),
        _check_machine(is_local=backend == "local"),
        _check_backend(backend, options, rendezvous, gpu, probe, reads_only=False),
        _check_notifications(notify),
    )
    while True:
        # A check makes its result only when the next one is asked for. A backend may take half a minute, a probe more.
        with output.busy("Checking"):
            finding = next(checks, None)
        if finding is None:
            break
        findings.append(finding)
        if not as_json:
            mark = (f"{finding.state:<5}", STYLES[finding.state])
            output.print(Text.assemble(mark, f"  {finding.what:<16}  {finding.found}"))
            if finding.advice:
                output.print(f"{'':25}{finding.advice}", STYLES[finding.state])
    document = _document(facts, findings)
    if as_json:
        output.document(document)
    return 0 if document["ok"] else FAILED


def _document(facts: dict[str, str], findings: Sequence[CheckResult]) -> DoctorDocument:
    return {
        "ok": all(finding.state != "wrong" for finding in findings),
        "facts": facts,
        "findings": [finding.to_json() for finding in findings],
    }


def doctor_document(backend: str) -> DoctorDocument:
    """Return the document of `replicas doctor --json` for a backend. Nothing is written into a store of runs.

    Args:
        backend: the name of the backend.

    Example:
        doctor_document("local")["ok"]
    """
    from executors.worker.probe import describe_environment

    checks = itertools.chain(
        _check_packages(),
        _check_machine(is_local=backend == "local"),
        _check_backend(backend, {}, None, None, probe=False, reads_only=True),
    )
    return _document(describe_environment(), list(checks))


def _check_packages() -> Iterator[CheckResult]:
    from executors.cli.installed import foreign_executors, packages_below_bounds

    if (foreign := foreign_executors()) is not None:
        problem, remedy = foreign
        yield CheckResult("executors", "wrong", problem, remedy)
    for problem, command in packages_below_bounds():
        yield CheckResult("package", "wrong", problem, command)


def _check_machine(is_local: bool) -> Iterator[CheckResult]:
    from executors.registry.run_index import state_dir
    from executors.store.state_folder import state_path

    try:
        path = state_path()
    except StoreError as error:
        yield CheckResult("runs", "wrong", str(error))
    else:
        advice = f"Runs of this user are in {path}. Set XDG_STATE_HOME to a directory that you can write."
        yield check("runs", lambda: _check_store(str(state_dir())), advice)
        yield _check_disk(path)
    if is_local and CAN_SUPERVISE:  # replicas do not run on other systems, so the advice would be useless
        yield _check_inotify()


def _check_disk(path: Path) -> CheckResult:
    existing = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    free_bytes = shutil.disk_usage(existing).free
    is_low = free_bytes < LOW_DISK_BYTES
    advice = "Delete old runs: replicas ls, replicas rm RUN…" if is_low else ""
    return CheckResult("disk", "note" if is_low else "ok", f"{free_bytes / 1e9:.1f} GB free for {path}", advice)


def _check_inotify() -> CheckResult:
    try:
        with contextlib.closing(open_inotify()):
            limit = inotify_limit()
    except OSError as error:
        return CheckResult("inotify", "note", str(error), WITHOUT_INOTIFY)
    return CheckResult("inotify", "ok", f"{limit} watches")


def _check_backend(
    name: str, options: Mapping[str, Any], rendezvous: str | None, gpu: str | None, probe: bool, *, reads_only: bool
) -> Iterator[CheckResult]:
    """Check a backend. Stop at a failure that would make all later checks fail, too.

    Args:
        name: the name of the backend.
        options: its options.
        rendezvous: the store to check. None: the default of the backend.
        gpu: the GPU to check for. None: none.
        probe: True to start a replica.
        reads_only: True to write nothing into a store, so no store is checked.
    """
    from executors.registry import get_executor
    from executors.store.url import shared_rendezvous
    from executors.task.launch_request import LaunchRequest

    try:
        executor = get_executor(name, options)
    except (ReplicasError, ValueError, TypeError) as error:
        yield CheckResult("backend", "wrong", str(error), "To list the backends and their options: replicas backends")
        return
    url, backend = rendezvous, as_backend(executor)
    if backend.has_launch_check:

        def check_launch() -> str:
            began = time.monotonic()
            backend.check_launch(LaunchRequest.of("platform:node", n=1, gpu=gpu))
            return f"the backend is ready; checked in {time.monotonic() - began:.1f} s"

        ready = check("launch", check_launch, "Launches on this backend fail until this works.")
        yield ready
        if (image := backend.check_image()) is not None:
            what, advice = image
            yield CheckResult("image", "note" if advice else "ok", what, advice)
        if ready.state == "ok":
            with contextlib.suppress(ReplicasError):
                for problem, advice in backend.risks():
                    yield CheckResult("service", "note", problem, advice)
    if reads_only:
        return
    if backend.needs_shared_rendezvous:
        try:
            url = shared_rendezvous(name, rendezvous, "train.py:main", 2)
        except (BackendError, ValueError) as error:
            yield CheckResult(
                "rendezvous",
                "wrong",
                str(error),
                "Replicas and this machine exchange files there. Any S3 bucket will do.",
            )
            return
    if url is not None:
        found = check(
            "rendezvous", lambda: _check_store(url), "Replicas need a rendezvous that they can read and write."
        )
        yield found
        if url.startswith("s3:") and found.state != "wrong":
            yield from _check_bucket(url)
    if probe:
        yield check(
            "probe", lambda: _probe(executor, url, gpu), "If the replica started, its log has the reason: replicas ls"
        )


def _check_notifications(given: Sequence[str] | None) -> Iterator[CheckResult]:
    """Send a test to each URL, and report what the service answered. The URLs are not shown."""
    if given is None:
        return
    from executors.notices.sender import SendError, send_once
    from executors.notices.targets import describe_target, resolve_targets

    try:
        urls = resolve_targets(given)
    except (ReplicasError, ValueError) as error:
        yield CheckResult("notify", "wrong", str(error))
        return
    document = {
        "title": "replicas: a test",
        "text": "This is a test of `replicas doctor --notify`. Events of runs will arrive here.",
        "event": "test",
        "kind": "test",
    }
    for number, url in enumerate(urls, start=1):
        began, name = time.monotonic(), describe_target(url, number, len(urls))
        try:
            send_once(url, document)
        except SendError as error:
            yield CheckResult("notify", "wrong", f"{name}: {error}", "Check the URL and the network of this machine.")
        else:
            yield CheckResult("notify", "ok", f"{name}: a test was sent in {time.monotonic() - began:.1f} s")


def _check_store(url: str) -> str:
    """Write, read and delete an object. Opening the store has proven that it creates objects atomically."""
    from executors.store import open_store

    store = open_store(url)
    key = f"doctor-{secrets.token_hex(8)}/probe"
    try:
        store.put(key, b"probe")
        if bytes(store.get(key)) != b"probe":
            raise StoreError(f"{store.url} returned other bytes than were written.", key=key, url=store.url)
    finally:
        store.delete(key)
    return f"{store.url} creates atomically, writes and reads"


def _check_bucket(url: str) -> Iterator[CheckResult]:
    """Check the settings of a bucket and its credentials. Skip settings that these credentials may not read."""
    from executors.store import open_store
    from executors.store.url import remote_access

    try:
        store: Any = open_store(url)
        _, credentials = remote_access(store)
    except ReplicasError as error:
        yield CheckResult(
            "credentials",
            "wrong",
            str(error),
            "Give replicas their credentials as a secret of the backend: --secret NAME.",
        )
        return
    if "AWS_SESSION_TOKEN" in credentials:
        advice = "Replicas get these credentials, and fail when they expire. Use permanent ones for long runs."
        yield CheckResult("credentials", "note", "temporary", advice)
    else:
        yield CheckResult("credentials", "ok", "permanent")
    with contextlib.suppress(ReplicasError, ValueError):
        for what, problem, advice in store.risky_settings():
            yield CheckResult(what, "note", problem, advice)


def _probe(executor: ServerlessExecutor, rendezvous: str | None, gpu: str | None) -> str:
    from executors.launcher import launch

    began = time.time()
    probe, args = "executors.worker.probe:probe", {"gpu": gpu}
    limit_s = None if executor.backend_name == "inline" else PROBE_LIMIT_S
    run = launch(executor, probe, 1, args=args, rendezvous=rendezvous, gpu=gpu, timeout=limit_s)
    launched = time.time()
    try:
        (facts,) = run.results()
    except BaseException:
        run.cancel()
        raise
    _check_log(as_backend(executor), run)
    started = run.outcomes()[0].started_at or launched  # both times are by the replica's clock
    facts["launch"] = f"{launched - began:.1f} s"
    facts["its worker ran after"] = f"{max(0.0, started - began):.1f} s"
    facts["in all"] = f"{time.time() - began:.1f} s"
    run.remove()
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _check_log(backend: Backend, run: Run) -> None:
    """If the service of a replica writes logs to files, check that this machine can read the log.

    Raises:
        BackendError: the log did not appear in time. The message has the remedy.
    """
    if backend.log_advice:
        deadline = time.monotonic() + LOG_LIMIT_S
        while not backend.stream_logs(run.handles[0]):
            if time.monotonic() > deadline:
                raise BackendError(f"A replica ran, but this machine does not see its log. {backend.log_advice}")
            time.sleep(0.2)


def check(what: str, attempt: Callable[[], str], advice: str) -> CheckResult:
    """Return the result of a check.

    Args:
        what: the thing that is checked, in one or two words.
        attempt: the function that checks. It returns the result as text, or raises an error.
        advice: the remedy, if the check raises.

    Example:
        check("rendezvous", lambda: _check_store("/shared/runs"), "Choose a directory that you can write.")
    """
    try:
        return CheckResult(what, "ok", attempt())
    except (ReplicasError, OSError, ValueError) as error:
        return CheckResult(what, "wrong", str(error), advice)
