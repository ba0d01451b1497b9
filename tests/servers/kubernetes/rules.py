"""The validation of batch/v1 and core/v1 beyond types, for the fields that this project uses.

It follows `ValidateJobSpec`, `ValidatePodTemplateSpec` and `ValidateSecret` of Kubernetes, and the standard
"restricted" of Pod Security Admission.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
PART = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
LABEL_NAME = re.compile(rf"(?=.{{1,317}}\Z)({PART}(\.{PART})*/)?[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
SECRET_KEY = re.compile(r"[A-Za-z0-9._-]{1,253}")
VARIABLE = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
INT32 = 2**31 - 1
MAX_SECRET_BYTES = 1 << 20
STANDARD = ("cpu", "memory", "ephemeral-storage")


def wrong_with_job(job: Mapping[str, Any]) -> Iterator[str]:
    spec, name = job["spec"], job["metadata"].get("name", "")
    yield from _metadata(job["metadata"], "metadata")
    template = spec["template"]
    n, indexed = spec.get("completions"), spec.get("completionMode", "NonIndexed") == "Indexed"
    yield from _choice(spec, "spec.completionMode", ("NonIndexed", "Indexed"))
    yield from _choice(spec, "spec.podReplacementPolicy", ("TerminatingOrFailed", "Failed"))
    for field in ("completions", "parallelism", "backoffLimit", "backoffLimitPerIndex", "maxFailedIndexes"):
        yield from _number(spec, f"spec.{field}", 0)
    yield from _number(spec, "spec.ttlSecondsAfterFinished", 0)
    yield from _number(spec, "spec.activeDeadlineSeconds", 0)
    if indexed and n is None:
        yield "spec.completions: Required value: when completion mode is Indexed"
    if indexed and n and len(f"{name}-{n - 1}") > 63:
        yield f"metadata.name: Invalid value: {name!r}: will not able to create pod with index {n - 1}"
    if "backoffLimitPerIndex" in spec and not indexed:
        yield "spec.backoffLimitPerIndex: Invalid value: requires indexed completion mode"
    if "backoffLimitPerIndex" in spec and template["spec"].get("restartPolicy") != "Never":
        yield "spec.template.spec.restartPolicy: Invalid value: when using backoffLimitPerIndex it must be Never"
    if "maxFailedIndexes" in spec and "backoffLimitPerIndex" not in spec:
        yield "spec.backoffLimitPerIndex: Required value: when maxFailedIndexes is specified"
    if spec.get("maxFailedIndexes", 0) > (n or 0):
        yield "spec.maxFailedIndexes: Invalid value: must be less than or equal to completions"
    if "selector" in spec and not spec.get("manualSelector"):
        yield "spec.selector: Invalid value: `selector` not auto-generated"
    yield from _metadata(template.get("metadata", {}), "spec.template.metadata", has_name=False)
    yield from _pod(template["spec"], "spec.template.spec")


def wrong_with_secret(secret: Mapping[str, Any]) -> Iterator[str]:
    yield from _metadata(secret["metadata"], "metadata")
    for key in {**secret.get("data", {}), **secret.get("stringData", {})}:
        if not SECRET_KEY.fullmatch(key):
            yield f"data[{key}]: Invalid value: a config key is of letters, digits, '-', '_' and '.'"
    encoded = sum(len(value) * 3 // 4 for value in secret.get("data", {}).values())
    if encoded + sum(len(value.encode()) for value in secret.get("stringData", {}).values()) > MAX_SECRET_BYTES:
        yield f"data: Too long: may not be more than {MAX_SECRET_BYTES} bytes"


def violations(pod: Mapping[str, Any]) -> str:
    """Return how a pod violates the standard "restricted", in the words of the admission plugin, or an empty text."""
    of_pod, found = pod.get("securityContext", {}), dict[str, list[str]]()
    for container in pod["containers"]:
        name, own = f'container "{container["name"]}"', container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            words = f"{name} must set securityContext.allowPrivilegeEscalation=false"
            found.setdefault("allowPrivilegeEscalation != false", []).append(words)
        if "ALL" not in own.get("capabilities", {}).get("drop", ()):
            words = f'{name} must set securityContext.capabilities.drop=["ALL"]'
            found.setdefault("unrestricted capabilities", []).append(words)
        if own.get("runAsNonRoot", of_pod.get("runAsNonRoot")) is not True:
            words = f"pod or {name} must set securityContext.runAsNonRoot=true"
            found.setdefault("runAsNonRoot != true", []).append(words)
        if own.get("seccompProfile", of_pod.get("seccompProfile", {})).get("type") not in (
            "RuntimeDefault",
            "Localhost",
        ):
            words = f'pod or {name} must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost"'
            found.setdefault("seccompProfile", []).append(words)
    return ", ".join(f"{what} ({'; '.join(where)})" for what, where in found.items())


def _pod(spec: Mapping[str, Any], path: str) -> Iterator[str]:
    if spec.get("restartPolicy") not in ("Never", "OnFailure"):
        yield f'{path}.restartPolicy: Required value: valid values: "OnFailure", "Never"'
    yield from _number(spec, f"{path}.activeDeadlineSeconds", 1)
    yield from _number(spec, f"{path}.terminationGracePeriodSeconds", 0)
    yield from _labels(spec.get("nodeSelector", {}), f"{path}.nodeSelector")
    if not spec["containers"]:
        yield f"{path}.containers: Required value"
    for number, container in enumerate(spec["containers"]):
        yield from _container(container, f"{path}.containers[{number}]")


def _container(container: Mapping[str, Any], path: str) -> Iterator[str]:
    if not LABEL.fullmatch(container["name"]):
        yield f"{path}.name: Invalid value: {container['name']!r}"
    if not container.get("image"):
        yield f"{path}.image: Required value"
    yield from _choice(container, f"{path}.terminationMessagePolicy", ("File", "FallbackToLogsOnError"))
    for number, variable in enumerate(container.get("env", ())):
        if not VARIABLE.fullmatch(variable["name"]):
            yield f"{path}.env[{number}].name: Invalid value: {variable['name']!r}"
        if "value" in variable and "valueFrom" in variable:
            yield f"{path}.env[{number}].valueFrom: Invalid value: may not be specified when `value` is not empty"
    for number, source in enumerate(container.get("envFrom", ())):
        if not SUBDOMAIN.fullmatch(source.get("secretRef", {}).get("name", "")):
            yield f"{path}.envFrom[{number}].secretRef.name: Required value"
    resources = container.get("resources", {})
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for kind, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            place = f"{path}.resources.{kind}[{name}]"
            if not LABEL_NAME.fullmatch(name):
                yield f"{place}: Invalid value: {name!r}: a qualified name is 'example.com/name'"
            elif "/" not in name and name not in STANDARD:
                yield f"{place}: Invalid value: {name!r}: must be a standard resource for containers"
            if not QUANTITY.fullmatch(amount) or ("/" in name and not amount.isdecimal()):
                yield f"{place}: Invalid value: {amount!r}"
            if "/" in name and limits.get(name) != requests.get(name, limits.get(name)):
                yield f"{place}: Invalid value: {amount!r}: must be equal to {name} limit of {limits.get(name)}"


def _metadata(metadata: Mapping[str, Any], path: str, *, has_name: bool = True) -> Iterator[str]:
    if has_name and not SUBDOMAIN.fullmatch(metadata.get("name", "")):
        yield f"{path}.name: Invalid value: {metadata.get('name')!r}: a lowercase RFC 1123 subdomain"
    yield from _labels(metadata.get("labels", {}), f"{path}.labels")
    for number, owner in enumerate(metadata.get("ownerReferences", ())):
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                yield f"{path}.ownerReferences[{number}].{field}: Invalid value: must not be empty"


def _labels(labels: Mapping[str, str], path: str) -> Iterator[str]:
    for name, value in labels.items():
        if not LABEL_NAME.fullmatch(name) or not LABEL_VALUE.fullmatch(value):
            yield f"{path}: Invalid value: {name!r}: {value!r}: a qualified name and its value are needed"


def _choice(of: Mapping[str, Any], path: str, choices: tuple[str, ...]) -> Iterator[str]:
    if of.get(path.rpartition(".")[2], choices[0]) not in choices:
        yield f"{path}: Unsupported value: supported values: {', '.join(choices)}"


def _number(of: Mapping[str, Any], path: str, least: int) -> Iterator[str]:
    value = of.get(path.rpartition(".")[2], least)
    if not least <= value <= INT32:
        yield f"{path}: Invalid value: {value}: must be between {least} and {INT32}"
