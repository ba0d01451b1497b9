"""Pods as a kubelet runs them: each pod is a local process, and its status changes in a kubelet's order.

A kubelet reports the end of a container first. It reports the pod's phase, reason and DisruptionTarget in a later
update, because other containers of the pod may still run.
"""

from __future__ import annotations

import base64
import functools
import re
import secrets
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from servers.isolation.process import IsolatedProcess, container_environment
from servers.isolation.python import shared_python

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z0-9_.-]+)\)")


EVICTED = "The node was low on resource: memory. "
# Seconds between the report of a container's end and the report of its pod's end. A reader has time to look between
# the two.
LAG_S = 0.05


def now(after_s: float = 0.0) -> str:
    """Return a time as the API writes it.

    Args:
        after_s: seconds from now.
    """
    # Metav1.Time has whole seconds: a reader must not expect more.
    at = datetime.now(UTC) + timedelta(seconds=after_s)
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal.

    The kernel drops a signal to process 1 of a container unless that process has a handler for it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by the value of an existing variable, and `$$` by `$`, as Kubernetes does in commands and
    values.
    """
    return REFERENCE.sub(lambda m: "$" if m[0] == "$$" else variables.get(m[1], m[0]), text)


@dataclass(eq=False)
class Pod:
    """A pod. `wire` is its JSON in the API, and the other fields belong to the kubelet."""

    wire: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    process: IsolatedProcess | None = None
    code: int | None = None
    ending: tuple[str, str] | None = None
    """Reason and message of the end, if the kubelet ends the pod."""
    disruption: tuple[str, str] | None = None
    """Reason and message of the condition DisruptionTarget that the kubelet reports with the end."""
    killed_for: str = ""
    is_tracked: bool = True
    """Whether the Job's finalizer keeps the pod until the Job has counted it."""

    @property
    def name(self) -> str:
        return str(self.wire["metadata"]["name"])

    @property
    def status(self) -> dict[str, Any]:
        return self.wire["status"]  # type: ignore[no-any-return]

    @property
    def is_scheduled(self) -> bool:
        """Whether the pod has a node."""
        return "nodeName" in self.wire["spec"]

    @property
    def grace_s(self) -> int:
        """The seconds between SIGTERM and SIGKILL that the pod asks for."""
        return int(self.wire["spec"].get("terminationGracePeriodSeconds", 30))

    @property
    def is_over(self) -> bool:
        return self.status["phase"] in ("Succeeded", "Failed")

    @property
    def is_deleted(self) -> bool:
        return "deletionTimestamp" in self.wire["metadata"]

    def condition(self, kind: str, status: str, reason: str = "", message: str = "") -> None:
        """Set a condition."""
        others = [each for each in self.status.get("conditions", []) if each["type"] != kind]
        row = {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}
        self.status["conditions"] = [*others, row]

    def container(self, state: str, **more: Any) -> None:
        """Set the state of the container, and the conditions that follow from that state."""
        image = self.wire["spec"]["containers"][0]["image"]
        row = {"name": "replica", "image": image, "imageID": "", "ready": state == "running", "restartCount": 0}
        self.status["containerStatuses"] = [{**row, "state": {state: more}}]
        is_ready = str(state == "running")
        reason = "" if state == "running" else "ContainersNotReady"
        for kind in ("ContainersReady", "Ready"):
            self.condition(kind, is_ready, reason)


