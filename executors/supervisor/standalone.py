"""`python -m executors.supervisor`: the command that runs one replica, or a spare, in a container of its own.

It reads its assignment from the environment. Then it supervises the process that becomes the replica.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from executors import replica as environment
from executors.errors import ReplicasError
from executors.module_search import reserve_names, search_first
from executors.process import become_subreaper
from executors.settings import Settings
from executors.settings.run_spec import ATTACHED_LEASE, NOTIFY, RunSpec
from executors.store.run_key import RUN_KEY
from executors.supervisor.container import NOTICE_S, ContainerStarter, ContainerSupervisor
from executors.supervisor.spare import Spare

CANNOT_START = 78  # EX_CONFIG of sysexits.h, which the bootstrap uses as well
TERM_GRACE_S = 5.0
# If the installation has used up the paid time, the replica still gets this time, to report its time limit.
LEAST_TIME_S = 1.0


def main() -> NoReturn:
    """Run the replica that the environment describes, and exit with its exit code."""
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
    """Add the user's folders to the search path of this process, and of Python processes that the user's code starts.

    In this process, names of the standard library and of our packages are not looked for in these folders. In Python
    processes that the user's code starts, these folders come first for every name.
    """
    paths = [path for path in os.environ.pop(environment.SYS_PATH, "").split(os.pathsep) if path]
    reserve_names([os.getcwd(), *paths])
    for path in reversed(paths):
        search_first(path)
    if paths:
        first, *others = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # our packages stay at the beginning
        os.environ["PYTHONPATH"] = os.pathsep.join([first, *paths, *others])


def _run() -> int:
    """Run the replica to its end, and return the exit code of its process.

    Raises:
        ReplicasError: the environment describes no replica, or the replica cannot be started. In the second case its
            outcome has the reason as well.
        ValueError: a number or a policy in the environment cannot be parsed.
    """
    # The URLs of notifications are for this process alone: the user's code does not see them in its environment.
    notify = tuple(os.environ.pop(NOTIFY, "").split())
    supervisor = read_assignment(os.environ, notify)
    os.dup2(1, 2)  # a service that reads two pipes would lose the order of the lines
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # code that asks a question on stdin would wait forever
    os.close(nothing)
    with contextlib.suppress(OSError):  # some sandboxes lack it; then orphaned descendants survive the supervisor
        become_subreaper()
    if os.environ.pop(environment.SPARE, None):
        attempt = Spare(read_spec(os.environ), _number(os.environ, environment.LOST_AFTER_S)).stand_by()
        if attempt is None:
            return 0
        os.environ |= {environment.RANK: str(attempt.rank), environment.ATTEMPT: str(attempt.number)}
        supervisor = read_assignment(os.environ, notify)
    if not supervisor.start():
        return 0
    supervisor.run()
    return supervisor.exit_code


def read_assignment(environ: Mapping[str, str], notify: Sequence[str] = ()) -> ContainerSupervisor:
    """Return the supervisor of the replica that an environment describes.

    Args:
        environ: the variables of the environment.
        notify: the URLs to which notifications are sent. Default: none.

    Raises:
        ReplicasError: a variable is missing.
        ValueError: a number or a policy cannot be parsed.
    """
    spec = replace(read_spec(environ), notify=tuple(notify))
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
    """Return the run that an environment describes, with the rank of this container.

    Args:
        environ: the variables of the environment.

    Raises:
        ReplicasError: a variable is missing.
        ValueError: a number or a policy cannot be parsed.
    """
    me = environment.replica_from(environ)
    digest = environ.get(environment.TASK_DIGEST)
    if not digest:
        raise ReplicasError(
            f"{environment.TASK_DIGEST} is not set, so this replica cannot check the code that it would run. Start "
            "replicas with `replicas launch` or `replicas resume`, which set it."
        )

    return RunSpec(
        *(me.run_id, me.rendezvous, digest, _settings(environ, me.world_size), (me.rank,), me.attempt),
        env={name: environ[name] for name in environ.get(environment.ENV, "").split(",") if name in environ},
        launched_at=_number(environ, environment.LAUNCHED_AT) or 0.0,
        usd_per_hour=_number(environ, environment.USD_PER_HOUR),
        key=environ.get(RUN_KEY),
        lease_s=_number(environ, environment.LEASE_S),
        lease_name=environ.get(environment.LEASE_NAME) or ATTACHED_LEASE,
        task_folder=environ.get(environment.TASK_FOLDER) or "task",
    )


def _settings(environ: Mapping[str, str], world_size: int) -> Settings:
    """Return the settings of the launch. A hand-written job has none, so all settings but `n` are the defaults."""
    text = environ.get(environment.SETTINGS)
    return Settings(n=world_size) if not text else Settings.parse(text.encode(), environment.SETTINGS)


def _time_limit(environ: Mapping[str, str]) -> float | None:
    """Return the seconds that the replica may run from now on. None: there is no limit.

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
