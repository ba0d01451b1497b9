"""Claims a rank and an attempt for this process, and records that it takes part and that it has left."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from diloco.errors import DiLoCoError
from diloco.rendezvous.envelope import BadRecordError, Proof, frame, reading, typed, unframe
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import MISREAD, Identity, KnownAddedRanks
from diloco.rendezvous.retrying_store import RetryingStore
from executors.attempt.signed_record import is_proven, proof_of_record
from executors.errors import StoreError
from executors.store.records import MAX_RECORD_BYTES

log = logging.getLogger(__name__)

MAX_HOST = 255
BYE_TRIES = 3
"""The number of tries to store a bye object. Without it, the other replicas wait for a few seconds longer."""


def claim(
    store: RetryingStore, keys: Keys, rank: int | None, world_size: int, nonce: str, pause: Callable[[], None]
) -> Identity:
    """Claim the next free attempt of a rank, and return once the stored claim is from this process.

    A claim that exists and cannot be read counts as a claim of another process.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        rank: the rank. None: this process joins the run, and claims the next free rank beyond the first world.
        world_size: the number of replicas in the first world.
        nonce: the nonce of this process.
        pause: waits before the store is asked again.

    Example:
        me = claim(store, keys, rank=0, world_size=4, nonce="a1b2", pause=lambda: sleep(0.01))
    """
    joins = rank is None
    rank, attempt = world_size if rank is None else rank, 0
    misread: dict[str, int] = {}
    added = KnownAddedRanks(store, keys)
    if joins:
        added.look()
    while True:
        # only a joining process needs the added ranks, because it must not take a rank that the user has added
        if rank in added.ranks:
            rank += 1
            continue
        key, plain = keys.claim(rank, attempt), keys.plain_claim(rank, attempt)
        owner = _owner(store.peek(key), plain, keys.run_key)
        if owner is None:
            fields = {"nonce": nonce}
            if keys.run_key is not None:
                fields["proof"] = proof_of_record(keys.run_key, plain, fields)
            store.create(key, json.dumps(fields).encode())
            claimed = store.peek(key)
            owner = _owner(claimed, plain, keys.run_key)
            if plain != key and owner == nonce:  # a copy for users and for processes without the key
                store.create(plain, json.dumps(fields).encode())
            misread[key] = misread.get(key, 0) + (owner is None and claimed is not None)
            if misread[key] == MISREAD:
                log.warning(
                    "%s in %s cannot be read as a claim. It counts as a claim of another process.", key, store.store.url
                )
                owner = ""
        if owner is None:
            pause()
        elif owner == nonce:
            if joins:
                # The command that adds ranks first writes its record and then looks for claims. This process first
                # claims and then looks for records. So at least one of the two sees the other.
                added.look()
            if rank in added.ranks:
                continue
            return Identity(rank, world_size, attempt, nonce)
        elif joins:
            rank += 1
        else:
            attempt += 1


def _owner(claimed: memoryview | None, plain: str, run_key: bytes | None) -> str | None:
    """Return the nonce in a claim. None: the claim is missing, or this reading of it failed or was not proven."""
    if run_key is not None and claimed is not None and not is_proven(claimed, plain, run_key):
        return None
    try:
        return None if claimed is None else str(json.loads(bytes(claimed))["nonce"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


_claimed: dict[tuple[str, str, int | None, int], str] = {}


def process_nonce(url: str, run_id: str, rank: int | None) -> str:
    """Return the nonce of this process for a rank of a run. All DiLoCos of a process share one nonce and one claim.

    A forked process has other nonces.

    Args:
        url: the URL of the store.
        run_id: the id of the run.
        rank: the rank. None: the process joins the run.
    """
    return _claimed.setdefault((url, run_id, rank, os.getpid()), secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """The content of `process/<rank>/<attempt>`: the one process of an attempt that takes part in a rendezvous.

    Example:
        ProcessRecord(nonce, os.getpid(), socket.gethostname()).data(key, proof)
    """

    nonce: str
    pid: int
    host: str

    def data(self, key: str, proof: Proof) -> bytes:
        """Return the record as bytes for the store.

        Args:
            key: the key of the record. A signature covers the key.
            proof: signs the record or adds a checksum.
        """
        return frame({"nonce": self.nonce, "pid": self.pid, "host": self.host[:MAX_HOST]}, key, proof)

    @classmethod
    def parse(cls, data: memoryview, key: str, proof: Proof) -> Self:
        """Read a record from bytes of the store.

        Args:
            data: the bytes.
            key: the key of the record.
            proof: checks the signature or the checksum.

        Raises:
            BadRecordError: these bytes are not such a record.
        """
        fields, _, _ = unframe(data, key, proof)
        with reading("record of a process"):
            nonce, pid, host = typed(str, fields["nonce"]), typed(int, fields["pid"]), typed(str, fields["host"])
            if len(nonce) > MAX_HOST or len(host) > MAX_HOST:
                raise ValueError(f"more than {MAX_HOST} characters")
            return cls(nonce, pid, host)


def claim_process(store: RetryingStore, keys: Keys, me: Identity, proof: Proof, pause: Callable[[], None]) -> None:
    """Record that this process takes part in a rendezvous for its replica. Do nothing if the record exists from this
    process.

    The processes of one replica share its rank and its nonce. If two of them took part, the other replicas would treat
    them as one, and the work of one of them would be lost without a message.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        me: the identity of the replica.
        proof: signs and checks the record, so that a forged record does not keep the replica out of a signed run.
        pause: waits before the store is asked again.

    Raises:
        DiLoCoError: another process of this attempt takes part.
    """
    key, mine = keys.process(me.rank, me.attempt), process_nonce(store.store.url, keys.run_id, me.rank)
    while True:
        store.create(key, ProcessRecord(mine, os.getpid(), socket.gethostname()).data(key, proof))
        data = store.peek(key, size=MAX_RECORD_BYTES)
        if data is None:
            pause()
            continue
        try:
            claimant = ProcessRecord.parse(data, key, proof)
        except BadRecordError as error:
            store.record_misread(key, data)
            # The check protects against a mistake of the user. A damaged record must not end a replica.
            if store.count_misreads(key) >= MISREAD:
                log.warning(
                    "Rank %s cannot check that only one of its processes takes part: %s (%s)", me.rank, error, key
                )
                return
            pause()
            continue
        if claimant.nonce == mine:
            return
        where = "" if claimant.host == socket.gethostname() else f" on {claimant.host!r}"
        raise DiLoCoError(
            f"Another process of this replica (pid {claimant.pid}{where}) has the DiLoCo {keys.name!r} open. Several "
            "processes open one together in a process group, see DiLoCo's group=."
        )


def bye_writer(store: RetryingStore, keys: Keys, me: Identity) -> Callable[[], None]:
    """Return a function that records that an attempt sends no more work. It holds no model.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        me: the identity of the attempt.

    Example:
        replica.at_dismissal.append(bye_writer(store, keys, me))
    """

    def write() -> None:
        try:
            for _ in range(BYE_TRIES):
                # Without its claim the run was deleted, and a bye object would create its folder again.
                if not store.exists(keys.claim(me.rank, me.attempt)) or store.write(keys.bye(me.rank, me.attempt), b""):
                    return
        except StoreError:
            return  # the others stop waiting by themselves

    return write