class Kubelet:
    """Runs pods. The condition `changed` guards them, and is notified when a pod changes.

    Args:
        secret: returns a Secret by its name, or None.
        on_end: called, under the lock, when a pod has ended.
    """

    def __init__(
        self,
        folder: Path,
        changed: threading.Condition,
        secret: Callable[[str], dict[str, Any] | None],
        on_end: Callable[[Pod], None],
    ) -> None:
        self.changed = changed
        self.grace_s = 1.0
        """The longest grace, whatever a pod asks for."""
        self.reports_ends = True
        """Whether a pod's phase follows its container's end. False: until a test sets it and notifies `changed`."""
        self.unreachable: set[str] = set()
        """Nodes that are cut off: their kubelet reports nothing and ends nothing."""
        self.room: int | None = None
        """The number of pods that can have a node. None: all. Further pods wait as `Unschedulable`."""
        self.broken: dict[str, tuple[str, str]] = {}
        """For each image whose containers cannot be created: the reason and the message."""
        self.is_closing = False
        self._folder = folder
        self._secret = secret
        self._on_end = on_end
        self._threads: list[threading.Thread] = []
        self._running: set[str] = set()

    def start(self, pod: Pod) -> None:
        """Run a pod in a thread of its own."""
        pod.wire["status"] = {"phase": "Pending"}
        thread = threading.Thread(target=self._run, args=(pod,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self, pod: Pod) -> None:
        with self.changed:
            if not self._has_node(pod):
                return  # no kubelet runs this pod, so the control plane removes it
            if (variables := self._made(pod)) is not None and self._launched(pod, variables):
                self._wait(pod)
            else:
                self._end(pod, None)

    def _must_end(self, pod: Pod) -> bool:
        if self.is_closing:
            return True
        return (pod.is_deleted or pod.ending is not None) and pod.wire["spec"].get("nodeName") not in self.unreachable

    def _has_node(self, pod: Pod) -> bool:
        """Wait for a node."""

        def is_there() -> bool:
            return self._must_end(pod) or self.room is None or len(self._running) < self.room

        if not is_there():
            message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
            pod.condition("PodScheduled", "False", "Unschedulable", message)
            self.changed.wait_for(is_there)
        if self._must_end(pod):
            return False
        self._running.add(pod.name)
        pod.wire["spec"]["nodeName"] = f"node-{len(self._running)}"
        pod.condition("PodScheduled", "True")
        pod.status["startTime"] = now()
        return True

    def _made(self, pod: Pod) -> dict[str, str] | None:
        """Wait until the container can be created, and return its variables. None: the pod was ended before that."""
        container = pod.wire["spec"]["containers"][0]

        def problem() -> tuple[str, str] | None:
            missing = [name for name in names if self._secret(name) is None]
            missing_secret = ("CreateContainerConfigError", f'secret "{missing[0]}" not found') if missing else None
            return self.broken.get(container["image"]) or missing_secret

        names = [source["secretRef"]["name"] for source in container.get("envFrom", ())]
        while found := problem():
            pod.container("waiting", reason=found[0], message=found[1])
            self.changed.wait_for(lambda found=found: self._must_end(pod) or problem() != found)  # type: ignore[misc]
            if self._must_end(pod):
                return None
        variables: dict[str, str] = {}
        for name in names:
            data = (self._secret(name) or {}).get("data", {})
            values = {key: base64.b64decode(value).decode() for key, value in data.items()}
            variables |= {
                key: value for key, value in values.items() if IDENTIFIER.fullmatch(key)
            }  # variables with other names are omitted
        for each in container.get("env", ()):
            variables[each["name"]] = expanded(each.get("value", ""), variables)
        return variables

    def _launched(self, pod: Pod, variables: dict[str, str]) -> bool:
        """Start the container's process. Return False if that fails; the container is then shown as ended."""
        container, directory = pod.wire["spec"]["containers"][0], self._folder / pod.name
        usual = {
            **container_environment(shared_python(), directory),
            "HOSTNAME": pod.name,
            "KUBERNETES_SERVICE_HOST": "-",
        }

        def keep(line: str) -> None:
            with self.changed:
                pod.lines.append(line)

        command = [expanded(word, variables) for word in container["command"]]
        try:
            pod.process = process = IsolatedProcess(command, {**usual, **variables}, directory, on_line=keep)
        except OSError as error:
            message = f'failed to create containerd task: exec: "{command[0]}": {error.strerror}'
            pod.container("terminated", exitCode=128, reason="StartError", message=message, finishedAt=now())
            return False
        pod.status["phase"] = "Running"
        pod.container("running", startedAt=now())
        self.changed.notify_all()

        def follow() -> None:
            code = process.wait()
            with self.changed:
                pod.code = code
                self.changed.notify_all()

        thread = threading.Thread(target=follow, daemon=True)
        self._threads.append(thread)
        thread.start()
        return True

    def _wait(self, pod: Pod) -> None:
        """Wait for the end of a pod's process, and end it after its deadline or its deletion."""
        assert pod.process is not None
        began = datetime.now(UTC)

        def stirs(limit_s: int | None) -> bool:
            is_less = pod.wire["spec"].get("activeDeadlineSeconds") != limit_s
            return pod.code is not None or self._must_end(pod) or is_less

        while pod.code is None and not self._must_end(pod):
            limit_s = pod.wire["spec"].get("activeDeadlineSeconds")  # the deadline may have been lowered meanwhile
            left_s = None if limit_s is None else limit_s - (datetime.now(UTC) - began).total_seconds()
            if left_s is not None and left_s <= 0:
                pod.ending = ("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
            else:
                self.changed.wait_for(functools.partial(stirs, limit_s), left_s)
        if pod.code is None:
            if catches(pod.process.pid, signal.SIGTERM):
                pod.process.terminate()
            self.changed.wait_for(lambda: pod.code is not None or self.is_closing, min(pod.grace_s, self.grace_s))
            if pod.code is None:
                pod.process.kill()
                self.changed.wait_for(lambda: pod.code is not None)
        self._end(pod, pod.code)

    def _end(self, pod: Pod, code: int | None) -> None:
        """Report how a pod has ended: its container first, and in a later update the pod."""
        self.changed.wait_for(lambda: self.is_closing or pod.wire["spec"].get("nodeName") not in self.unreachable)
        if code is not None:
            reason = pod.killed_for or ("Completed" if code == 0 else "Error")
            # FallbackToLogsOnError: the end of the log is the message of a container that failed.
            message = "\n".join(pod.lines[-80:]) if code else ""
            pod.container("terminated", exitCode=code, reason=reason, message=message, finishedAt=now())
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.is_closing, LAG_S)
            self.changed.wait_for(lambda: self.is_closing or self.reports_ends)
        self._running.discard(pod.name)
        is_fine = code == 0 and pod.ending is None
        pod.status["phase"] = "Succeeded" if is_fine else "Failed"
        if pod.ending:
            pod.status["reason"], pod.status["message"] = pod.ending
        if pod.disruption:
            pod.condition("DisruptionTarget", "True", *pod.disruption)
        if not self.is_closing:
            self._on_end(pod)
        self.changed.notify_all()


def random_suffix() -> str:
    return "".join(secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))
