"""`python -m executors.supervisor`: a replica that a command started, on a machine of its own.

It reads its assignment from the environment, and is the supervisor of the process that becomes the replica.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from typing import NoReturn

from executors import replica as environment
from executors.errors import ReplicasError
from executors.module_search import reserve_names, search_first
from executors.process import become_subreaper
from executors.settings import Settings
from executors.settings.run_spec import ATTACHED_LEASE, RunSpec
from executors.store.run_key import RUN_KEY
from executors.supervisor.container import NOTICE_S, ContainerStarter, ContainerSupervisor
from executors.supervisor.spare import Spare

CANNOT_START = 78  # EX_CONFIG of sysexits.h, as the bootstrap leaves
TERM_GRACE_S = 5.0
LEAST_TIME_S = 1.0  # of a replica whose installation has used up what was paid for: it ends by its limit, and says so


def main() -> NoReturn:
    """Run the replica that the environment describes, and leave its process."""
    folder = os.environ.pop(environment.FOLDER, None)
    _find_users_modules()
    try:
        code = _run()
    except (ReplicasError, ValueError) as error:
        print(f"replicas: {error}", file=sys.stderr, flush=True)
        code = CANNOT_START
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def _find_users_modules() -> None:
    """Let the user's modules be found, here and by Pythons that the user starts; no reserved name is looked for there.

    The Pythons that the user starts are the user's: there, these folders come first for every name.
    """
    paths = [path for path in os.environ.pop(environment.SYS_PATH, "").split(os.pathsep) if path]
    reserve_names([os.getcwd(), *paths])
    for path in reversed(paths):
        search_first(path)
    if paths:
        first, *others = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # our packages come before all
        os.environ["PYTHONPATH"] = os.pathsep.join([first, *paths, *others])


def _run() -> int:
    """Run the replica to its end; return the exit code of its process.

    Raises:
        ReplicasError: the environment describes none, or it cannot be started; then its outcome says so, too.
        ValueError: a number or a policy in it is not one.
    """
    supervisor = read_assignment(os.environ)
    os.dup2(1, 2)  # a service that reads two pipes does not know which line came first
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a question would wait for ever
    os.close(nothing)
    with contextlib.suppress(OSError):  # a sandbox that does not know it: what is orphaned is then not ended by us
        become_subreaper()
    if os.environ.pop(environment.SPARE, None):
        attempt = Spare(read_spec(os.environ), _number(os.environ, environment.LOST_AFTER_S)).stand_by()
        if attempt is None:
            return 0
        os.environ |= {environment.RANK: str(attempt.rank), environment.ATTEMPT: str(attempt.number)}
        supervisor = read_assignment(os.environ)
    if not supervisor.start():
        return 0
    supervisor.run()
    return supervisor.exit_code


def read_assignment(environ: Mapping[str, str]) -> ContainerSupervisor:
    """Return the supervisor of the replica that an environment describes.

    Raises:
        ReplicasError: something is missing.
        ValueError: a number or a policy is not one.
    """
    spec = read_spec(environ)
    spec.settings.check()
    ranks = ContainerStarter(spec, term_grace_s=TERM_GRACE_S, gpu=environ.get(environment.GPU) or None)
    return ContainerSupervisor(
        spec,
        ranks,
        timeout_s=_time_limit(environ),
        term_grace_s=TERM_GRACE_S,
        notice_s=_number(environ, environment.NOTICE_S) or NOTICE_S,
    )


def read_spec(environ: Mapping[str, str]) -> RunSpec:
    """Return the run that an environment describes, and which rank of it; raises as `read_assignment`."""
    me = environment.replica_from(environ)
    digest = environ.get(environment.TASK_DIGEST)
    if not digest:
        raise ReplicasError(
            f"{environment.TASK_DIGEST} is not set: without it a replica would run whatever it finds. Start replicas "
            "with `replicas launch` or `replicas resume`, which set it."
        )

    return RunSpec(
        *(me.run_id, me.rendezvous, digest, _settings(environ, me.world_size), (me.rank,), me.attempt),
        env={name: environ[name] for name in environ.get(environment.ENV, "").split(",") if name in environ},
        launched_at=_number(environ, environment.LAUNCHED_AT) or 0.0,
        key=environ.get(RUN_KEY),
        lease_s=_number(environ, environment.LEASE_S),
        lease_name=environ.get(environment.LEASE_NAME) or ATTACHED_LEASE,
        task_folder=environ.get(environment.TASK_FOLDER) or "task",
    )


def _settings(environ: Mapping[str, str], world_size: int) -> Settings:
    """Return the settings of the launch. Without any, as in a hand-written job, all but `n` have their defaults."""
    text = environ.get(environment.SETTINGS)
    return Settings(n=world_size) if not text else Settings.parse(text.encode(), environment.SETTINGS)


def _time_limit(environ: Mapping[str, str]) -> float | None:
    """Return how many seconds the replica may run from now on; None: no limit.

    A limit that max_cost pays for counts from the container's start. It leaves the replica a moment to end by itself,
    before the service ends the container.
    """
    timeout_s = _number(environ, environment.TIMEOUT_S)
    if timeout_s is None or not _settings(environ, 1).pays_for_start:
        return timeout_s
    begun_s = _number(environ, environment.BOOTSTRAP_S) or 0.0
    return max(LEAST_TIME_S, timeout_s - begun_s - min(TERM_GRACE_S + 5.0, timeout_s / 20))


def _number(environ: Mapping[str, str], name: str) -> float | None:
    return float(environ[name]) if environ.get(name) else None
