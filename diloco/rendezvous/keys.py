"""The keys of the objects of one rendezvous. They are an interface: people look at them with other tools."""

from __future__ import annotations

from dataclasses import dataclass, field

from executors.attempt import replica_key
from executors.attempt.signed_record import signed_key
from executors.store.added_ranks import added_key
from executors.store.record_names import CLAIM, OUTCOME


# More than 20 methods: each kind of object has one, so that no key is written anywhere else.
@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of the rendezvous `name` of a run."""

    run_id: str
    name: str
    run_key: bytes | None = field(default=None, repr=False)
    """The key that claims and outcomes of replicas are signed with. None: they are not signed."""

    def _under(self, rest: str) -> str:
        return f"{self.run_id}/diloco/{self.name}/{rest}"

    def claim(self, rank: int, attempt: int) -> str:
        """Return the key of a claim. In a signed run only a process with the run's key can create this object."""
        return self._signed(self.plain_claim(rank, attempt))

    def plain_claim(self, rank: int, attempt: int) -> str:
        """Return the key of a claim as other processes find it. In a signed run the object there proves nothing."""
        return replica_key(self.run_id, rank, attempt, CLAIM)

    def outcome(self, rank: int, attempt: int) -> str:
        """Return the key of an outcome. In a signed run only a process with the run's key can create this object."""
        return self._signed(replica_key(self.run_id, rank, attempt, OUTCOME))

    def _signed(self, key: str) -> str:
        return key if self.run_key is None else signed_key(key, self.run_key)

    def added(self, number: int) -> str:
        return added_key(self.run_id, number)

    def abort(self) -> str:
        return f"{self.run_id}/abort.json"

    def snapshot(self, entry: int) -> str:
        return self._under(f"snapshot/{entry}")

    def snapshots(self) -> str:
        """Return the prefix of all snapshots' pointers."""
        return self._under("snapshot/")

    def end(self) -> str:
        """Return the key of the record of a run's end, which exists if a replica has stopped the run."""
        return self._under("end")

    def unshared(self, entry: int) -> str:
        return self._under(f"unshared/{entry}")

    def all_unshared(self) -> str:
        """Return the prefix of what replicas keep of their models beside the anchor."""
        return self._under("unshared/")

    def part(self, entry: int, nonce: str, index: int) -> str:
        return self._under(f"part/{entry}/{nonce}/{index}")

    def parts(self) -> str:
        return self._under("part/")

    def rounds(self) -> str:
        """Return the prefix of all contributions and means."""
        return self._under("r")

    def own_state(self, rank: int | None = None) -> str:
        """Return the prefix of what ranks, or one rank, keep for their next attempts."""
        return self._under("own/" if rank is None else f"own/{rank}/")

    def own_state_record(self, rank: int, position: int, attempt: int) -> str:
        return self._under(f"own/{rank}/{position}/{attempt}/record")

    def own_state_tensors(self, rank: int, position: int, attempt: int, part: int) -> str:
        number = f".{part}" if part else ""
        return self._under(f"own/{rank}/{position}/{attempt}/tensors{number}.safetensors")

    def seal(self, entry: int) -> str:
        return self._under(f"seal/{entry}")

    def contribution(self, entry: int, rank: int) -> str:
        return self._under(f"r{entry}/contribution/{rank}")

    def mean(self, entry: int, shard: int) -> str:
        return self._under(f"r{entry}/mean/{shard}")

    def process(self, rank: int, attempt: int) -> str:
        """Return the key of the record of which process of an attempt takes part."""
        return self._under(f"process/{rank}/{attempt}")

    def bye(self, rank: int, attempt: int) -> str:
        return self._under(f"bye/{rank}/{attempt}")


def folder_of(key: str) -> str:
    """Return the prefix that a watch for this key watches."""
    return key[: key.rindex("/") + 1]
