"""What replicas start in: the user's image, or Debian with their requirements installed; and volumes."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from executors.backends.modal_client import modal
from executors.errors import BackendError
from executors.shipping.requirements import name_of, options_of
from executors.store.s3.address import S3Address


def image_of(image: Any, python_version: str | None, requirements: Sequence[str]) -> modal.Image:
    """Return the user's image, by itself or by its name in a registry; None: the default one."""
    if image is not None:
        return modal.Image.from_registry(image) if isinstance(image, str) else image
    made = modal.Image.debian_slim(python_version)
    if any("git+" in requirement for requirement in requirements):
        made = made.apt_install("git")
    packages = [each for each in not_paths(requirements) if not each.startswith("--")]
    return made.uv_pip_install(*packages, extra_options=shlex.join(indexes(requirements)))


def described(image: Any, python_version: str | None, requirements: Sequence[str]) -> Any:
    """Return the same for people."""
    if image is not None:
        return image if isinstance(image, str) else repr(image)
    return {"debian_slim": python_version, "uv_pip_install": not_paths(requirements)}


def built(image: modal.Image, app: modal.App) -> modal.Image:
    """Return an image that is there, having shown on stderr how it was built, where that had to be done."""
    with contextlib.redirect_stdout(sys.stderr), modal.enable_output():
        return image.build(app)


def not_paths(requirements: Sequence[str]) -> list[str]:
    """Leave out requirements that are folders of the workspace: these come with the code, when the image is built."""
    return [requirement for requirement in requirements if name_of(requirement) or "://" in requirement]


def indexes(requirements: Sequence[str]) -> list[str]:
    options = options_of(not_paths(requirements))
    return ["--index-strategy=unsafe-best-match", *options] if options else []  # all count alike, as they do for pip


def check_volumes(volumes: Mapping[str, str], environment: str | None) -> None:
    """Refuse what cannot be mounted.

    Raises:
        BackendError: there is no volume of that name.
        ValueError: not a path, or not the address of a bucket.
    """
    for path, source in volumes.items():
        if not path.startswith("/") or path == "/":
            raise ValueError(f"A volume's path starts with '/' and is not the root, got {path!r}.")
        if isinstance(volume := volume_of(source, environment, {}), modal.Volume):
            try:
                volume.hydrate()
            except modal.exception.NotFoundError as error:
                raise BackendError(
                    f"Modal has no volume {source!r}. Make it with: modal volume create {source}"
                ) from error


def volume_of(source: str, environment: str | None, credentials: Mapping[str, str]) -> Any:
    """Return a volume by its name, or a bucket by its url, to which these credentials lead."""
    if "://" not in source:
        return modal.Volume.from_name(source, environment_name=environment)
    if not source.startswith("s3://"):
        raise ValueError(f"A volume is the name of one or s3://BUCKET/PREFIX, got {source!r}.")
    address = S3Address.parse(source)
    return modal.CloudBucketMount(
        address.bucket,
        address.endpoint_url,
        address.prefix or None,
        modal.Secret.from_dict(dict(credentials)) if credentials else None,
        force_path_style=address.endpoint_url is not None,
    )
