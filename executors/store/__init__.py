"""Where replicas meet: a flat map from keys to write-once bytes, behind five verbs.

`protocol.py` describes what a store promises, and `file.py` and `memory.py` keep these promises.
`executors.testing.StoreContract` tests it for any store, yours included.
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
