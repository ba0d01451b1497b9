"""Cluster: makes requests to a Kubernetes API server through the official client.

Each request has a time limit. The client repeats no request, and every error becomes a `JobServiceError`.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from executors.backends.jobs.sdk import LazyModule, call_each
from executors.backends.jobs.service import JobServiceError, Kind
from executors.backends.kubernetes_manifest import CONTAINER
from executors.errors import BackendError, kind_of

NEEDED_BY = "Backend 'k8s' needs the Kubernetes client."
if TYPE_CHECKING:
    from kubernetes import client, config
else:
    client = LazyModule("kubernetes.client", NEEDED_BY, "k8s")
    config = LazyModule("kubernetes.config", NEEDED_BY, "k8s")
urllib3: Any = LazyModule("urllib3.exceptions", NEEDED_BY, "k8s")
yaml: Any = LazyModule("yaml", NEEDED_BY, "k8s")

__all__ = ["ADVICE", "ALREADY_EXISTS", "Cluster", "StatusError", "client"]
LIMIT_S = (5.0, 30.0)  # to connect, and between two bytes; the client has no limits by default
IN_A_POD = "KUBERNETES_SERVICE_HOST"
NAMESPACE_OF_A_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
NEEDED = [
    *[("batch", verb, "jobs") for verb in ("create", "get", "list", "delete")],
    *[("", verb, "pods") for verb in ("list", "patch", "delete")],
    ("", "create", "secrets"),
    ("", "get", "pods/log"),
]
USEFUL = {
    ("", "get", "secrets"): "Secrets are not checked: a misspelled --secret is found out when its pods cannot start.",
    ("", "list", "events"): "Events cannot be read, so messages cannot explain why Kubernetes makes no pod.",
}
"""The rights that a launch can do without, each with the disadvantage."""
UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "doesn't match")  # any other error of TLS is a lost connection
UNAUTHORIZED = 401
ALREADY_EXISTS = "AlreadyExists"
"""The reason of the one answer 409 that means that an object of this name exists.

