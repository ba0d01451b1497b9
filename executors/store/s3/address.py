"""The url of an S3 store, parsed: `s3://BUCKET/PREFIX?endpoint_url=&region=&profile=`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlsplit

OPTIONS = ("endpoint_url", "region", "profile")
CREDENTIAL_WORDS = ("key", "secret", "token", "password", "credential", "signature")
WHERE_CREDENTIALS_GO = (
    "Credentials do not belong in a url, which is stored and shown: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "or name a profile with ?profile=NAME."
)


@dataclass(frozen=True, slots=True)
class S3Address:
    """A bucket, the prefix of all keys there (empty, or ending in a slash), and how to reach it."""

    bucket: str
    prefix: str
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None

    @property
    def url(self) -> str:
        """The url that `parse` reads as this address. Its query has no slash, so a run id may follow it."""
        options = [f"{name}={quote(value, safe='')}" for name in OPTIONS if (value := getattr(self, name))]
        path = f"/{quote(self.prefix.rstrip('/'))}" if self.prefix else ""
        return f"s3://{self.bucket}{path}" + (f"?{'&'.join(options)}" if options else "")

    @classmethod
    def parse(cls, url: str) -> S3Address:
        """Read a url.

        Raises:
            ValueError: it holds credentials (the message does not repeat them), names no bucket, or has an unknown
                option.
        """
        parts = urlsplit(url)
        # Messages show only what cannot be a secret.
        if "@" in parts.netloc:
            raise ValueError(f"The url of an S3 store holds something before an '@'. {WHERE_CREDENTIALS_GO}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        for name in [name for name in options if name not in OPTIONS]:
            secret = any(word in name.lower() for word in CREDENTIAL_WORDS)
            hint = WHERE_CREDENTIALS_GO if secret else f"Known options: {', '.join(OPTIONS)}."
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
            if "@" in endpoint_url or endpoint.query or endpoint.fragment:  # without a scheme, there is no netloc
                raise ValueError(f"endpoint_url holds more than scheme, host and path. {WHERE_CREDENTIALS_GO}")
            if endpoint.scheme not in ("http", "https") or not endpoint.netloc:
                raise ValueError(
                    f"endpoint_url must be a http or https url, as in 'https://s3.example.com', got {endpoint_url!r}."
                )
        return cls(parts.netloc, f"{prefix}/" if prefix else "", *(options.get(name) or None for name in OPTIONS))
