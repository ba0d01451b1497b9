"""The store keys of all objects of one rendezvous.

Users read the objects with other tools, so the keys are a public interface. ADR 0034 describes the objects byte by
byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from executors.attempt import replica_key
from executors.attempt.signed_record import signed_key
from executors.store.added_ranks import added_key
from executors.store.record_names import CLAIM, OUTCOME


# More than 20 methods: each kind of object has one, so that no key is written anywhere else.
@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one DiLoCo of a run.

    Example:
        Keys("first-try", "main").seal(12)
    """

    run_id: str
    name: str
    """The name of the DiLoCo. Its objects are below this folder of the run."""
    run_key: bytes | None = field(default=None, repr=False)
    """The secret with which the claims and outcomes of replicas are signed. None: they are not signed."""

    def _under(self, rest: str) -> str:
        return f"{self.run_id}/diloco/{self.name}/{rest}"

    def claim(self, rank: int, attempt: int) -> str:
        """Return the key of a claim. In a signed run only a process with the run's key can create this object."""
        return self._signed(self.plain_claim(rank, attempt))

    def plain_claim(self, rank: int, attempt: int) -> str:
        """Return the key of a claim for processes without the run's key.

        In a signed run, the object under it proves nothing.
        """
        return replica_key(self.run_id, rank, attempt, CLAIM)

    def outcome(self, rank: int, attempt: int) -> str:
        """Return the key of an outcome. In a signed run only a process with the run's key can create this object."""
        return self._signed(replica_key(self.run_id, rank, attempt, OUTCOME))

    def _signed(self, key: str) -> str:
        return key if self.run_key is None else signed_key(key, self.run_key)

    def added(self, number: int) -> str:
        """Return the key of one record of added ranks. The records are numbered from 0."""
        return added_key(self.run_id, number)

    def abort(self) -> str:
        """Return the key of the record that exists if a replica has aborted the run."""
        return f"{self.run_id}/abort.json"

    def snapshot(self, entry: int) -> str:
        """Return the key of the pointer to the snapshot before an entry."""
        return self._under(f"snapshot/{entry}")

    def snapshots(self) -> str:
        """Return the prefix of the pointers of all snapshots."""
        return self._under("snapshot/")

    def end(self) -> str:
        """Return the key of the early end, which exists if a replica has stopped the run."""
        return self._under("end")

    def unshared(self, entry: int) -> str:
        """Return the key of a copy of the tensors that replicas do not share, made before an entry.

        The key begins with r, so that the listing of contributions and means contains it, too.
        """
        return self._under(f"rest/{entry}")

    def all_unshared(self) -> str:
        """Return the prefix of all copies of tensors that replicas do not share."""
        return self._under("rest/")

    def part(self, entry: int, nonce: str, index: int) -> str:
        """Return the key of one part of a snapshot. Its writer's nonce keeps it apart from other writers' parts."""
        return self._under(f"part/{entry}/{nonce}/{index}")

    def parts(self, entry: int | None = None) -> str:
        """Return the prefix of the parts of the snapshots before an entry. None: of all snapshots."""
        return self._under("part/" if entry is None else f"part/{entry}/")

    def offer(self, rank: int, attempt: int) -> str:
        """Return the key of the empty object of an attempt that stores its model as the first snapshot."""
        return self._under(f"offer/{rank}/{attempt}")

    def offers(self) -> str:
        """Return the prefix of the objects of all attempts that stored their models as the first snapshot."""
        return self._under("offer/")

    def rounds(self) -> str:
        """Return the prefix of all contributions and means."""
        return self._under("r")

    def own_state(self, rank: int | None = None, member: int = 0) -> str:
        """Return the prefix of the states that ranks keep for their next attempts. None: of all ranks and members."""
        return self._under("own/" if rank is None else f"own/{_owner_of(rank, member)}/")

    def own_state_record(self, rank: int, position: int, attempt: int, member: int = 0) -> str:
        """Return the key of the record of a state that a rank keeps. The state counts only if its record exists."""
        return self._under(f"own/{_owner_of(rank, member)}/{position}/{attempt}/record")

    def own_state_tensors(self, rank: int, position: int, attempt: int, part: int, member: int = 0) -> str:
        """Return the key of one file of tensors of a state that a rank keeps for its next attempt."""
        number = f".{part}" if part else ""
        return self._under(f"own/{_owner_of(rank, member)}/{position}/{attempt}/tensors{number}.safetensors")

    def seal(self, entry: int) -> str:
        """Return the key of the seal of an entry."""
        return self._under(f"seal/{entry}")

    def contribution(self, entry: int, rank: int) -> str:
        """Return the key of the contribution of a rank to an entry."""
        return self._under(f"r{entry}/contribution/{rank}")

    def mean(self, entry: int, shard: int) -> str:
        """Return the key of one shard of the mean of an entry."""
        return self._under(f"r{entry}/mean/{shard}")

    def process(self, rank: int, attempt: int) -> str:
        """Return the key of the record that names the one process of an attempt that takes part."""
        return self._under(f"process/{rank}/{attempt}")

    def bye(self, rank: int, attempt: int) -> str:
        """Return the key of the empty object that an attempt creates when it leaves the run without an error."""
        return self._under(f"bye/{rank}/{attempt}")


def watch_prefix(key: str) -> str:
    """Return the folder of a key, with the slash at its end. A watch for the key watches this prefix."""
    return key[: key.rindex("/") + 1]


def _owner_of(rank: int, member: int) -> str:
    """Return the folder of a rank's saved state. Members other than the first one of a replica have their own."""
    return f"{rank}.{member}" if member else str(rank)
