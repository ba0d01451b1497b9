"""`replicas doctor`: what of this machine, and of a rendezvous, would keep a run from working."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from executors.cli.findings import Finding, tried, write_once
from executors.cli.options import BackendOptions, JsonOption, RendezvousOption, parse_values
from executors.cli.output import Output

LOW_DISK_BYTES = 1 << 30
STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}


def doctor(
    backend: Annotated[
        str, typer.Option("--backend", "-b", metavar="NAME", help="The backend to look at, as well as this machine.")
    ] = "local",
    probe: Annotated[
        bool, typer.Option("--probe", help="Also start one small replica there, and let it look around. Costs little.")
    ] = False,
    option: BackendOptions = None,
    rendezvous: RendezvousOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check this machine, a backend, and with --rendezvous a store.

    Exit code: 1 if something is wrong.
    """
    from executors.cli.doctor_backend import examine_backend

    output = Output(as_json)
    findings: list[Finding] = []
    options = parse_values("--option", option)
    for finding in itertools.chain(
        _examine(is_local=backend == "local"), examine_backend(backend, options, rendezvous, probe)
    ):
        findings.append(finding)
        if not as_json:
            _tell(output, finding)
    wrong = any(finding.state == "wrong" for finding in findings)
    if as_json:
        output.document({"ok": not wrong, "findings": [asdict(finding) for finding in findings]})
    return int(wrong)


def _tell(output: Output, finding: Finding) -> None:
    from rich.text import Text

    output.say(Text.assemble((f"{finding.state:<5}", STYLES[finding.state]), f"  {finding.what:<16}  {finding.found}"))
    if finding.advice:
        output.say(f"{'':25}{finding.advice}", "yellow" if finding.state == "note" else "red")


def _examine(is_local: bool) -> Iterator[Finding]:
    checks = (_system, _python, _torch, _cores, _gpus, _state, _disk, _inotify, _zygote)
    for check in checks if is_local else (_python, _torch, _state, _disk):
        yield check()


def _system() -> Finding:
    found = f"{platform.system()} {platform.release()}"
    if sys.platform == "linux":
        return Finding("system", "ok", found)
    return Finding("system", "wrong", found, "The local backend needs Linux.")


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _torch() -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Finding("torch", "ok", version("torch"))
    except PackageNotFoundError:
        advice = "Install it with: pip install torch. Tasks without torch need --option preload=[]"
        return Finding("torch", "wrong", "not installed", advice)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("cores", "ok", f"{cores}; n replicas get {cores}/n torch threads each, and at least one")


def _gpus() -> Finding:
    import subprocess

    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return Finding("gpus", "ok", "none; replicas run on the CPU")
    names = [line.partition(" (UUID")[0] for line in listed.stdout.splitlines()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limited = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    return Finding("gpus", "ok", (", ".join(names) or "none") + limited)


def _state() -> Finding:
    from executors.state import state_dir, state_path

    path = state_path()

    def probe() -> str:
        from executors.store import open_store

        return write_once(open_store(state_dir()).url)

    return tried("runs", probe, f"Runs of this user live in {path}. Set XDG_STATE_HOME to a directory you can write.")


def _disk() -> Finding:
    from executors.state import state_path

    path = next(folder for folder in (state_path(), *state_path().parents) if folder.exists())
    free_bytes = shutil.disk_usage(path).free
    found = f"{free_bytes / 1e9:.1f} GB free for {state_path()}"
    if free_bytes >= LOW_DISK_BYTES:
        return Finding("disk", "ok", found)
    return Finding("disk", "note", found, "Delete old runs: replicas ls, replicas rm RUN…")


def _inotify() -> Finding:
    if sys.platform != "linux":
        return Finding("inotify", "note", "not on this system", "Replicas look for news in short intervals instead.")
    advice = (
        "Replicas look for news in short intervals instead, which is slower. "
        "Raise fs.inotify.max_user_instances, or: pip install inotify_simple"
    )
    try:
        from inotify_simple import INotify

        with contextlib.closing(INotify()):
            limit = Path("/proc/sys/fs/inotify/max_user_watches").read_text().strip()
    except (OSError, ImportError) as error:
        return Finding("inotify", "note", str(error), advice)
    return Finding("inotify", "ok", f"{limit} watches")


def _zygote() -> Finding:
    def start() -> str:
        import time

        from executors.local import LocalProcessExecutor

        began = time.monotonic()
        LocalProcessExecutor().check_launch(1, "platform:node", {})
        return f"replicas can be forked; ready after {time.monotonic() - began:.1f} s"

    return tried("local backend", start, "Replicas cannot be started here. Try: replicas launch platform:node --n 1")
