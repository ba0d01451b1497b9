"""Declares every value that a user may set for a launch. Each one is declared once.

Read `settings.py` first. `Settings` is one frozen value with one JSON form. Each field declares its CLI option, its
help text and its check. `launch()`, the CLI, settings files, the run's record and the supervisors of replicas use this
one value. `policy.py` parses two settings with a syntax of their own: restarts, and limits on hanging. `Settings.of`
takes values from the user, and `Settings.parse` takes them from a store. Both refuse an illegal value and name it.
"""

from executors.settings.settings import GATHER_S as GATHER_S
from executors.settings.settings import Settings as Settings
