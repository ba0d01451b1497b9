"""Runs the command `replicas` for `python -m executors.cli`."""

import sys

from executors.cli import main

sys.exit(main())
