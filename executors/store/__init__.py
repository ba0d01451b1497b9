"""Stores, through which the replicas of a run communicate: a map from keys to bytes in a directory, bucket or memory.

`protocol.py` describes the requirements of a store. `file.py`, `memory.py` and `s3/` implement them.
`executors.testing.StoreContract` tests these requirements for any store, also for your own.
"""

from executors.store.memory import MemoryStore
from executors.store.protocol import Buffer, Data, Entry, Produce, Store, StreamingStore, check_key
from executors.store.url import open_store, store_at

__all__ = [
    "Buffer",
    "Data",
    "Entry",
    "MemoryStore",
    "Produce",
    "Store",
    "StreamingStore",
    "check_key",
    "open_store",
    "store_at",
]
