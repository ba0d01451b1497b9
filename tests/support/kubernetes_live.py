"""LiveCluster: evicts pods, loses answers and counts requests at a real cluster, for the contract suites.

It uses only the rights that README names. A method that needs another right skips its test and names the right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import urllib3

from executors.backends.jobs.service import JobId
from executors.backends.kubernetes import KubernetesJobs
from executors.backends.kubernetes_client import client
from executors.backends.kubernetes_manifest import selector_of
from executors.backends.kubernetes_pods import INDEX, JOB_NAME
from executors.testing import eventually

PATIENCE_S = 900.0  # seconds; a pod first waits in the cluster's queue and for its image


class LiveCluster:
    """The cluster that a service is connected to, through the same connection.

    Args:
        service: the service under test.
    """

    def __init__(self, service: KubernetesJobs) -> None:
        self._service = service
        self._cluster = service._cluster
        self._core = client.CoreV1Api(self._cluster.api)
        self._n_starts = self._n_looks = 0
        self._counts = False

    @property
    def namespace(self) -> str:
        return self._cluster.namespace

    @property
    def server(self) -> str:
        return self._cluster.server

    def may(self, verb: str, resource: str) -> bool:
        """Return whether this account has a right in the namespace, as in `may("create", "pods/eviction")`."""
        return not self._cluster._missing([("", verb, resource)])

    def kill(self, job_id: JobId) -> None:
        """Delete the pod of a job by its name, without any grace."""
        for pod in self._pods(job_id):
            self._core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace, grace_period_seconds=0)

    def evict(self, job_id: JobId) -> None:
        """Evict the pod of a job as `kubectl drain` does, and watch it until it is gone.

        The pod's condition names the eviction, and is deleted with the pod. So this process reads the condition before
        that.
        """
        if not self.may("create", "pods/eviction"):
            pytest.skip("this account may not create pods/eviction: nothing can be evicted")
        for pod in self._pods(job_id):
            metadata = {"name": pod.metadata.name, "namespace": pod.metadata.namespace}
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
            self._core.create_namespaced_pod_eviction(pod.metadata.name, pod.metadata.namespace, body)

        def is_gone() -> bool:
            state = self._service.state(job_id)
            return state.has_ended and not state.is_unconfirmed

        eventually(is_gone, "the evicted pod is gone", within_s=PATIENCE_S)

    def lose_reply(self) -> Callable[[], int]:
        """Let the server create the next Job, and then break the connection before the answer.

        Returns: a function that counts the replicas of the Jobs that were created since.
        """
        before = {job.metadata.name for job in self._cluster.jobs("replicas-run")}
        request, lost = self._cluster.api.rest_client.request, list[str]()

        def lose(method: str, url: str, *args: Any, **more: Any) -> Any:
            answer = request(method, url, *args, **more)
            if _starts(method, url) and not lost:
                lost.append(url)
                raise urllib3.exceptions.ProtocolError("Connection broken, as the test asked")
            return answer

        self._cluster.api.rest_client.request = lose
        found = self._cluster.jobs
        return lambda: sum(job.spec.completions for job in found("replicas-run") if job.metadata.name not in before)

    def requests(self) -> tuple[int, int]:
        """Return how many requests to create Jobs, and to look at Jobs and pods, this connection has made since the
        first call."""
        if not self._counts:
            self._counts, request = True, self._cluster.api.rest_client.request

            def count(method: str, url: str, *args: Any, **more: Any) -> Any:
                self._n_starts += _starts(method, url)
                path = url.partition("?")[0]
                self._n_looks += method == "GET" and ("/jobs" in path or path.endswith("/pods"))
                return request(method, url, *args, **more)

            self._cluster.api.rest_client.request = count
        return self._n_starts, self._n_looks

    def _pods(self, job_id: JobId) -> list[Any]:
        labels = {JOB_NAME: job_id["job"], INDEX: str(job_id["index"])}
        return self._cluster.pods(selector_of(labels), job_id["namespace"])


def _starts(method: str, url: str) -> bool:
    return method == "POST" and url.partition("?")[0].endswith("/jobs") and "dryRun" not in url
