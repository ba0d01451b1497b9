"""Everything that a user may ask of a launch, declared once.

Read `settings.py` first: `Settings` is one frozen value with one JSON form, and each of its fields carries the option
of the command, its help text and its check. `launch()`, the command, settings files, the record of a run and the
supervisors of its replicas hold this one value. `policy.py` explains the two settings that are small languages of their
own: restarts, and limits on hanging. Data enters as what a user gave (`Settings.of`) or as what a store holds
(`Settings.parse`); both refuse what is not legal, and name it.
"""

from executors.settings.settings import GATHER_S as GATHER_S
from executors.settings.settings import Settings as Settings
