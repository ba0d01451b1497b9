"""Request bodies of many buffers, and ranges read into one buffer: nothing is joined, nothing is read twice."""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from executors.store.s3.errors import TornReplyError, status_of

READ_BYTES = 256 * 1024  # each read passes through a buffer of this size, which stays in the CPU's cache


class BufferBody(io.RawIOBase):
    """A file over buffers, for an HTTP client. A read within one buffer is a view of it, not a copy."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._ends = list(itertools.accumulate(map(len, buffers)))
        self._position = 0

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = min(max(0, (0, self._position, len(self))[whence] + offset), len(self))
        return self._position

    def read(self, size: int | None = -1) -> bytes | memoryview:
        end = len(self) if size is None or size < 0 else min(self._position + size, len(self))
        pieces: list[memoryview] = []
        while self._position < end:
            index = bisect.bisect_right(self._ends, self._position)
            buffer = self._buffers[index]
            start = self._position - (self._ends[index] - len(buffer))
            pieces.append(buffer[start : start + end - self._position])
            self._position += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def is_made_of(value: memoryview, buffers: Sequence[memoryview]) -> bool:
    """Return whether a value is the buffers joined."""
    starts = itertools.accumulate(map(len, buffers), initial=0)
    pairs = zip(starts, buffers, strict=False)
    return len(value) == sum(map(len, buffers)) and all(value[at : at + len(each)] == each for at, each in pairs)


@dataclass(frozen=True, slots=True)
class RangeReader:
    """Reads with one boto3 client (safe in several threads)."""

    client: Any
    range_bytes: int
    parallel: int
    retried: Callable[[Callable[[], Any]], Any]

    def size_of(self, name: Mapping[str, str]) -> int:
        return int(self.client.head_object(**name)["ContentLength"])

    def read(self, name: Mapping[str, str], start: int, size: int | None, end_of: Callable[[int], int]) -> memoryview:
        """Read `size` bytes from `start` on, trying once; errors are raised as they come.

        Args:
            name: Bucket and Key.
            end_of: from the size of the object to the end of the range; raises when the range ends behind it.

        Raises:
            TornReplyError: a reply was cut off, or the object was replaced meanwhile; try again.
        """
        if size == 0:
            end_of(self.size_of(name))
            return memoryview(b"")
        try:
            reply = self._get(name, start, start + min(size or self.range_bytes, self.range_bytes))
        except self.client.exceptions.ClientError as error:
            if status_of(error) != 416:
                raise
            # The object ends at `start` or before. (A range that only ends too late is silently cut by the server.)
            if end_of(self.size_of(name)) > start:
                raise TornReplyError("the object was replaced by a longer one") from None
            return memoryview(b"")
        with contextlib.closing(reply["Body"]):
            if "ContentRange" not in reply:  # a server that knows no ranges
                end = end_of(reply["ContentLength"])
                whole = memoryview(bytearray(reply["ContentLength"]))
                _fill(whole, reply)
                return whole[start:end].toreadonly()
            view = memoryview(bytearray(end_of(_total_of(reply)) - start))
            first, rest = view[: self.range_bytes], range(self.range_bytes, len(view), self.range_bytes)
            if not rest:
                _fill(first, reply)
                return view.toreadonly()

            def fill(at: int) -> None:
                part = view[at : at + self.range_bytes]
                if not self.retried(lambda: self._fill_part(name, start + at, part, reply)):
                    raise TornReplyError("the object was replaced while it was read")

            with ThreadPoolExecutor(min(self.parallel, len(rest))) as pool:
                parts = [pool.submit(fill, at) for at in rest]
                try:
                    _fill(first, reply)
                    for part in parts:
                        part.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        return view.toreadonly()

    def _fill_part(self, name: Mapping[str, str], start: int, part: memoryview, first: Mapping[str, Any]) -> bool:
        """Read a later part; False if it belongs to another object than the first reply."""
        reply = self._get(name, start, start + len(part))
        with contextlib.closing(reply["Body"]):
            # By ETag, and not by If-Match, which some servers ignore and others want quoted in their own way.
            if reply.get("ETag") != first.get("ETag") or _total_of(reply) != _total_of(first):
                return False
            _fill(part, reply)
        return True

    def _get(self, name: Mapping[str, str], start: int, end: int) -> Mapping[str, Any]:
        reply: Mapping[str, Any] = self.client.get_object(**name, Range=f"bytes={start}-{end - 1}")
        return reply


def _total_of(reply: Mapping[str, Any]) -> int:
    """Return the size of the whole object: `Content-Range: bytes 0-9/1234`."""
    found = re.fullmatch(r"bytes \d+-\d+/(\d+)", reply.get("ContentRange", ""))
    if found is None:
        raise TornReplyError(f"Content-Range is {reply.get('ContentRange')!r}")
    return int(found[1])


def _fill(part: memoryview, reply: Mapping[str, Any]) -> None:
    if reply["ContentLength"] != len(part):
        raise TornReplyError(f"{len(part)} bytes were asked for, {reply['ContentLength']} are announced")
    at = 0
    while at < len(part):
        count = reply["Body"].readinto(part[at : at + READ_BYTES])
        if not count:
            raise TornReplyError("the reply ended early")
        at += count
