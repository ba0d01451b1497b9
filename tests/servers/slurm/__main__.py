"""Runs one command with a new Slurm cluster: `python -m servers.slurm COMMAND…`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from servers.slurm.cluster import INSTALL, missing_programs, running_cluster


def main() -> int:
    if missing := missing_programs():
        raise SystemExit(f"Not installed: {', '.join(missing)}. On Debian: {INSTALL}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder is removed
    with running_cluster() as cluster:
        return subprocess.run(sys.argv[1:], env={**os.environ, **cluster.environment}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
