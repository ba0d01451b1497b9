"""Kills the launcher in the middle of a start. Tests preload this module into the process that forks replicas.

`REPLICAS_TEST_DIES` names a method of `LocalStarter`, the number of the call, and the processes to kill, as in "start 1
launcher supervisor".
"""

from __future__ import annotations

import os
import signal
from typing import Any

from executors.backends.local.rank import LocalStarter

launcher = os.getppid()
method, count, *victims = os.environ["REPLICAS_TEST_DIES"].split()
real = getattr(LocalStarter, method)
calls: list[int] = []


def die(self: LocalStarter, *args: Any) -> Any:
    calls.append(1)
    if len(calls) == int(count):
        os.kill(launcher, signal.SIGKILL)
        if "supervisor" in victims:
            os.kill(os.getpid(), signal.SIGKILL)
    return real(self, *args)


setattr(LocalStarter, method, die)
