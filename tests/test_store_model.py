"""A store does what a dictionary does, whatever it is told to do."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from executors.errors import KeyNotFoundError, StoreError
from executors.store import MemoryStore, Store
from executors.store.file import FileStore

# Few names, so that keys meet; some that sort around "/", and some that only look like a folder.
SEGMENTS = st.sampled_from(["a", "aa", "a.", "a-", "a0", "b", ".a", " ", "é", "ä b", "%2F", "A"])
KEYS = st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join)
VALUES = st.binary(max_size=20) | st.integers(1, 3).map(lambda n: bytes([n]) * 140_000)


class StoreLikeADictionary(RuleBasedStateMachine):
    """The rules run against a store and a dictionary, and the two are compared after each."""

    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, bytes] = {}

    def can_hold(self, key: str) -> bool:
        """A directory cannot hold both a key and keys below it."""
        above = [key[:at] for at in range(len(key)) if key[at] == "/"]
        return not any(path in self.model for path in above) and not any(k.startswith(f"{key}/") for k in self.model)

    @rule(key=KEYS, value=VALUES)
    def put(self, key: str, value: bytes) -> None:
        try:
            self.store.put(key, [value[:7], value[7:]])
            self.model[key] = value
        except StoreError:
            assert not self.can_hold(key)

    @rule(key=KEYS, value=VALUES)
    def put_if_absent(self, key: str, value: bytes) -> None:
        try:
            assert self.store.put_if_absent(key, value) is (key not in self.model)
            self.model.setdefault(key, value)
        except StoreError:
            assert not self.can_hold(key)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.store.delete(key)
        self.model.pop(key, None)

    @rule(key=KEYS, start=st.integers(0, 25), size=st.none() | st.integers(0, 25))
    def get(self, key: str, start: int, size: int | None) -> None:
        value = self.model.get(key)
        try:
            read = bytes(self.store.get(key, start=start, size=size))
        except KeyNotFoundError:
            assert value is None
        except StoreError:
            assert value is not None
            assert len(value) < start + (size or 0)
        else:
            assert value is not None
            assert read == value[start : None if size is None else start + size]

    @rule(prefix=st.just("") | KEYS | KEYS.map(lambda key: f"{key}/"))
    def list(self, prefix: str) -> None:
        listed = [(entry.key, entry.size_bytes) for entry in self.store.list(prefix)]
        assert listed == sorted((key, len(value)) for key, value in self.model.items() if key.startswith(prefix))

    @invariant()
    def everything_is_there(self) -> None:
        assert {entry.key: bytes(self.store.get(entry.key)) for entry in self.store.list("")} == self.model


class FileStoreLikeADictionary(StoreLikeADictionary):
    def __init__(self) -> None:
        super().__init__()
        self.folder = contextlib.ExitStack()
        self.store = FileStore(Path(self.folder.enter_context(tempfile.TemporaryDirectory())))

    def teardown(self) -> None:
        self.folder.close()


class MemoryStoreLikeADictionary(StoreLikeADictionary):
    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()


FEW = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestFileStoreLikeADictionary = FileStoreLikeADictionary.TestCase
TestFileStoreLikeADictionary.settings = FEW
TestMemoryStoreLikeADictionary = MemoryStoreLikeADictionary.TestCase
TestMemoryStoreLikeADictionary.settings = FEW
