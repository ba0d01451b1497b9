"""Requests to a Kubernetes API server through the official client.

Each request has a time limit, the client repeats none of them, and every error becomes a `JobServiceError`.
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

if TYPE_CHECKING:
    from kubernetes import client, config
else:
    MISSING = "Backend 'k8s' needs the Kubernetes client. Install it with: pip install 'serverless-replicas[k8s]'"
    client, config = LazyModule("kubernetes.client", MISSING), LazyModule("kubernetes.config", MISSING)
urllib3: Any = LazyModule("urllib3.exceptions", "")
yaml: Any = LazyModule("yaml", "")

__all__ = ["ADVICE", "ALREADY_EXISTS", "Cluster", "StatusError", "client"]
LIMIT_S = (5.0, 30.0)  # to connect, and between two bytes; the client itself waits without end
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
"""Rights that a launch does without, and what is missed without each."""
UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "doesn't match")  # other errors of TLS are lost connections
UNAUTHORIZED = 401
ALREADY_EXISTS = "AlreadyExists"
"""The reason of the one answer 409 that means that an object of this name exists.

Under a ResourceQuota, the server also answers 409 with the reason `Conflict`: another request has changed the quota in
the same moment, and the object was not created.
"""
ADVICE = "What you may do there: kubectl auth can-i --list."
LOG_IN = "The server does not know these credentials, or they have expired: log in again (kubectl auth whoami)."
QUOTA = "The namespace has used up its quota: kubectl describe resourcequota."
WARNING = re.compile(r'\d{3} \S+ ("(?:[^"\\]|\\.)*")')  # RFC 9111, section 5.5: code, agent, text

T = TypeVar("T")


class StatusError(JobServiceError):
    """The API server answered with an error.

    Args:
        message: the server's message, and what the user can do.
        kind: whether a repetition may help, as in `JobServiceError`.
        status: the HTTP status.
        retry_after_s: the pause that the server asked for, in seconds. 0 means none.
        reason: the machine-readable reason of the server's Status, as in "AlreadyExists". Empty if it named none.
    """

    def __init__(self, message: str, kind: Kind, status: int, retry_after_s: float, reason: str = "") -> None:
        super().__init__(message, kind, retry_after_s=retry_after_s)
        self.status = status
        self.reason = reason


# More than 20 methods: each is one request to the API server.
@dataclass
class Cluster:
    """The requests to one API server about one namespace; where a namespace is given, a record names that one."""

    api: client.ApiClient
    namespace: str
    is_stale: bool = False
    """Whether the server takes its credentials no more: who connects again may find newer ones."""
    _has_answered: bool = False

    @classmethod
    def connected(cls, context: str | None, namespace: str | None) -> Cluster:
        """Return the cluster of a context of the kubeconfig. None means this pod's cluster, or the current context.

        Raises:
            BackendError: there is none.
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
                "uses, or name one of `kubectl config get-contexts`: --option context=NAME."
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
        return str(self.api.configuration.host)

    def prepare(self) -> None:
        """Import what creates a Secret.

        The import takes up to some seconds on a busy machine. It must not come between the creation of a Job and the
        creation of its Secret: a kubelet that finds no Secret looks again after 10 to 15 s only.
        """
        self._core  # noqa: B018 - its first use imports the API
        client.V1Secret, client.V1SecretList  # noqa: B018 - and these are its models

    def missing_rights(self) -> list[str]:
        """Return the needed rights that this account does not have in the namespace, as in "create jobs"."""
        return [f"{verb} {what}" for _, verb, what in self._missing(NEEDED)]

    def missed_rights(self) -> list[tuple[str, str]]:
        """Return the useful rights that this account does not have, each as in "get secrets", and what is missed."""
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
            is_dry: whether the server only reports what it would do. Default: False.

        Returns: the Job as the server made it, and what the server warns of, as that its pods will be refused.
        """
        create, more = self._batch.create_namespaced_job_with_http_info, {"dry_run": "All"} if is_dry else {}
        made, _, headers = self._ask(
            create, self.namespace, body, may_have_acted=True, field_validation="Strict", **more
        )
        return made, _warnings(headers)

    def job(self, name: str, namespace: str | None = None) -> Any:
        """Return a Job; None where there is none."""
        return self._unless_gone(self._batch.read_namespaced_job, name, namespace or self.namespace)

    def jobs(self, selector: str) -> list[Any]:
        """Return the Jobs with some labels, the oldest first, without those that are being deleted."""
        found = self._ask(self._batch.list_namespaced_job, self.namespace, label_selector=selector).items
        found = [job for job in found if job.metadata.deletion_timestamp is None]
        return sorted(found, key=lambda job: job.metadata.creation_timestamp)

    def delete_job(self, name: str, namespace: str | None = None) -> None:
        """Delete a Job, and with it, soon, its pods and its Secret."""
        space = namespace or self.namespace
        self._unless_gone(self._batch.delete_namespaced_job, name, space, propagation_policy="Background")

    def pods(self, selector: str, namespace: str | None = None) -> list[Any]:
        """Return the pods with some labels, the newest last."""
        found = self._ask(self._core.list_namespaced_pod, namespace or self.namespace, label_selector=selector).items
        return sorted(found, key=lambda pod: pod.metadata.creation_timestamp)

    def why_no_pod(self, job: Any) -> str:
        """Return why the pods of a Job cannot be made. Empty if no event explains it."""
        selector = f"involvedObject.uid={job.metadata.uid},reason=FailedCreate"
        found = self._ask(self._core.list_namespaced_event, job.metadata.namespace, field_selector=selector).items
        # The server counts an event that comes again: its creation stays, and its last time moves.
        newest = max(found, key=lambda event: event.last_timestamp or event.metadata.creation_timestamp, default=None)
        return "" if newest is None else f"FailedCreate: {newest.message}"

    def end_pod(self, pod: Any) -> None:
        """End a pod that runs, by its own limit: it stays, and so does its log."""
        body = {"spec": {"activeDeadlineSeconds": 1}}  # the least that there is
        self._unless_gone(self._core.patch_namespaced_pod, pod.metadata.name, pod.metadata.namespace, body)

    def delete_pod(self, pod: Any) -> None:
        self._unless_gone(self._core.delete_namespaced_pod, pod.metadata.name, pod.metadata.namespace)

    def log(self, pod: Any, n_lines: int) -> str:
        """Return the last lines of a pod's log; empty where there is none yet, or no more."""

        def read(**more: Any) -> Any:  # the client itself would make something else of a log that is JSON
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
        try:
            return self._unless_gone(self._core.read_namespaced_secret, name, self.namespace) is not None
        except StatusError as error:
            if error.status == 403:  # a user who may use a Secret need not be allowed to read it
                return True
            raise

    def give_secret(self, job: Any, data: Mapping[str, str]) -> None:
        """Make the Secret that a Job owns: it is deleted with its Job, also when that one is gone already."""
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job.metadata.name, "uid": job.metadata.uid}
        labels = job.spec.template.metadata.labels
        metadata = {"name": job.metadata.name, "labels": labels, "ownerReferences": [owner]}
        body = {"metadata": metadata, "stringData": dict(data)}
        try:
            self._ask(self._core.create_namespaced_secret, self.namespace, body, may_have_acted=True)
        except StatusError as error:
            if error.reason != ALREADY_EXISTS or not self._is_owned_secret(job):  # it exists: an answer was lost
                raise

    def _is_owned_secret(self, job: Any) -> bool:
        try:
            found = self._unless_gone(self._core.read_namespaced_secret, job.metadata.name, self.namespace)
        except StatusError as error:
            if error.status == 403:  # then the name, which is its Job's, must do
                return True
            raise
        return found is not None and job.metadata.uid in [each.uid for each in found.metadata.owner_references or ()]

    def _ask(self, call: Callable[..., Any], *args: Any, may_have_acted: bool = False, **more: Any) -> Any:
        """Make a request; see `_asked`. Credentials that were good once may have been renewed: that is tried again."""
        try:
            answer = _asked(call, *args, may_have_acted=may_have_acted, **more)
        except StatusError as error:
            if error.status == UNAUTHORIZED and self._has_answered:
                self.is_stale, error.kind = True, "unavailable"
            raise
        self._has_answered = True
        return answer

    def _unless_gone(self, call: Callable[..., T], *args: Any, **more: Any) -> T | None:
        """Make a request; None where there is no such object."""
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
        args: its positional arguments.
        may_have_acted: whether the server may have done what was asked when its answer is lost.
        more: its further arguments.

    Raises:
        JobServiceError: the request failed; a StatusError where the server answered.
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
    except config.ConfigException as error:  # a token that has run out, and its command gives no other
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
        lost: the kind of an answer that says nothing about whether the server acted.
    """
    status = int(error.status or 0)  # 0: TLS failed
    message, reason = _said(error)
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
    elif status == 403 and " cannot " in message:  # the words of RBAC; admission plugins refuse in their own
        advice = f" {ADVICE}"
    pause = str((error.headers or {}).get("Retry-After", ""))
    text = f"Kubernetes: {message.rstrip('.')} (HTTP {status}).{advice}"
    return StatusError(text, kind, status, float(pause) if pause.isdecimal() else 0.0, reason)


def _said(error: Any) -> tuple[str, str]:
    """Return the message and the reason of a server's Status, or a proxy's message in its place, without a reason."""
    try:
        found = json.loads(error.body)
        return str(found["message"]), str(found.get("reason") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return str(error.reason or "an error without a message"), ""


def _refused_by_client(error: Exception) -> str:
    """Name the field of a request that the client's own models refuse. Empty if the error is about an answer.

    The client checks the arguments of a call, and its error is titled by the call, as in
    "BatchV1Api.create_namespaced_job". An error about an answer is titled by a model.
    """
    if "Api." not in str(getattr(error, "title", "")):
        return ""
    problem = error.errors()[0]  # type: ignore[attr-defined]  # pydantic's, which the client brings
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"][1:]).lstrip(".")
    # The type alone: the value may be a secret.
    return f"{place or 'an argument'} is {kind_of(problem['input'])}. {problem['msg']}"


def _warnings(headers: Mapping[str, str] | None) -> list[str]:
    """Return the texts of the headers `Warning` of an answer, each once."""
    text = ", ".join(value for name, value in (headers or {}).items() if name.lower() == "warning")
    return list(dict.fromkeys(json.loads(quoted) for quoted in WARNING.findall(text)))
