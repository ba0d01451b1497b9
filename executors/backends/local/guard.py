"""The guard of a supervisor on a system where no process adopts orphans: it ends what a killed supervisor leaves.

Where a process can adopt orphans, the supervisor's parent is its guard instead; see `rank.become_supervisor`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import NoReturn

from executors.process import marked
from executors.supervisor.new_process import receive_message

LOOK_S, LONGEST_LOOK_S = 0.02, 0.2


def be_guard() -> NoReturn:
    """Wait until a supervisor has ended, give its ranks time to end by themselves, and kill the rest.

    Example:
        python -c "from executors.backends.local.guard import be_guard; be_guard()"
    """
    try:
        message, shares = receive_message()
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.read(shares["supervisor"], 1)  # the supervisor holds the other end, and never writes
        deadline = time.monotonic() + message["wait_s"]
        pause_s = LOOK_S
        while left := marked(message["marks"]):
            if time.monotonic() >= deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
    finally:
        os._exit(0)
