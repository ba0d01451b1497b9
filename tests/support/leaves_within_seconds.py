"""Preloaded into the process that forks replicas: what runs at exit may take two seconds there."""

from __future__ import annotations

from executors.worker import ranks

ranks.LEAVE_S = 2.0
