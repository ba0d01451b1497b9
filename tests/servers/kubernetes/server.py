"""A Kubernetes API server on loopback, for the real `kubernetes` client. It supports only the requests that Jobs need.

    with api_server() as server:
        os.environ["KUBECONFIG"] = server.kubeconfig

The server compares every body with the client's own models (`schema`) and with the rules of batch/v1 (`rules`). Pods
really run, as local processes. `answers.json` is the table of a real server's answers. A test sends the request of each
row to this server, and `pytest -m 'live and k8s'` sends it to a real server.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import secrets
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from servers.kubernetes.cluster import AlreadyExists, Cluster
from servers.kubernetes.pods import Pod
from servers.kubernetes.rules import wrong_with_job, wrong_with_secret
from servers.kubernetes.schema import problems

NAMESPACE = "team"
CORE, BATCH = "/api/v1/namespaces/team", "/apis/batch/v1/namespaces/team"
ROUTES = {
    "review": ("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"),
    "create_job": ("POST", f"{BATCH}/jobs"),
    "list_jobs": ("GET", f"{BATCH}/jobs"),
    "read_job": ("GET", f"{BATCH}/jobs/(?P<name>[^/]+)"),
    "delete_job": ("DELETE", f"{BATCH}/jobs/(?P<name>[^/]+)"),
    "create_secret": ("POST", f"{CORE}/secrets"),
    "read_secret": ("GET", f"{CORE}/secrets/(?P<name>[^/]+)"),
    "delete_secret": ("DELETE", f"{CORE}/secrets/(?P<name>[^/]+)"),
    "list_pods": ("GET", f"{CORE}/pods"),
    "list_events": ("GET", f"{CORE}/events"),
    "log": ("GET", f"{CORE}/pods/(?P<name>[^/]+)/log"),
    "delete_pod": ("DELETE", f"{CORE}/pods/(?P<name>[^/]+)"),
    "evict_pod": ("POST", f"{CORE}/pods/(?P<name>[^/]+)/eviction"),
    "patch_pod": ("PATCH", f"{CORE}/pods/(?P<name>[^/]+)"),
}
RIGHTS = {
    "create_job": ("create", "batch", "jobs"),
    "list_jobs": ("list", "batch", "jobs"),
    "read_job": ("get", "batch", "jobs"),
    "delete_job": ("delete", "batch", "jobs"),
    "create_secret": ("create", "", "secrets"),
    "read_secret": ("get", "", "secrets"),
    "delete_secret": ("delete", "", "secrets"),
    "list_pods": ("list", "", "pods"),
    "list_events": ("list", "", "events"),
    "log": ("get", "", "pods/log"),
    "delete_pod": ("delete", "", "pods"),
    "evict_pod": ("create", "", "pods/eviction"),
    "patch_pod": ("patch", "", "pods"),
}
"""For each route, the verb, API group and resource for which an account needs a right."""
REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    503: "ServiceUnavailable",
}
KINDS = {"job": "jobs.batch", "secret": "secrets", "pod": "pods", "log": "pods"}
QUOTA_CONFLICT = (
    'Operation cannot be fulfilled on resourcequotas "gpus": the object has been modified; please apply your changes '
    "to the latest version and try again"
)


class Refusal(Exception):
    """A request that the server refuses, with the reason that its Status names."""

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason or REASONS.get(status, "InternalError")


@dataclass
class Fault:
    """A fault of the next requests for a route: an error status, or 0 to reset the connection."""

    status: int
    times: int
    after_applying: bool
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = "as the test asked"


class ApiServer:
    """The server and its controls for tests.

    `requests` has the route of every request so far, and `complaints` has the requests that this server does not
    support.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kubernetes-"))
        self.cluster = Cluster(self.folder)
        self.token = secrets.token_hex(16)
        self.requests: list[str] = []
        self.bodies: list[tuple[str, Any]] = []
        self.complaints: list[str] = []
        self.denied: set[tuple[str, str]] = set()
        """Verb and resource of requests that this account may not make, as in ("get", "pods/log")."""
        self._faults: dict[str, list[Fault]] = {}
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        self.kubeconfig = str(self.folder / "kubeconfig")
        self.write_kubeconfig(self.token)

    def write_kubeconfig(self, token: str) -> None:
        contexts = [
            {"name": name, "context": {"cluster": name, "user": "ada", "namespace": NAMESPACE}}
            for name in ("here", "nowhere")
        ]
        servers = {"here": self.url, "nowhere": "http://127.0.0.1:9"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": contexts,
            "clusters": [{"name": name, "cluster": {"server": server}} for name, server in servers.items()],
            "users": [{"name": "ada", "user": {"token": token}}],
        }
        Path(self.kubeconfig).write_text(json.dumps(document))

    def fail(
        self,
        route: str,
        status: int = 500,
        *,
        times: int = 1,
        after_applying: bool = False,
        message: str = "as the test asked",
        **headers: str,
    ) -> None:
        """Answer the next requests for a route with an error, or not at all (0).

        Args:
            route: a name in `ROUTES`, or "dry_run".
            status: the HTTP status. 409 is a `Conflict`.
            times: the number of requests that are hit.
            after_applying: True: execute the request first, so that only the answer is lost.
            message: the message of the Status.
            headers: more headers of the answer, as in `retry_after="7"`.
        """
        assert route in (*ROUTES, "dry_run")
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._faults.setdefault(route, []).append(Fault(status, times, after_applying, named, message))

    def forgive(self) -> None:
        self._faults.clear()

    def count(self, route: str) -> int:
        return self.requests.count(route)

    def pod(self, job: str, index: int) -> Pod:
        """Return the newest pod of an index of a Job."""
        named = f"{job}-{index}-"
        return [pod for pod in list(self.cluster.pods.values()) if pod.name.startswith(named)][-1]

    def until(self, ready: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Wait until a condition on the cluster is true."""
        with self.cluster.changed:
            assert self.cluster.changed.wait_for(ready, timeout_s), f"the condition was not true within {timeout_s} s"

    def close(self) -> None:
        self.cluster.close()
        self._http.shutdown()
        self._http.server_close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def take(self, route: str) -> Fault | None:
        for fault in self._faults.get(route, []):
            if fault.times > 0:
                fault.times -= 1
                return fault
        return None

    def apply(self, route: str, name: str, query: Mapping[str, str], body: Any) -> Any:
        """Execute a request, and return the answer.

        Raises:
            Refusal: the server refuses it.
        """
        if (right := RIGHTS.get(route)) and (right[0], right[2]) in self.denied:
            verb, group, resource = right
            kind = f"{resource.partition('/')[0]}{'.' * bool(group)}{group}"
            named = f'{kind} "{name}"' if name else kind
            where = f'resource "{resource}" in API group "{group}" in the namespace "{NAMESPACE}"'
            raise Refusal(403, f'{named} is forbidden: User "ada" cannot {verb} {where}')
        try:
            return getattr(self, f"_{route}")(name, query, body)
        except KeyError:
            raise Refusal(404, f'{KINDS[route.rpartition("_")[2]]} "{name}" not found') from None
        except AlreadyExists as error:
            raise Refusal(409, str(error), "AlreadyExists") from None

    def warnings(self, route: str, body: Any) -> list[str]:
        """Return the warnings in the answer to a request that was accepted."""
        return self.cluster.warnings(body) if route == "create_job" else []

    def _check(
        self, body: Any, kind: str, rules: Callable[[Any], Iterator[str]], query: Mapping[str, str] | None = None
    ) -> None:
        if query is not None and query.get("fieldValidation") not in ("Strict", None):
            self.complaints.append(f"fieldValidation={query['fieldValidation']}")
        found = list(problems(body, kind))
        name = kind.removeprefix("V1")
        # Decoding comes before validation: an unknown field or a wrong type is a bad request.
        if wrong := [each for each in found if not each.endswith("Required value")]:
            text = ", ".join(sorted(wrong))
            raise Refusal(400, f'{name} in version "v1" cannot be handled as a {name}: strict decoding error: {text}')
        if found := found or list(rules(body)):
            text = found[0] if len(found) == 1 else f"[{', '.join(found)}]"
            named = f'{name}{".batch" * (name == "Job")} "{body["metadata"].get("name", "")}"'
            raise Refusal(422, f"{named} is invalid: {text}")

    def _review(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        self._check(body, "V1SelfSubjectAccessReview", lambda _: iter(()))
        asked = body["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        return {**body, "status": {"allowed": (asked["verb"], resource) not in self.denied}}

    def _create_job(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        self._check(body, "V1Job", wrong_with_job, query)
        return self.cluster.create_job(body, is_dry=query.get("dryRun") == "All")

    def _list_jobs(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        return self._listed("JobList", "batch/v1", list(self.cluster.jobs.values()), query)

    def _read_job(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        return copy.deepcopy(self.cluster.jobs[name])

    def _delete_job(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        if not self.cluster.delete_job(name):
            raise KeyError(name)
        return {"kind": "Status", "status": "Success"}

    def _create_secret(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        self._check(body, "V1Secret", wrong_with_secret)
        return self.cluster.put_secret(body)

    def _read_secret(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        return copy.deepcopy(self.cluster.secrets[name])

    def _delete_secret(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        with self.cluster.changed:
            del self.cluster.secrets[name]
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _list_pods(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        return self._listed("PodList", "v1", [pod.wire for pod in list(self.cluster.pods.values())], query)

    def _list_events(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        wanted = dict(part.split("=", 1) for part in query["fieldSelector"].split(","))
        found = [
            event
            for event in list(self.cluster.events)
            if wanted == {"involvedObject.uid": event["involvedObject"]["uid"], "reason": event["reason"]}
        ]
        return {"apiVersion": "v1", "kind": "EventList", "metadata": {}, "items": copy.deepcopy(found)}

    def _log(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        pod = self.cluster.pods[name]
        if (node := pod.wire["spec"].get("nodeName")) in self.cluster.kubelet.unreachable:
            url = f"https://{node}:10250/containerLogs/{NAMESPACE}/{name}/replica?tailLines={query['tailLines']}"
            raise Refusal(500, f'Get "{url}": dial tcp: connect: no route to host')
        if pod.process is None and node is not None and not pod.is_over:
            raise Refusal(400, f'container "replica" in pod "{name}" is waiting to start: ContainerCreating')
        lines = list(pod.lines)[-int(query["tailLines"]) :]
        return "".join(f"{line}\n" for line in lines).encode()

    def _delete_pod(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        wire = copy.deepcopy(self.cluster.pods[name].wire)
        self.cluster.delete_pod(name)
        if query.get("gracePeriodSeconds") == "0" and name in self.cluster.pods:
            self.cluster.kill(name)
        return wire

    def _evict_pod(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        self._check(body, "V1Eviction", lambda _: iter(()))
        self.cluster.drain(name)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def _patch_pod(self, name: str, query: Mapping[str, str], body: Any) -> Any:
        pod, limit_s = self.cluster.pods[name], body.get("spec", {}).get("activeDeadlineSeconds")
        if "merge-patch+json" not in query["Content-Type"]:
            raise Refusal(415, f"the body of the request was in an unknown format: {query['Content-Type']}")
        if body != {"spec": {"activeDeadlineSeconds": limit_s}} or type(limit_s) is not int:
            problem = "Forbidden: pod updates may not change fields other than `spec.activeDeadlineSeconds`"
            raise Refusal(422, f'Pod "{name}" is invalid: spec: {problem}')
        if not 0 < limit_s <= pod.wire["spec"].get("activeDeadlineSeconds", limit_s):
            problem = f"Invalid value: {limit_s}: must be less than or equal to previous value"
            raise Refusal(422, f'Pod "{name}" is invalid: spec.activeDeadlineSeconds: {problem}')
        self.cluster.limit_pod(name, limit_s)
        return copy.deepcopy(pod.wire)

    def _listed(self, kind: str, version: str, items: list[Any], query: Mapping[str, str]) -> Any:
        parts = [part for part in query.get("labelSelector", "").split(",") if part]
        wanted = dict(part.split("=", 1) for part in parts if "=" in part)
        exist = {part for part in parts if "=" not in part}

        def is_chosen(labels: Mapping[str, str]) -> bool:
            return wanted.items() <= labels.items() and exist <= labels.keys()

        with self.cluster.changed:
            found = [item for item in items if is_chosen(item["metadata"].get("labels", {}))]
            return {"apiVersion": version, "kind": kind, "metadata": {}, "items": copy.deepcopy(found)}


def _route_of(command: str, path: str) -> tuple[str, re.Match[str] | None]:
    for route, (method, pattern) in ROUTES.items():
        if method == command and (match := re.fullmatch(pattern, path)):
            return route, match
    return "", None


def _handler_of(api: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def answer(self) -> None:
            place = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(place.query).items()}
            query["Content-Type"] = self.headers.get("Content-Type", "application/json")
            text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            route, match = _route_of(self.command, place.path)
            if match is None:
                if "/namespaces/" in place.path and not place.path.startswith((CORE, BATCH)):
                    space = place.path.partition("/namespaces/")[2].partition("/")[0]
                    where = f'in the namespace "{space}"'
                    self.send(403, _status(403, f'forbidden: User "ada" cannot get resource "jobs" {where}'))
                    return
                api.complaints.append(f"no such route: {self.command} {self.path}")
                self.send(404, _status(404, "the server could not find the requested resource"))
                return
            name, body = match.groupdict().get("name", ""), json.loads(text or b"null")
            shown = "dry_run" if "dryRun" in query else route
            api.requests.append(shown)
            api.bodies.append((shown, body))
            fault = api.take(shown)
            if fault is None or fault.after_applying:
                try:
                    if self.headers.get("Authorization") != f"Bearer {api.token}":
                        raise Refusal(401, "Unauthorized")
                    found = api.apply(route, name, query, body)
                except Refusal as refusal:
                    self.send(refusal.status, _status(refusal.status, str(refusal), refusal.reason))
                    return
                if fault is None:
                    quoted = [json.dumps(words) for words in api.warnings(route, body)]
                    warned = {"Warning": ", ".join(f"299 - {words}" for words in quoted)} if quoted else {}
                    self.send(201 if self.command == "POST" else 200, found, warned)
                    return
            if fault.status:
                self.send(fault.status, _status(fault.status, fault.message), fault.headers)
            else:
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer

        def send(self, status: int, found: Any, headers: Mapping[str, str] | None = None) -> None:
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            kind = "text/plain" if isinstance(found, bytes) else "application/json"
            self.send_response(status)
            for each, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(each, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def _status(code: int, message: str, reason: str = "") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "metadata": {},
        "status": "Failure",
        "reason": reason or REASONS.get(code, "InternalError"),
        "message": message,
        "code": code,
    }


@contextlib.contextmanager
def api_server() -> Iterator[ApiServer]:
    """Start a server on a free port of loopback. At the end of the block, stop the server and every pod.

    Raises:
        AssertionError: at the end of the block, if a request was not supported.
    """
    server = ApiServer()
    try:
        yield server
    finally:
        server.close()
    assert not server.complaints, "\n".join(server.complaints)