Under a ResourceQuota, the server also answers 409 with the reason `Conflict`: another request has changed the quota in
the same moment, and the object was not created.
"""
ADVICE = "To see your rights there: kubectl auth can-i --list."
LOG_IN = "The server does not know these credentials, or they have expired: log in again (kubectl auth whoami)."
QUOTA = "The namespace has used up its quota. To see it: kubectl describe resourcequota."
WARNING = re.compile(r'\d{3} \S+ ("(?:[^"\\]|\\.)*")')  # RFC 9111, section 5.5: code, agent, text

T = TypeVar("T")


class StatusError(JobServiceError):
    """The API server answered with an error.

    Args:
        message: the server's message, and what the user can do.
        kind: whether a repetition may help, as in `JobServiceError`.
        status: the HTTP status.
        retry_after_s: the pause that the server asked for, in seconds. 0 means none.
        reason: the machine-readable reason of the server's Status, as in "AlreadyExists". Default: none.

    Example:
        raise StatusError("Kubernetes: not found (HTTP 404).", "rejected", 404, 0.0)
    """

    def __init__(self, message: str, kind: Kind, status: int, retry_after_s: float, reason: str = "") -> None:
        super().__init__(message, kind, retry_after_s=retry_after_s)
        self.status = status
        self.reason = reason


# More than 20 methods: each is one request to the API server.
@dataclass
class Cluster:
    """Makes requests to one API server about one namespace.

    The class has more than 20 methods, one for each request that this project makes, and no state but the connection.

    Example:
        Cluster.connected(None, "team").pods("replicas-run=brave-otter-7f3a")
    """

    api: client.ApiClient
    namespace: str
    """The namespace of all requests. A few methods take another one, which comes from a record."""
    is_stale: bool = False
    """True if the server does not accept the credentials any more. A new connection may find newer credentials."""
    _has_answered: bool = False

    @classmethod
    def connected(cls, context: str | None, namespace: str | None) -> Cluster:
        """Return the cluster of a context of the kubeconfig.

        Args:
            context: the context. None: the cluster in which this process runs as a pod, or the current context.
            namespace: the namespace. None: the context's namespace.

        Raises:
            BackendError: there is no such cluster.
        """
        found, file = client.Configuration(), os.environ.get("KUBECONFIG")
        try:
            if context is None and not file and os.environ.get(IN_A_POD):
                config.load_incluster_config(client_configuration=found)
                usual = NAMESPACE_OF_A_POD.read_text().strip()
            else:
                file = file or "~/.kube/config"
                merged = config.kube_config.KubeConfigMerger(file).config
                if merged is None:
                    raise config.ConfigException(f"there is nothing in {file}")
                chosen = config.kube_config.KubeConfigLoader(merged, active_context=context)
                chosen.load_and_set(found)
                usual = chosen.current_context["context"].get("namespace") or "default"
        except (config.ConfigException, OSError, yaml.YAMLError) as error:
            raise BackendError(
                f"Backend 'k8s' finds no cluster: {str(error).rstrip('.')}. Set KUBECONFIG to the file that kubectl "
                "uses, or name a context (kubectl config get-contexts): --option context=NAME."
            ) from error
        found.retries = False
        return cls(client.ApiClient(found), namespace or usual)

    @functools.cached_property
    def _batch(self) -> client.BatchV1Api:
        return client.BatchV1Api(self.api)

    @functools.cached_property
    def _core(self) -> client.CoreV1Api:
        return client.CoreV1Api(self.api)

    @property
    def server(self) -> str:
        """The url of the API server."""
        return str(self.api.configuration.host)

    def prepare(self) -> None:
        """Import the modules that are needed to create a Secret.

        The import may take seconds on a busy machine. So it must not come between the creation of a Job and of its
        Secret. A kubelet that finds no Secret looks again only after 10 to 15 s.
        """
        self._core  # noqa: B018 - the first use imports the API
        client.V1Secret, client.V1SecretList  # noqa: B018 - the first use imports the models

    def missing_rights(self) -> list[str]:
        """Return the needed rights that this account does not have in the namespace, as in "create jobs"."""
        return [f"{verb} {what}" for _, verb, what in self._missing(NEEDED)]

    def missed_rights(self) -> list[tuple[str, str]]:
        """Return the useful rights that this account does not have, as in "get secrets", each with the disadvantage."""
        return [(f"{right[1]} {right[2]}", USEFUL[right]) for right in self._missing(list(USEFUL))]

    def _missing(self, rights: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
        review = client.AuthorizationV1Api(self.api).create_self_subject_access_review

        def is_missing(needed: tuple[str, str, str]) -> bool:
            group, verb, resource = needed
            resource, _, part = resource.partition("/")
            attributes = {"namespace": self.namespace, "group": group, "resource": resource, "verb": verb}
            body = {"spec": {"resourceAttributes": {**attributes, **({"subresource": part} if part else {})}}}
            return not self._ask(review, body).status.allowed

        answers = zip(rights, call_each(is_missing, rights, len(rights)), strict=True)
        return [right for right, missing in answers if missing]

    def create_job(self, body: Mapping[str, Any], *, is_dry: bool = False) -> tuple[Any, list[str]]:
        """Create a Job.

        Args:
            body: the manifest.
            is_dry: True: the server only reports what it would do. Default False.

        Returns:
            The Job as the server created it, and the server's warnings, such as that its pods will be refused.

        Raises:
            JobServiceError: the request failed. It is a StatusError if the server answered.
        """
        create, more = self._batch.create_namespaced_job_with_http_info, {"dry_run": "All"} if is_dry else {}
        made, _, headers = self._ask(
            create, self.namespace, body, may_have_acted=True, field_validation="Strict", **more
        )
        return made, _warnings(headers)

    def job(self, name: str, namespace: str | None = None) -> Any:
        """Return a Job. None if there is no such Job.

        Args:
            name: the name of the Job.
            namespace: the namespace. Default: the cluster's namespace.
        """
        return self._unless_gone(self._batch.read_namespaced_job, name, namespace or self.namespace)

    def jobs(self, selector: str) -> list[Any]:
        """Return the Jobs with some labels, the oldest first. Jobs that are being deleted are left out.

        Args:
            selector: the labels, as `selector_of` returns them.
        """
        found = self._ask(self._batch.list_namespaced_job, self.namespace, label_selector=selector).items
        found = [job for job in found if job.metadata.deletion_timestamp is None]
        return sorted(found, key=lambda job: job.metadata.creation_timestamp)

    def delete_job(self, name: str, namespace: str | None = None) -> None:
        """Delete a Job. Kubernetes then deletes its pods and its Secret.

        Args:
            name: the name of the Job.
            namespace: the namespace. Default: the cluster's namespace.
        """
        space = namespace or self.namespace
        self._unless_gone(self._batch.delete_namespaced_job, name, space, propagation_policy="Background")

    def pods(self, selector: str, namespace: str | None = None) -> list[Any]:
        """Return the pods with some labels, the newest last.

        Args:
            selector: the labels, as `selector_of` returns them.
            namespace: the namespace. Default: the cluster's namespace.
        """
        found = self._ask(self._core.list_namespaced_pod, namespace or self.namespace, label_selector=selector).items
        return sorted(found, key=lambda pod: pod.metadata.creation_timestamp)

    def why_no_pod(self, job: Any) -> str:
        """Return the reason why the pods of a Job cannot be created. Empty if no event explains it.

        Args:
            job: the Job.
        """
        selector = f"involvedObject.uid={job.metadata.uid},reason=FailedCreate"
        found = self._ask(self._core.list_namespaced_event, job.metadata.namespace, field_selector=selector).items
        # A repeated event keeps its creation time and gets a new last time, so the last time is compared.
        newest = max(found, key=lambda event: event.last_timestamp or event.metadata.creation_timestamp, default=None)
        return "" if newest is None else f"FailedCreate: {newest.message}"

    def end_pod(self, pod: Any) -> None:
        """End a pod that runs by a time limit that has passed. The pod and its log stay.

        Args:
            pod: the pod.
        """
        body = {"spec": {"activeDeadlineSeconds": 1}}  # the smallest legal value
        self._unless_gone(self._core.patch_namespaced_pod, pod.metadata.name, pod.metadata.namespace, body)

    def delete_pod(self, pod: Any) -> None:
        """Delete a pod. A pod that is gone is not an error.

        Args:
            pod: the pod.
        """
        self._unless_gone(self._core.delete_namespaced_pod, pod.metadata.name, pod.metadata.namespace)

    def log(self, pod: Any, n_lines: int) -> str:
        """Return the last lines of a pod's log. Empty if there is no log yet, or not any more.

        Args:
            pod: the pod.
            n_lines: the largest number of lines.
        """

        def read(**more: Any) -> Any:  # reads the raw bytes, because the client would parse a log that is JSON
            where = (pod.metadata.name, pod.metadata.namespace)
            return self._core.read_namespaced_pod_log(
                *where, container=CONTAINER, tail_lines=n_lines, _preload_content=False, **more
            ).data

        try:
            return (self._unless_gone(read) or b"").decode(errors="replace")
        except StatusError as error:
            if error.status == 400 and "waiting to start" in str(error):
                return ""
            raise

    def has_secret(self, name: str) -> bool:
        """Return True if a Secret exists, or if this account may not find that out.

        Args:
            name: the name of the Secret.
        """
        try:
            return self._unless_gone(self._core.read_namespaced_secret, name, self.namespace) is not None
        except StatusError as error:
            if error.status == 403:  # pods may use a Secret that this account may not read
                return True
            raise

    def give_secret(self, job: Any, data: Mapping[str, str]) -> None:
        """Create the Secret of a Job. Kubernetes deletes it with the Job, also if the Job is gone already.

        Args:
            job: the Job.
            data: the variables in the Secret.

        Raises:
            JobServiceError: the request failed.
        """
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job.metadata.name, "uid": job.metadata.uid}
        labels = job.spec.template.metadata.labels
        metadata = {"name": job.metadata.name, "labels": labels, "ownerReferences": [owner]}
        body = {"metadata": metadata, "stringData": dict(data)}
        try:
            self._ask(self._core.create_namespaced_secret, self.namespace, body, may_have_acted=True)
        except StatusError as error:
            # If this Job's Secret exists, an earlier request has created it, and its answer was lost.
            if error.reason != ALREADY_EXISTS or not self._is_owned_secret(job):
                raise

    def _is_owned_secret(self, job: Any) -> bool:
        try:
            found = self._unless_gone(self._core.read_namespaced_secret, job.metadata.name, self.namespace)
        except StatusError as error:
            if error.status == 403:  # this account may not read Secrets; the name is the Job's, which is enough
                return True
            raise
        return found is not None and job.metadata.uid in [each.uid for each in found.metadata.owner_references or ()]

    def _ask(self, call: Callable[..., Any], *args: Any, may_have_acted: bool = False, **more: Any) -> Any:
        """Make a request; see `_asked`. If the credentials have expired since, the request may be tried again."""
        try:
            answer = _asked(call, *args, may_have_acted=may_have_acted, **more)
        except StatusError as error:
            if error.status == UNAUTHORIZED and self._has_answered:
                self.is_stale, error.kind = True, "unavailable"
            raise
        self._has_answered = True
        return answer

    def _unless_gone(self, call: Callable[..., T], *args: Any, **more: Any) -> T | None:
        """Make a request. Return None if there is no such object."""
        try:
            return self._ask(call, *args, **more)  # type: ignore[no-any-return]
        except StatusError as error:
            if error.status == 404:
                return None
            raise


def _asked(call: Callable[..., Any], *args: Any, may_have_acted: bool = False, **more: Any) -> Any:
    """Make a request of the client.

    Args:
        call: a method of one of the client's APIs.
        args: the positional arguments of the method.
        may_have_acted: True if the server may have acted when its answer is lost. Default False.
        more: the keyword arguments of the method.

    Raises:
        JobServiceError: the request failed. It is a StatusError if the server answered.
    """
    lost: Kind = "unknown" if may_have_acted else "unavailable"
    try:
        return call(*args, _request_timeout=LIMIT_S, **more)
    except client.ApiException as error:
        raise _status_error(error, lost) from error
    except (OSError, urllib3.HTTPError) as error:
        never_sent = isinstance(error, (urllib3.NewConnectionError, urllib3.ConnectTimeoutError))
        text = f"Kubernetes cannot be reached: {str(error) or type(error).__name__}"
        raise JobServiceError(text, "unavailable" if never_sent else lost) from error
    except config.ConfigException as error:  # the token has expired, and the command for tokens gives no new one
        raise JobServiceError(f"Kubernetes: no credentials: {error}", "rejected") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if problem := _refused_by_client(error):  # nothing was sent
            raise JobServiceError(f"Kubernetes does not take this request: {problem}.", "rejected") from error
        text = f"Kubernetes sent a malformed answer ({type(error).__name__}: {error}). Is there a proxy in between?"
        raise JobServiceError(text, lost) from error


def _status_error(error: Any, lost: Kind) -> StatusError:
    """Translate an error answer.

    Args:
        error: the client's `ApiException`.
        lost: the kind of an answer that does not show whether the server acted.
    """
    status = int(error.status or 0)  # 0: TLS failed
    message, reason = _message_and_reason(error)
    is_cut = not status and not any(words in str(error.reason) for words in UNTRUSTED)
    kind: Kind = "rejected"
    if status == 429 or (status == 409 and reason != ALREADY_EXISTS):
        kind = "unavailable"  # the server did nothing, and the next request may be granted
    elif status >= 500 or is_cut:
        kind = lost
    advice = ""
    if status == UNAUTHORIZED:
        advice = f" {LOG_IN}"
    elif status == 403 and "exceeded quota" in message:
        advice = f" {QUOTA}"
    elif status == 403 and " cannot " in message:  # RBAC words it like this, and admission plugins differently
        advice = f" {ADVICE}"
    pause = str((error.headers or {}).get("Retry-After", ""))
    text = f"Kubernetes: {message.rstrip('.')} (HTTP {status}).{advice}"
    return StatusError(text, kind, status, float(pause) if pause.isdecimal() else 0.0, reason)


def _message_and_reason(error: Any) -> tuple[str, str]:
    """Return the message and the reason of a server's Status. A proxy's answer has a message and no reason."""
    try:
        found = json.loads(error.body)
        return str(found["message"]), str(found.get("reason") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return str(error.reason or "an error without a message"), ""


def _refused_by_client(error: Exception) -> str:
    """Return a text on the argument that the client itself refuses. Empty if the error is about an answer.

    The client checks the arguments of a call, and its error is titled by the call, as in
    "BatchV1Api.create_namespaced_job". An error about an answer is titled by a model.
    """
    if "Api." not in str(getattr(error, "title", "")):
        return ""
    problem = error.errors()[0]  # type: ignore[attr-defined]  # pydantic's, which the client brings
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"][1:]).lstrip(".")
    # The message has the type and not the value, which may be a secret.
    return f"{field or 'an argument'} is {kind_of(problem['input'])}. {problem['msg']}"


def _warnings(headers: Mapping[str, str] | None) -> list[str]:
    """Return the texts of the headers `Warning` of an answer, each once."""
    text = ", ".join(value for name, value in (headers or {}).items() if name.lower() == "warning")
    return list(dict.fromkeys(json.loads(quoted) for quoted in WARNING.findall(text)))
