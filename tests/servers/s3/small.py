"""A small S3 server on loopback, behind the fault layer. It has only the requests that a store makes, and keeps objects
in a dictionary.

moto takes milliseconds for each request, one at a time, so a benchmark would mostly measure moto. This server supports
GET with a range, HEAD, PUT with `If-None-Match: *`, DELETE, and lists of keys or folders in pages. It ignores
signatures and buckets. Large objects are in files without names, so that the machine's memory can hold other things.
"""

from __future__ import annotations

import mmap
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from servers.fault_layer import Application, Environ
from servers.s3.http import serve

DATE = "Thu, 01 Jan 2026 00:00:00 GMT"
START_RESPONSE = Callable[..., Any]
LARGE_BYTES = 16 << 20


def small_s3() -> Application:
    """Return an application with one empty bucket."""
    objects: dict[str, bytes | mmap.mmap] = {}

    def application(environ: Environ, start: START_RESPONSE) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path.startswith("/moto-api/"):
            objects.clear()
            return _reply(start, "200 OK")
        key = (*path.split("/", 2), "")[2]
        if not key:
            return _list(start, objects, environ) if method == "GET" else _reply(start, "200 OK")
        if method == "PUT":
            body = environ["wsgi.input"].read()
            if "HTTP_IF_NONE_MATCH" in environ and key in objects:
                return _error(start, "412 Precondition Failed", "PreconditionFailed")
            objects[key] = _in_file(body) if len(body) >= LARGE_BYTES else body
            return _reply(start, "200 OK", [("ETag", f'"{hash(body):x}"')])
        if method == "DELETE":
            objects.pop(key, None)
            return _reply(start, "204 No Content")
        if key not in objects:
            return _error(start, "404 Not Found", "NoSuchKey", body=method == "GET")
        return _get(start, objects[key], environ.get("HTTP_RANGE", ""), method)

    return application


def _in_file(body: bytes) -> mmap.mmap:
    with tempfile.TemporaryFile() as file:
        file.write(body)
        file.flush()
        return mmap.mmap(file.fileno(), len(body))


def _get(start: START_RESPONSE, value: bytes | mmap.mmap, range_: str, method: str) -> Iterable[bytes]:
    headers = [("ETag", f'"{hash(value):x}"'), ("Last-Modified", DATE)]
    if method == "HEAD":
        start("200 OK", [*headers, ("Content-Length", str(len(value)))])
        return [b""]
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", range_)
    if found is None:
        return _reply(start, "200 OK", headers, value[:])
    first, last = int(found[1]), min(int(found[2]), len(value) - 1)
    if first >= len(value):
        return _error(start, "416 Requested Range Not Satisfiable", "InvalidRange")
    headers.append(("Content-Range", f"bytes {first}-{last}/{len(value)}"))
    return _reply(start, "206 Partial Content", headers, value[first : last + 1])


def _list(start: START_RESPONSE, objects: Mapping[str, bytes | mmap.mmap], environ: Environ) -> Iterable[bytes]:
    query = {name: values[0] for name, values in parse_qs(environ["QUERY_STRING"]).items()}
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    names = {_name_in_list(key, prefix, delimiter) for key in objects if key.startswith(prefix)}
    left = sorted(name for name in names if name > query.get("continuation-token", ""))
    page, is_cut = left[: (n := int(query.get("max-keys", "1000")))], len(left) > n
    rows = "".join(
        f"<Contents><Key>{escape(name)}</Key><Size>{len(objects[name])}</Size>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        if name in objects
        else f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        for name in page
    )
    rows += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if is_cut else ""
    text = f"<ListBucketResult><IsTruncated>{str(is_cut).lower()}</IsTruncated>{rows}</ListBucketResult>"
    return _reply(start, "200 OK", [("Content-Type", "application/xml")], text.encode())


def _name_in_list(key: str, prefix: str, delimiter: str) -> str:
    """Return the name of a key in a list. With a delimiter, it ends at the first delimiter after the prefix."""
    end = key.find(delimiter, len(prefix)) if delimiter else -1
    return key if end < 0 else key[: end + len(delimiter)]


def _error(start: START_RESPONSE, status: str, code: str, *, body: bool = True) -> Iterable[bytes]:
    text = f"<Error><Code>{code}</Code><Message>{status}</Message></Error>" if body else ""
    return _reply(start, status, [("Content-Type", "application/xml")], text.encode())


def _reply(
    start: START_RESPONSE, status: str, headers: Iterable[tuple[str, str]] = (), body: bytes = b""
) -> Iterable[bytes]:
    start(status, [*headers, ("Content-Length", str(len(body)))])
    return [body]


if __name__ == "__main__":
    serve(small_s3())
