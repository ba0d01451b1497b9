"""Limits exit handlers of replicas to two seconds. Tests preload this module into the process that forks replicas."""

from __future__ import annotations

from executors.supervisor import processes

processes.LEAVE_S = 2.0
