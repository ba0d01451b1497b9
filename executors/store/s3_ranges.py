"""Reading objects of a bucket: as ranges in parallel, into one buffer, all of the same version of the object."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from executors.store.s3_body import read_into
from executors.store.s3_errors import TornReplyError, status_of


class Retried(Protocol):
    """Does something until it succeeds or fails for good."""

    def __call__(self, act: Callable[[], Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class RangeReader:
    """Reads with one boto3 client (safe in several threads)."""

    client: Any
    range_bytes: int
    parallel: int
    retried: Retried

    def size_of(self, name: Mapping[str, str]) -> int:
        return int(self.client.head_object(**name)["ContentLength"])

    def read(self, name: Mapping[str, str], start: int, size: int | None, end_of: Callable[[int], int]) -> memoryview:
        """Read `size` bytes from `start` on, once; what goes wrong is raised as it comes.

        Args:
            name: Bucket and Key.
            end_of: from the size of the object to the end of what is asked for; raises when it is beyond.

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
        with contextlib.closing(reply["Body"]) as body:
            if "ContentRange" not in reply:  # a server that knows no ranges
                end = end_of(reply["ContentLength"])
                whole = memoryview(bytearray(reply["ContentLength"]))
                _fill(whole, body)
                return whole[start:end].toreadonly()
            end = end_of(_total_of(reply))
            view = memoryview(bytearray(end - start))
            first, rest = view[: self.range_bytes], range(self.range_bytes, len(view), self.range_bytes)
            _check_length(reply, first)
            if not rest:
                _fill(first, body)
            else:
                self._fill_in_parallel(name, reply, start, view, first, rest)
        return view.toreadonly()

    def _fill_in_parallel(
        self,
        name: Mapping[str, str],
        reply: Mapping[str, Any],
        start: int,
        view: memoryview,
        first: memoryview,
        rest: range,
    ) -> None:
        def fill(at: int) -> None:
            part = view[at : at + self.range_bytes]
            if not self.retried(lambda: self._fill_part(name, start + at, part, reply)):
                raise TornReplyError("the object was replaced while it was read")

        with ThreadPoolExecutor(min(self.parallel, len(rest))) as pool:
            parts = [pool.submit(fill, at) for at in rest]
            try:
                _fill(first, reply["Body"])
                for part in parts:
                    part.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _fill_part(self, name: Mapping[str, str], start: int, part: memoryview, first: Mapping[str, Any]) -> bool:
        """Read a later part; False if it is not of the object that the first reply was of."""
        reply = self._get(name, start, start + len(part))
        with contextlib.closing(reply["Body"]) as body:
            # By ETag, and not by If-Match, which some servers ignore and others want quoted in their own way.
            if reply.get("ETag") != first.get("ETag") or _total_of(reply) != _total_of(first):
                return False
            _check_length(reply, part)
            _fill(part, body)
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


def _check_length(reply: Mapping[str, Any], part: memoryview) -> None:
    if reply["ContentLength"] != len(part):
        raise TornReplyError(f"{len(part)} bytes were asked for, {reply['ContentLength']} are announced")


def _fill(part: memoryview, body: Any) -> None:
    if not read_into(body, part):
        raise TornReplyError("the reply ended early")
