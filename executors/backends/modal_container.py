"""The image, the secrets and the volumes of a replica's container on Modal."""

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
from executors.shipping.requirements import package_name_of
from executors.store.s3.address import S3Address


def image_of(
    image: Any, python_version: str | None, requirements: Sequence[str], pins: Sequence[str] = ()
) -> modal.Image:
    """Return the image of the replicas, with their requirements installed.

    Modal builds a layer once and keeps it. So no container installs torch while the user pays for it.

    Args:
        image: the user's image, or its name in a registry. None: Debian.
        python_version: the version of Python in Debian's image, as in "3.12".
        requirements: the packages to install. Folders of the workspace are left out, because they come with the code.
        pins: the requirements that are this project's own. If the image has a later version, it keeps that.

    Example:
        image_of("python:3.12", None, ["torch==2.13.0"], ["torch==2.13.0"])
    """
    if image is not None:
        from executors.shipping.package import layer_command  # not at the top: most processes start no job

        base = modal.Image.from_registry(image) if isinstance(image, str) else image
        wanted = not_paths(requirements)
        return base.run_commands(layer_command(wanted, pins)) if wanted else base
    made = modal.Image.debian_slim(python_version)
    if any("git+" in requirement for requirement in requirements):
        made = made.apt_install("git")
    wanted = not_paths(requirements)
    packages = [each for each in wanted if not each.startswith("--")]
    indexes = [each for each in wanted if each.startswith("--")]
    # All indexes count alike, as they do for pip. uv alone would take a package from the first index that has it.
    options = ["--index-strategy=unsafe-best-match", *indexes] if indexes else []
    return made.uv_pip_install(*packages, extra_options=shlex.join(options))


def described(image: Any, python_version: str | None, requirements: Sequence[str]) -> Any:
    """Return a description of the image of the replicas, as plain JSON.

    Args:
        image: the user's image, or its name in a registry. None: Debian.
        python_version: the version of Python in Debian's image.
        requirements: the packages to install.

    Example:
        described(None, "3.12", ["torch"])
    """
    if image is not None:
        named = image if isinstance(image, str) else repr(image)
        return {"image": named, "layer installs": not_paths(requirements)} if requirements else named
    return {"debian_slim": python_version, "uv_pip_install": not_paths(requirements)}


_builds: contextvars.ContextVar[bool] = contextvars.ContextVar("builds", default=False)
"""True in code that a build runs, also in the SDK's threads."""
_building = threading.Lock()


class _Stdout:
    """A replacement for `sys.stdout`. Builds print to stderr through it, and all other code to stdout."""

    def __init__(self, stdout: Any) -> None:
        self._stdout = stdout

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr if _builds.get() else self._stdout, name)


@contextlib.contextmanager
def _shown_on_stderr() -> Iterator[None]:
    """Show the SDK's output for this block on stderr. The SDK can only print to stdout.

    Only one block runs at a time, because `sys.stdout` and the SDK's output belong to the whole process.
    """
    token = _builds.set(True)
    try:
        with _building, contextlib.redirect_stdout(cast(TextIO, _Stdout(sys.stdout))), modal.enable_output():
            yield
    finally:
        _builds.reset(token)


class Images:
    """Builds images, each once. The rank that needs an image first builds it, and the others wait.

    Args:
        calls: makes the calls, which may be interrupted.

    Example:
        Images(WaitingCalls()).built(("torch",), image, app)
    """

    def __init__(self, calls: WaitingCalls) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._built: dict[tuple[str, ...], Future[modal.Image]] = {}

    def built(self, requirements: tuple[str, ...], image: modal.Image, app: modal.App) -> modal.Image:
        """Return an image when it has been built. The output of the build goes to stderr.

        Args:
            requirements: the packages of the image, by which it is recognized.
            image: the image to build.
            app: the app that builds it.

        Raises:
            Exception: the build failed. Each rank that waits gets the error, and the next call builds again.
        """
        with self._lock:
            is_first = requirements not in self._built
            built = self._built.setdefault(requirements, Future())
        if is_first:
            try:
                with _shown_on_stderr():
                    built.set_result(self._calls.make(lambda: image.build.aio(app)))
            except BaseException as error:  # noqa: BLE001 - `result` raises it for every rank that waits
                del self._built[requirements]
                built.set_exception(error)
        return built.result()


def not_paths(requirements: Sequence[str]) -> list[str]:
    """Return the requirements that are not folders of the workspace. Folders come with the code, after the build.

    Args:
        requirements: the requirements.

    Example:
        not_paths(["torch", "./my_package"])
    """
    return [requirement for requirement in requirements if package_name_of(requirement) or "://" in requirement]


def check_secret(name: str, environment: str | None) -> None:
    """Check that a secret exists.

    Args:
        name: the name of the secret.
        environment: the Modal environment. None: the default of the account.

    Raises:
        BackendError: there is no secret with this name.

    Example:
        check_secret("wandb", None)
    """
    try:
        modal.Secret.from_name(name, environment_name=environment).hydrate()
    except modal.exception.NotFoundError as error:
        make = f"modal secret create {name} KEY=VALUE"
        raise BackendError(f"Modal has no secret {name!r}. Create it with: {make}") from error


def check_volumes(volumes: Mapping[str, str], environment: str | None) -> None:
    """Check that volumes can be mounted.

    Args:
        volumes: the names or urls of the storage, by the path in the replica.
        environment: the Modal environment. None: the default of the account.

    Raises:
        BackendError: there is no volume with this name.
        ValueError: a path is not absolute, or a url is not the url of a bucket.

    Example:
        check_volumes({"/data": "my-volume"}, None)
    """
    for path, source in volumes.items():
        if not path.startswith("/") or path == "/":
            raise ValueError(f"The path of a volume must start with '/' and must not be the root, got {path!r}.")
        if isinstance(volume := volume_of(source, environment, {}), modal.Volume):
            try:
                volume.hydrate()
            except modal.exception.NotFoundError as error:
                raise BackendError(
                    f"Modal has no volume {source!r}. Create it with: modal volume create {source}"
                ) from error


def volume_of(source: str, environment: str | None, credentials: Mapping[str, str]) -> Any:
    """Return the volume with a name, or the bucket with a url.

    Args:
        source: the name of a volume, or the url of a bucket as in "s3://BUCKET/PREFIX".
        environment: the Modal environment. None: the default of the account.
        credentials: the variables with the credentials of the bucket.

    Raises:
        ValueError: the url is not the url of a bucket.

    Example:
        volume_of("my-volume", None, {})
    """
    if "://" not in source:
        return modal.Volume.from_name(source, environment_name=environment)
    if not source.startswith("s3://"):
        raise ValueError(f"A volume must be the name of a Modal Volume or s3://BUCKET/PREFIX, got {source!r}.")
    address = S3Address.parse(source)
    return modal.CloudBucketMount(
        address.bucket,
        address.endpoint_url,
        address.prefix or None,
        modal.Secret.from_dict(dict(credentials)) if credentials else None,
        force_path_style=address.endpoint_url is not None,
    )
