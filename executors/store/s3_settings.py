"""Settings of a bucket that would hurt a run: what `replicas doctor` asks for, as far as the credentials may."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from executors.store.s3_address import S3Address
from executors.store.s3_errors import status_of

Problem = tuple[str, str, str]
"""What was looked at, what is wrong with it, and what to do."""


def settings_that_hurt(client: Any, address: S3Address) -> Iterator[Problem]:
    """Yield what is wrong with a bucket. A setting that may not be read, or that the server lacks, passes."""
    bucket = {"Bucket": address.bucket}
    refused = client.exceptions.ClientError
    try:
        client.list_objects_v2(**bucket, Prefix=address.prefix, MaxKeys=1)
    except refused as error:
        if status_of(error) == 403:
            advice = "Allow s3:ListBucket; without it a missing key is answered as a forbidden one, and runs end."
            yield "listing", "the credentials may not list the bucket", advice
    with contextlib.suppress(refused):
        if client.get_bucket_versioning(**bucket).get("Status") == "Enabled":
            advice = "Suspend it, or let old versions expire: contributions of every round are kept and paid for."
            yield "versioning", "on, so deleted objects stay", advice
    with contextlib.suppress(refused):
        for rule in client.get_bucket_lifecycle_configuration(**bucket).get("Rules", ()):
            if _deletes_below(rule, address.prefix):
                name = rule.get("ID") or "without a name"
                advice = "Exempt the prefix: the seals of a run must stay for as long as it may be resumed."
                yield "lifecycle", f"rule {name!r} lets objects here expire", advice


def _deletes_below(rule: Mapping[str, Any], prefix: str) -> bool:
    scope = rule.get("Filter", {})
    covered = str(rule.get("Prefix") or scope.get("Prefix") or scope.get("And", {}).get("Prefix") or "")
    return (
        rule.get("Status") == "Enabled"
        and "Expiration" in rule
        and (prefix.startswith(covered) or covered.startswith(prefix))
    )
