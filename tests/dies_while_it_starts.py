"""Preloaded into the process that forks replicas: it kills whoever launches in the middle of a start.

`REPLICAS_TEST_DIES` says in which call of which method of the supervisor, and who: "_start_rank 1 launcher supervisor".
"""

from __future__ import annotations

import os
import signal
from typing import Any

from executors.supervisor import Supervisor

launcher = os.getppid()
method, count, *victims = os.environ["REPLICAS_TEST_DIES"].split()
real = getattr(Supervisor, method)
calls: list[int] = []


def die(self: Supervisor, *args: Any) -> Any:
    calls.append(1)
    if len(calls) == int(count):
        os.kill(launcher, signal.SIGKILL)
        if "supervisor" in victims:
            os.kill(os.getpid(), signal.SIGKILL)
    return real(self, *args)


setattr(Supervisor, method, die)
