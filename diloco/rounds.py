"""What a replica knows of one entry while it goes through it, and what it tells about it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.patience import PatientStore
from diloco.records import BLOCK_BYTES, Contribution
from diloco.work import Packed

READ_TRIES = 3
"""How often an object is read before its bytes, rather than the reading, are held to be wrong."""


ASKING_AGAIN_S, ANSWERS_PER_ASKING = 0.1, 20
"""Whether those before us are gone takes three requests each, and the rounds in which somebody is are few."""


def asking_again_s(store: PatientStore) -> float:
    """Return how long to wait before asking again who is gone; longer at a far store."""
    return max(ASKING_AGAIN_S, ANSWERS_PER_ASKING * min(store.answer_s, 1.0))


@dataclass(frozen=True, slots=True)
class Pace:
    """What may take how long, and from which size on a mean is cut into shards. Any values are safe."""

    grace_s: float = 30.0
    round_timeout_s: float = 1800.0
    patience_s: float = 5.0
    error_patience_s: float = 15.0
    abort_check_s: float = 1.0
    small_bytes: int = 4 << 20
    block_bytes: int = BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Adopted:
    """One entry, as this replica went through it."""

    entry: int
    fragment: int
    ranks: tuple[int, ...]
    """Whose work the seal counts."""
    left_out: tuple[int, ...]
    counted: bool
    """Whether this process's work is in the mean."""
    bytes_up: int
    bytes_down: int
    wait_s: float
    move_s: float
    reduce_s: float
    step_s: float


@dataclass(slots=True)
class Round:
    """What one replica knows of one entry. All of it is a cache of immutable objects, but for the times."""

    entry: int
    fragment: int
    size_bytes: int
    started_s: float
    sealed_s: float | None = None
    packed: Packed | None = None
    published: bool = False
    published_s: float | None = None
    """When this replica's contribution was in the store."""
    is_early: bool = False
    """Whether it was sent out of phase, before steps that it does not contain."""
    sent_steps: int = 0
    """Of how many steps an early contribution is made."""
    foreign: memoryview | None = None
    """The work that there was when a contribution of another process was found in this one's place."""
    foreign_steps: int = 0
    began_s: float | None = None
    """When this replica began to wait for the seal."""
    grace_from_s: float | None = None
    """From when on the grace counts; None: nobody who was expected is known to wait."""
    spoilt: set[int] = field(default_factory=set)
    """Shards whose range of what was kept of the payload now holds the mean: read one's own input from the store."""
    seen: dict[int, tuple[Contribution, str]] = field(default_factory=dict)
    """Contributions by rank, and the digests of their heads."""
    payloads: dict[int, memoryview] = field(default_factory=dict)
    """Payloads by rank, when they are small."""
    unreadable: dict[int, int] = field(default_factory=dict)
    """Number of failed readings by rank."""
    means: dict[int, memoryview] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    reloaded: bool = False
    stuck: bool = False
    """Whether something that its mean is made of was not there, or not what was written, at the last look."""
    ask_s: float = 0.0
    """When to ask again who of those that are to reduce a shard is gone."""
    turn_s: float = 0.0
    """When to ask again whose turn it is to look for contributions."""
    looks: int = 0
    """How often this replica has looked for contributions, because it was its turn or nobody else did."""
    move_s: float = 0.0
    wait_s: float = 0.0
    reduce_s: float = 0.0
    read_before: int = 0
    written_before: int = 0

    @property
    def useless(self) -> set[int]:
        """Ranks whose contributions stand and are not what was written, whatever they say the next time."""
        return {rank for rank, tries in self.unreadable.items() if tries >= READ_TRIES}
