"""The image that replicas start from: the user's, or Debian with their requirements installed."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from executors.backends.modal_client import modal
from executors.shipping.requirements import name_of, options_of


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
