"""S3Address parses the url of a store in a bucket: `s3://BUCKET/PREFIX?endpoint_url=&region=&profile=`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from executors.masking import is_credential_name

OPTIONS = ("endpoint_url", "region", "profile")
CREDENTIALS_ADVICE = (
    "Credentials do not belong in a url, because it is stored and shown: set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or name a profile with ?profile=NAME."
)


@dataclass(frozen=True, slots=True)
class S3Address:
    """The parts of the url of a store in a bucket.

    Example:
        S3Address.parse("s3://bucket/runs?region=eu-west-1").bucket
    """

    bucket: str
    prefix: str
    """The beginning of all keys: empty, or with a slash at its end."""
    endpoint_url: str | None = None
    """The url of the server. None: as boto3 finds it, usually AWS."""
    region: str | None = None
    """The region of the bucket. None: as boto3 finds it."""
    profile: str | None = None
    """The profile in ~/.aws that has the credentials. None: as boto3 finds them."""

    @property
    def url(self) -> str:
        """The url of this address. Its query has no slash, so an address of a run can be split at the last slash."""
        options = [f"{name}={quote(value, safe='')}" for name in OPTIONS if (value := getattr(self, name))]
        path = f"/{quote(self.prefix.rstrip('/'))}" if self.prefix else ""
        return f"s3://{self.bucket}{path}" + (f"?{'&'.join(options)}" if options else "")

    @classmethod
    def parse(cls, url: str) -> S3Address:
        """Return the address in a url.

        Args:
            url: the url.

        Raises:
            ValueError: the url names no bucket, has an unknown option, or has credentials. The message does not repeat
                credentials.
        """
        parts = urlsplit(url)
        # Messages never show a part of the url that may be a secret.
        if "@" in parts.netloc:
            raise ValueError(f"The url of an S3 store has a text before an '@'. {CREDENTIALS_ADVICE}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        for name in [name for name in options if name not in OPTIONS]:
            hint = CREDENTIALS_ADVICE if is_credential_name(name) else f"Known options: {', '.join(OPTIONS)}."
            raise ValueError(f"An S3 store's url has no option {name!r}. {hint}")
        if not parts.netloc:
            raise ValueError(f"An S3 store needs a bucket, as in 's3://bucket/runs', got {url!r}.")
        prefix = unquote(parts.path).strip("/")
        if any(segment in ("", ".", "..") for segment in prefix.split("/")) and prefix:
            raise ValueError(f"The prefix {prefix!r} has an empty, '.' or '..' segment. Use one such as 'runs/mine'.")
        if parts.fragment:
            raise ValueError("An S3 store's url has no '#'. Write it as %23 if it belongs to the prefix.")
        if endpoint_url := options.get("endpoint_url"):
            endpoint = urlsplit(endpoint_url)
            # The whole text is searched for an "@", because a url without a scheme has no netloc.
            if "@" in endpoint_url or endpoint.query or endpoint.fragment:
                raise ValueError(f"endpoint_url has more than a scheme, a host and a path. {CREDENTIALS_ADVICE}")
            if endpoint.scheme not in ("http", "https") or not endpoint.netloc:
                raise ValueError(
                    f"endpoint_url must be a http or https url, as in 'https://s3.example.com', got {endpoint_url!r}."
                )
        return cls(parts.netloc, f"{prefix}/" if prefix else "", *(options.get(name) or None for name in OPTIONS))
