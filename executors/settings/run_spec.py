"""The values that start attempts of ranks: `RunSpec` is sent to other processes, and `StartSpec` stays in this one.

Both contain secrets, so neither is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from executors.settings import Settings
from executors.settings.policy import Restarts, supervised
from executors.store.run_key import RUN_KEY

LEASE_S = 900.0
"""How long containers continue while no process renews their lease, in seconds."""
NOTIFY = "REPLICAS_NOTIFY"
"""The environment variable with the URLs to which notifications are sent. It is a secret."""
ATTACHED_LEASE = "lease.json"
"""The lease of an attached run, below the run."""


@dataclass(frozen=True)
class RunSpec:
    """The values that start attempts of some ranks of a run, as JSON. They contain secrets, so they are never
    stored.
    """

    run_id: str
    store_url: str
    task_digest: str
    """The sha256 of the run's task.json."""
    settings: Settings
    """The settings of the run. Settings that a resume or an addition has changed have their new values here."""
    ranks: tuple[int, ...]
    attempt: int = 0
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Additional environment variables of the replicas. They are never recorded."""
    secret_names: tuple[str, ...] = ()
    key: str | None = field(default=None, repr=False)
    """The key of a signed run, in hexadecimal. Replicas get it as a secret, and it is never recorded."""
    notify: tuple[str, ...] = field(default=(), repr=False)
    """The URLs to which notifications are sent. Supervisors get them as secrets, and they are never recorded."""
    usd_per_hour: float | None = None
    """The price of one replica, in US dollars per hour, for notifications. None: it is not known."""
    launched_at: float = 0.0
    """Unix time of the launch."""
    lease_s: float | None = None
    """How long the containers continue while no process renews their lease, in seconds. None: they need no lease."""
    lease_name: str = ATTACHED_LEASE
    """The name of the lease. The containers of a detached start share a lease of their own, which their launcher renews
    until the last container has started. After that they need no lease.
    """
    is_of_spares: bool = False
    """True if `ranks` are numbers of spares of the run."""
    task_folder: str = "task"
    """The path of the task's folder below the run."""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunSpec:
        """Return the spec that `to_json` wrote."""
        tuples = {name: tuple(record[name]) for name in ("ranks", "secret_names", "notify") if name in record}
        return cls(**{**record, **tuples, "settings": Settings.parse(dict(record["settings"]), "settings")})

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON."""
        return {**vars(self), "env": dict(self.env), "settings": self.settings.to_json()}

    def with_settings(self, **changes: Any) -> RunSpec:
        """Return a copy with some settings changed.

        Args:
            changes: settings by name.

        Example:
            spec.with_settings(min_replicas=1)
        """
        return replace(self, settings=replace(self.settings, **changes))

    @property
    def world_size(self) -> int:
        """The number of replicas that were launched. Added replicas have higher ranks."""
        return self.settings.n

    @property
    def supervised_restarts(self) -> Restarts | None:
        """The restart policy that the supervisors of the replicas apply. None: they restart nothing."""
        return Restarts.of(supervised(self.settings.restarts))

    @property
    def is_watched(self) -> bool:
        """True if another process watches the run as long as its containers run."""
        return self.lease_s is not None and self.lease_name == ATTACHED_LEASE

    def without_notify(self) -> RunSpec:
        """Return a copy without the URLs of notifications, for the process of a rank, which sends none."""
        return replace(self, notify=())

    @property
    def container_secrets(self) -> dict[str, str]:
        """The variables that the supervisor in a container gets as secrets."""
        return {**self.credentials, **({NOTIFY: " ".join(self.notify)} if self.notify else {})}

    @property
    def credentials(self) -> dict[str, str]:
        """The variables that are sent to the replicas as secrets."""
        return {} if self.key is None else {RUN_KEY: self.key}


@dataclass(frozen=True)
class StartSpec:
    """The values to start attempts of some ranks, for one request to a backend.

    A `RunSpec` is sent to supervisors and containers. A `StartSpec` stays in the process that starts the ranks, because
    its entrypoint may be a callable of this process. The launch has one. Each addition has its own, because it does not
    get the secrets of the launch.

    Example:
        backend.start_ranks(StartSpec(spec, "train.py:main", gpu="H100", timeout_s=3600.0))
    """

    spec: RunSpec
    """The run, and the ranks and the attempt that are started."""
    entrypoint: str | Callable[..., Any]
    """The callable, or its name."""
    gpu: str | None = None
    """The GPU of each replica. None: the GPU of the placement, or no GPU."""
    timeout_s: float | None = None
    """How long each replica may run, in seconds. None: the limit of the placement, or of the backend."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks to start."""
        return self.spec.ranks

    def with_spec(self, **changes: Any) -> StartSpec:
        """Return a copy with fields of its `RunSpec` changed.

        Args:
            changes: fields by name.

        Example:
            start.with_spec(ranks=(3,), attempt=2)
        """
        return replace(self, spec=replace(self.spec, **changes))

    def with_settings(self, **changes: Any) -> StartSpec:
        """Return a copy with some settings changed.

        Args:
            changes: settings by name.

        Example:
            start.with_settings(min_replicas=1)
        """
        return replace(self, spec=self.spec.with_settings(**changes))
