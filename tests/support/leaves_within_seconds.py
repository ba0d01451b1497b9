"""Preloaded into the process that forks replicas: what runs at exit may take two seconds there."""

from __future__ import annotations

from executors.supervisor import processes

processes.LEAVE_S = 2.0
