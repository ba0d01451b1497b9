"""Objects of the client of Kubernetes, made from the JSON of the API."""

from __future__ import annotations

import json
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from kubernetes import client


def made_from(kind: Any, data: dict[str, Any]) -> Any:
    """Return an object of the client, as the client reads it from an answer of the API.

    Newer releases of the client have `from_dict`. Older ones read only whole answers.

    Args:
        kind: The class, such as `client.V1Pod`.
        data: The object as the API has it. A time may be a `datetime`.
    """
    if hasattr(kind, "from_dict"):
        return kind.from_dict(data)
    answer = SimpleNamespace(data=json.dumps(data, default=datetime.isoformat))
    return client.ApiClient().deserialize(answer, kind)
