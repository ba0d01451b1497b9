"""DiLoCo through a store: replicas that train one model together and meet only in a directory or a bucket."""

from diloco.outer import DiLoCo
from diloco.report import RoundReport

__all__ = ["DiLoCo", "RoundReport"]
