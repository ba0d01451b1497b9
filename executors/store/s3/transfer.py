"""Sends a body of many buffers without joining them, and reads an object as parallel ranges into one buffer."""

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

READ_BYTES = 256 * 1024  # the size of each read, so that its data stays in the CPU's cache


class BufferBody(io.RawIOBase):
    """A file object over several buffers, for an HTTP client. A read within one buffer returns a view, not a copy.

    Args:
        buffers: the content, in order.

    Example:
        BufferBody([memoryview(b"head"), memoryview(b"body")]).read()
    """

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
    """Return True if a value equals the buffers joined.

    Args:
        value: the bytes to compare.
        buffers: the buffers.

    Example:
        is_made_of(memoryview(b"ab"), [memoryview(b"a"), memoryview(b"b")])
    """
    starts = itertools.accumulate(map(len, buffers), initial=0)
    pairs = zip(starts, buffers, strict=False)
    return len(value) == sum(map(len, buffers)) and all(value[at : at + len(each)] == each for at, each in pairs)


@dataclass(frozen=True, slots=True)
class RangeReader:
    """Reads objects with one boto3 client. It may be used from several threads.

    Example:
        RangeReader(client, 16 << 20, 8, lambda act: act()).size_of({"Bucket": "bucket", "Key": "runs/a"})
    """

    client: Any
    range_bytes: int
    """A larger object is read as ranges of this size."""
    parallel: int
    """The number of ranges that are read at the same time, besides the first."""
    retried: Callable[[Callable[[], Any]], Any]
    """A function that calls another function again while its request fails."""

    def size_of(self, name: Mapping[str, str]) -> int:
        """Return the size of an object.

        Args:
            name: its Bucket and Key.
        """
        return int(self.client.head_object(**name)["ContentLength"])

    def read(self, name: Mapping[str, str], start: int, size: int | None, end_of: Callable[[int], int]) -> memoryview:
        """Read a range of an object. The first request is tried once, and its error is raised.

        Args:
            name: the Bucket and Key of the object.
            start: the first byte to read, counted from 0.
            size: the number of bytes to read. None: up to the end of the object.
            end_of: returns the end of the range for the size of the object. Raises if the object has no such range.

        Raises:
            TornReplyError: a reply was cut off, or the object was replaced during the read. The caller may try again.
        """
        if size == 0:
            end_of(self.size_of(name))
            return memoryview(b"")
        try:
            reply = self._get(name, start, start + min(size or self.range_bytes, self.range_bytes))
        except self.client.exceptions.ClientError as error:
            if status_of(error) != 416:
                raise
            # HTTP 416: the object ends at `start` or before. If only the end of a range is too large, the server
            # returns fewer bytes without an error.
            if end_of(self.size_of(name)) > start:
                raise TornReplyError("the object was replaced by a longer one") from None
            return memoryview(b"")
        with contextlib.closing(reply["Body"]):
            if "ContentRange" not in reply:  # this server does not know ranges, and sends the whole object
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
        """Read a later part. Return False if the object is not the one of the first reply any more."""
        reply = self._get(name, start, start + len(part))
        with contextlib.closing(reply["Body"]):
            # The ETags are compared here because some servers ignore If-Match, and others want it quoted differently.
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
        raise TornReplyError(f"the server announced {reply['ContentLength']} bytes instead of {len(part)}")
    at = 0
    while at < len(part):
        count = reply["Body"].readinto(part[at : at + READ_BYTES])
        if not count:
            raise TornReplyError("the reply ended early")
        at += count
