"""Traces a restart in a supervisor. The zygote imports this module as a preload, so its forks inherit the profile."""

from __future__ import annotations

import sys

from support.start_walk import StartWalk

sys.setprofile(StartWalk(("supervisor/supervisor.py", "_conclude"), ("process/linux.py", "fork")).profile)
