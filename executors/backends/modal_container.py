"""The surroundings of replicas: the user's image, or Debian with their requirements, and volumes."""

from __future__ import annotations

import contextlib
import contextvars
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TextIO, cast

from executors.backends.modal_client import WaitingCalls, modal
from executors.errors import BackendError
from executors.shipping.requirements import name_of
from executors.store.s3.address import S3Address


def image_of(
    image: Any, python_version: str | None, requirements: Sequence[str], pins: Sequence[str] = ()
) -> modal.Image:
    """Return the image that replicas start in, with their requirements installed.

    Modal builds a layer once and keeps it, so no container installs torch again while it is paid for.

    Args:
        image: the user's, or its name in a registry. None: Debian.
        python_version: of Debian's.
        requirements: what to install. Folders of the workspace come with the code, after the build.
        pins: those of them that are ours: an image that has a later version keeps it.

    Example:
        image_of("python:3.12", None, ["torch==2.13.0"], ["torch==2.13.0"])
    """
    if image is not None:
        from executors.shipping.package import layer_command  # a look at a run packs nothing

        base = modal.Image.from_registry(image) if isinstance(image, str) else image
        wanted = not_paths(requirements)
        return base.run_commands(layer_command(wanted, pins)) if wanted else base
    made = modal.Image.debian_slim(python_version)
    if any("git+" in requirement for requirement in requirements):
        made = made.apt_install("git")
    wanted = not_paths(requirements)
    packages = [each for each in wanted if not each.startswith("--")]
    indexes = [each for each in wanted if each.startswith("--")]
    options = ["--index-strategy=unsafe-best-match", *indexes] if indexes else []  # all count alike, as they do for pip
    return made.uv_pip_install(*packages, extra_options=shlex.join(options))


def described(image: Any, python_version: str | None, requirements: Sequence[str]) -> Any:
    """Return the same for people."""
    if image is not None:
        named = image if isinstance(image, str) else repr(image)
        return {"image": named, "layer installs": not_paths(requirements)} if requirements else named
    return {"debian_slim": python_version, "uv_pip_install": not_paths(requirements)}


_builds: contextvars.ContextVar[bool] = contextvars.ContextVar("builds", default=False)
"""Whether this code runs on behalf of a build, in whatever thread of the SDK."""
_building = threading.Lock()


class _Stdout:
    """The process's stdout for all but builds, which have stderr."""

    def __init__(self, stdout: Any) -> None:
        self._stdout = stdout

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr if _builds.get() else self._stdout, name)


@contextlib.contextmanager
def _shown_on_stderr() -> Iterator[None]:
    """Show on stderr what the SDK prints on behalf of this block; it knows stdout alone.

    One block after the other: the SDK's output and stdout are the process's.
    """
    token = _builds.set(True)
    try:
        with _building, contextlib.redirect_stdout(cast(TextIO, _Stdout(sys.stdout))), modal.enable_output():
            yield
    finally:
        _builds.reset(token)


class Images:
    """Images that exist: each is built by the rank that needs it first, and the others wait."""

    def __init__(self, calls: WaitingCalls) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._built: dict[tuple[str, ...], Future[modal.Image]] = {}

    def built(self, requirements: tuple[str, ...], image: modal.Image, app: modal.App) -> modal.Image:
        """Return the image once it is there; how it is built is shown on stderr."""
        with self._lock:
            is_first = requirements not in self._built
            built = self._built.setdefault(requirements, Future())
        if is_first:
            try:
                with _shown_on_stderr():
                    built.set_result(self._calls.make(lambda: image.build.aio(app)))
            except BaseException as error:  # noqa: BLE001 - raised for every rank; the next try builds again
                del self._built[requirements]
                built.set_exception(error)
        return built.result()


def not_paths(requirements: Sequence[str]) -> list[str]:
    """Leave out requirements that are folders of the workspace: these come with the code, when the image is built."""
    return [requirement for requirement in requirements if name_of(requirement) or "://" in requirement]


def check_secret(name: str, environment: str | None) -> None:
    """Refuse a secret that is not there."""
    try:
        modal.Secret.from_name(name, environment_name=environment).hydrate()
    except modal.exception.NotFoundError as error:
        make = f"modal secret create {name} KEY=VALUE"
        raise BackendError(f"Modal has no secret {name!r}. Make it with: {make}") from error


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
