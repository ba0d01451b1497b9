"""Sends through the package apprise, which knows the URLs of a hundred services. This file imports apprise."""

from __future__ import annotations

import logging
from typing import Any

import apprise
from apprise.manager_plugins import NotificationManager

from executors.errors import did_you_mean


def _quiet() -> None:
    """Keep apprise from logging. Its messages contain URLs, which are secrets."""
    logger = logging.getLogger("apprise")
    logger.handlers[:] = [logging.NullHandler()]
    logger.propagate = False
    logger.setLevel(logging.CRITICAL + 1)


def _asset() -> Any:
    # Without a storage path, apprise keeps no files. Without plugin paths, it loads no code of the user's folders.
    return apprise.AppriseAsset(app_id="replicas", app_desc="replicas", app_url="", secure_logging=True)


def is_known_scheme(scheme: str) -> str:
    """Return an empty text if apprise knows a scheme. Otherwise return advice, as in ` Did you mean 'slack'?`.

    Args:
        scheme: the scheme, without `://`.
    """
    manager: Any = NotificationManager
    schemas = {str(each) for each in manager().schemas()}
    return "" if scheme in schemas else did_you_mean(scheme, schemas) or " apprise does not know it."


def is_valid(url: str) -> bool:
    """Return True if apprise accepts a URL. Nothing is sent.

    Args:
        url: the URL.
    """
    _quiet()
    return apprise.Apprise.instantiate(url, asset=_asset(), suppress_exceptions=True) is not None


def send_text(url: str, title: str, body: str) -> bool:
    """Send a message. Return False if apprise could not send it.

    Args:
        url: the URL.
        title: the first line.
        body: the text.
    """
    _quiet()
    target = apprise.Apprise(asset=_asset())
    if not target.add(url):
        return False
    return bool(target.notify(title=title, body=body))
