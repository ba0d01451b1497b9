"""`python -m executors.cli` is `replicas`."""

import sys

from executors.cli import main

sys.exit(main())
