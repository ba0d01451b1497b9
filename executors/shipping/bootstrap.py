"""Starts a replica in a container: fetches the task and the code, installs missing packages, and becomes the worker.

The text of this file is the command of a container (`shipping.bootstrap_command`). So it imports only the standard
library, and boto3, which it installs if it is missing. It runs only code that was launched: the digest of task.json
comes with the launch, and task.json has the digest of the code. If the replica cannot start, one line on stderr has the
reason, and the exit code is 78 (EX_CONFIG of sysexits.h).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import io
import json
import os
import pathlib
import random
import re
import runpy
import shutil
import signal
import site
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib import metadata
from typing import Any, Callable, NoReturn  # noqa: UP035 - so that Python 3.8 reaches the message that it is too old
from urllib.parse import parse_qsl, unquote, urlsplit

CANNOT_START = 78
N_TRIES = 6  # tries of a request, with pauses of 8 s in total
# reads of an object with a wrong digest: after a torn reply the next read is right, and a replaced object stays wrong
COST_OF_A_WRONG_OBJECT = 2
FIRST_WAIT_S = 0.25
# another try may succeed after these HTTP statuses, and after all statuses from 500 on
PASSING_STATUSES = (408, 409, 429)
AWS = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")
PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!_-]+)")
SETTINGS_OF_PIP = ("index-url", "find-links", "no-index", "constraint")  # settings that uv ignores
Get = Callable[[str], bytes]
Put = Callable[[str, bytes], object]
Run = Callable[["list[str]"], int]


class WrongObject(Exception):
    """An object of the store is not the one that was launched."""


def main() -> None:
    began = time.monotonic()
    # the first process of a container ignores this signal by default
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.path[:] = [path for path in sys.path if path]  # import no modules from the current directory
    if sys.version_info < (3, 11) or not hasattr(tarfile, "data_filter"):
        refuse(f"it needs Python 3.11.4 or later, this is {sys.version.split()[0]}. Use another image.")
    if ranks := os.environ.pop("REPLICA_RANKS", ""):  # a Job of Kubernetes numbers its pods from 0
        os.environ["REPLICA_RANK"] = ranks.split(",")[int(os.environ["JOB_COMPLETION_INDEX"])]
    for name in ("REPLICA_RENDEZVOUS", "REPLICA_RUN_ID", "REPLICA_TASK_DIGEST"):
        if not os.environ.get(name):
            refuse(f"{name} is not set.")
    try:
        get, put = open_run(os.environ["REPLICA_RENDEZVOUS"], os.environ["REPLICA_RUN_ID"])
    except Exception as error:  # noqa: BLE001 - errors of boto3, which may not be installed yet
        refuse(f"cannot use {os.environ['REPLICA_RENDEZVOUS']}: {error}")
    task_folder = os.environ.get("REPLICA_TASK_FOLDER", "task")
    task = json.loads(fetched(get, f"{task_folder}/task.json", os.environ["REPLICA_TASK_DIGEST"]))
    if "code_sha256" not in task:
        refuse("the run was launched without code for other machines.")
    code = fetched(get, f"{task_folder}/code.tar.gz", task["code_sha256"])
    try:
        here = os.getcwd()
        folder = pathlib.Path(tempfile.mkdtemp(prefix="replica-", dir=here if os.access(here, os.W_OK) else None))
        # removes the folder if the start fails; otherwise the worker removes it
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["REPLICA_FOLDER"] = str(folder)
        unpack(code, folder)
        workspace = folder / "workspace"
        workspace.mkdir(exist_ok=True)
        os.chdir(workspace)  # the paths of the entrypoint's file and of requirements are relative to the workspace
    except OSError as error:
        refuse(f"its code cannot be unpacked: {error}. Set TMPDIR to a folder with free space that you can write to.")
    requirements = [kept(each) if each in task.get("pins", ()) else each for each in task["requirements"]]
    if not all(is_satisfied(requirement) for requirement in requirements):
        progress = runpy.run_path(str(folder / "packages/executors/shipping/install_progress.py"))
        install(requirements, lambda missing: progress["begin"](put, missing))
    # PYTHONPATH comes before the standard library, and a module of the workspace may have a name of that library. So
    # the workspace is not in PYTHONPATH. The worker adds it, after it has reserved the names of its own imports.
    paths = [workspace, *(workspace / path for path in task["paths"])]
    os.environ["REPLICA_SYS_PATH"] = os.pathsep.join(map(str, paths))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "packages"), *([before] if before else [])])
    os.environ["REPLICA_BOOTSTRAP_S"] = f"{time.monotonic() - began:.3f}"
    # -P keeps the workspace out of sys.path, because its modules may have names of ours or of the standard library.
    os.execve(sys.executable, [sys.executable, "-P", "-m", "executors.supervisor"], os.environ)


def refuse(why: str) -> NoReturn:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID"):
        why = why.replace(os.environ.get(name) or "\0", "***")
    kind = "spare" if os.environ.get("REPLICA_SPARE") else "replica"
    name = f"{kind} {os.environ.get('REPLICA_RANK', '?')} of run {os.environ.get('REPLICA_RUN_ID', '?')}"
    report(f"{name} cannot start: {' '.join(why.split())}")
    sys.exit(CANNOT_START)


def report(words: str) -> None:
    print(f"replicas: {words}", file=sys.stderr, flush=True)


def open_run(url: str, run_id: str) -> tuple[Get, Put]:
    """Return two functions that read and write objects of a run, by their names below the run."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme == "file":
        return lambda name: read(path, f"{run_id}/{name}"), lambda name, data: write(path, f"{run_id}/{name}", data)
    if parts.scheme != "s3":
        refuse(f"it cannot read a rendezvous of the kind {parts.scheme}://. Use file:// or s3://.")
    try:
        import boto3
    except ImportError:
        # boto3 is installed before the other packages, because it writes the progress of their installation, which may
        # take minutes. That installation must not replace boto3.
        install([os.environ.get("REPLICA_BOTO3", "boto3")])
        import boto3
    from botocore.config import Config

    options = dict(parse_qsl(parts.query))

    def connect(addressing_style: str) -> Any:
        config = Config(  # the same as in executors/store/s3/client.py
            retries={"mode": "standard", "total_max_attempts": 1},
            connect_timeout=5,
            read_timeout=60,
            tcp_keepalive=True,
            s3={"addressing_style": addressing_style},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        session = boto3.Session(region_name=options.get("region"))
        return session.client("s3", endpoint_url=options.get("endpoint_url"), config=config)

    client = connect("auto")
    if "endpoint_url" in options or not (urlsplit(client.meta.endpoint_url).hostname or "").endswith(AWS):
        client = connect("path")
    prefix = "/".join(part for part in (path.strip("/"), run_id) if part)
    place = {"Bucket": parts.netloc}
    return (
        lambda name: bytes(client.get_object(**place, Key=f"{prefix}/{name}")["Body"].read()),
        lambda name, data: client.put_object(**place, Key=f"{prefix}/{name}", Body=data),
    )


def folder_of(root: str, key: str, *, makes: bool = False) -> int:
    """Open the folder of a file below the rendezvous. No link is followed, because other users may write there."""
    at = os.open(root, os.O_DIRECTORY)
    for part in key.split("/")[:-1]:
        if makes:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=at)
        at = os.open(part, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
    return at


def read(root: str, key: str) -> bytes:
    flags = os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe would wait forever
    with open(os.open(os.path.basename(key), flags, dir_fd=folder_of(root, key)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise WrongObject("it is not a file")
        return file.read()


def write(root: str, key: str, data: bytes) -> None:
    at, name = folder_of(root, key, makes=True), os.path.basename(key)
    whole = f".{name}.{os.urandom(8).hex()}"  # renamed at the end, so that no reader sees a part
    with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=at), "wb") as file:
        file.write(data)
    os.replace(whole, name, src_dir_fd=at, dst_dir_fd=at)


def fetched(get: Get, name: str, sha256: str) -> bytes:
    """Return an object with this sha256. Try again after errors that may pass."""
    tries_left, wait_s = N_TRIES, FIRST_WAIT_S
    while True:
        try:
            data = get(name)
            if hashlib.sha256(data).hexdigest() == sha256:
                return data
            raise WrongObject(f"it is not what was launched: its sha256 is not {sha256}")
        except Exception as error:  # noqa: BLE001 - errors of boto3, which this script cannot name before its import
            tries_left -= COST_OF_A_WRONG_OBJECT if isinstance(error, WrongObject) else 1
            if tries_left <= 0 or not may_pass(error):
                refuse(f"cannot read {name} from {os.environ['REPLICA_RENDEZVOUS']}: {error}")
        time.sleep(wait_s * random.uniform(0.5, 1.5))
        wait_s *= 2


def may_pass(error: Exception) -> bool:
    reply = getattr(error, "response", None)  # an error that the server sent has a response
    status = reply["ResponseMetadata"]["HTTPStatusCode"] if reply else 500
    return (status >= 500 or status in PASSING_STATUSES) and not isinstance(error, FileNotFoundError)


def unpack(code: bytes, folder: pathlib.Path) -> None:
    """Unpack an archive, which may only have plain files below the folder."""
    with tarfile.open(fileobj=io.BytesIO(code), mode="r:gz") as archive:
        for member in archive.getmembers():
            path = pathlib.PurePosixPath(member.name)
            if not member.isreg() or path.is_absolute() or ".." in path.parts:
                refuse(f"its code holds {member.name!r}, which is not a plain file below its folder.")
        archive.extractall(folder, filter="data")


def installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def is_satisfied(requirement: str) -> bool:
    """Return True if a requirement is an exact pin and its version is installed (`2.13.0+cpu` counts as 2.13.0)."""
    if requirement.startswith("--"):
        return True  # the line is an option, such as an index, and names no package
    pin = PIN.fullmatch(requirement)
    has = installed(pin[1]) if pin else ""
    return pin is not None and pin[2] in (has, has.partition("+")[0])


def kept(pin: str) -> str:
    """Return a pin of the version that the image has, if that version is later. It fits the other packages of the
    image.
    """
    name, _, version = pin.partition("==")
    has = installed(name)
    if not has or is_satisfied(pin) or release(has) < release(version):
        return pin
    report(f"keeping {name} {has} of the image, where the launcher has {version}")
    return f"{name}=={has}"


def release(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def install(requirements: list[str], begin: Callable[[list[str]], Run] = lambda _: subprocess.call) -> None:
    missing = [each for each in requirements if not is_satisfied(each)]
    report(f"installing {', '.join(missing)}")
    run_uv = begin(missing)
    options = ("--no-cache-dir", "--disable-pip-version-check", "--no-input", "--root-user-action=ignore", "--quiet")
    pip = [sys.executable, "-P", "-m", "pip", "install", *options]
    if uv := uv_command(pip):
        strategy = "--index-strategy=unsafe-best-match"  # take the best version of all indexes, as pip does
        command = [*uv, "pip", "install", "--quiet", "--no-cache", "--break-system-packages", strategy]
        if run_uv([*command, "--python", sys.executable, *requirements]) == 0:
            find_installed()
            return
        report("uv could not install this; pip tries")
    code = subprocess.run([*pip, *requirements], check=False).returncode
    if code != 0:
        refuse(f"pip could not install its requirements (exit code {code}). The error of pip is above.")
    find_installed()


def find_installed() -> None:
    """Make packages importable that were installed since this process was started.

    If the user may not write to the image's own folder, pip installs into a folder in HOME. Python searches that folder
    only if it existed at the start of the process.
    """
    folder = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
    if os.path.isdir(folder) and folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()


def uv_command(pip: list[str]) -> list[str]:
    """Return the command of uv, which is faster than pip. Empty: there is no uv, or pip has settings of indexes."""
    settings = subprocess.run([*pip[:4], "config", "list"], check=False, capture_output=True, text=True).stdout
    if any(name in settings for name in SETTINGS_OF_PIP):
        return []
    if found := shutil.which("uv"):
        return [found]
    module = [sys.executable, "-P", "-m", "uv"]
    if not installed("uv"):
        subprocess.run([*pip, "--only-binary=:all:", "uv"], check=False, capture_output=True)
        find_installed()
    return module if installed("uv") else []


def layer(asked: dict[str, Any]) -> None:
    """Install packages that an image lacks, by the same rules as in a container, while a service builds a layer."""
    requirements = [kept(each) if each in asked["pins"] else each for each in asked["requirements"]]
    is_complete = all(is_satisfied(each) for each in requirements)
    report("the image has all required packages") if is_complete else install(requirements)


if __name__ == "__main__":
    layer(json.loads(sys.argv[2])) if sys.argv[1:2] == ["layer"] else main()
