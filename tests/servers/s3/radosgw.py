"""Runs one command with a real Ceph on loopback: `python -m servers.s3.radosgw COMMAND…`

The cluster has one monitor, one OSD with its objects in memory, and one radosgw, in a new folder. The command gets the
variables AWS_* of a user of that cluster, and RADOSGW_ENDPOINT_URL. When the command has ended, the cluster is stopped.
It needs Debian's packages radosgw, ceph-mon, ceph-osd and ceph-common.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph-authtool", "monmaptool", "ceph")
START_LIMIT_S = 120.0
OSD = ("ceph-osd", "-i", "0")
SETTINGS = """
[global]
fsid = {fsid}
mon_host = v1:127.0.0.1:{mon_port}
public_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
keyring = {folder}/keyring
run_dir = {folder}
admin_socket = {folder}/$cluster-$name.asok
log_file = {folder}/$name.log
pid_file =
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 2000
mon_data = {folder}/mon
osd_data = {folder}/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_max_object_name_len = 2048
rgw_frontends = beast endpoint=127.0.0.1:{s3_port}
rgw_data = {folder}
ms_bind_ipv6 = false
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ceph:
    """The daemons of the cluster, and their folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fsid = str(uuid.uuid4())
        self.s3_port, self.mon_port = free_port(), free_port()
        self.daemons: list[subprocess.Popen[bytes]] = []
        ports = {"s3_port": self.s3_port, "mon_port": self.mon_port}
        (folder / "ceph.conf").write_text(SETTINGS.format(folder=folder, fsid=self.fsid, **ports))

    def run(self, program: str, *arguments: str, conf: bool = True) -> str:
        command = [program, *(("-c", f"{self.folder}/ceph.conf") if conf else ()), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed: {done.stderr}")
        return done.stdout

    def start(self, program: str, *arguments: str) -> None:
        command = [program, "-c", f"{self.folder}/ceph.conf", *arguments, "--foreground"]
        log = (self.folder / f"{program}.out").open("wb")
        self.daemons.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def start_all(self) -> dict[str, str]:
        """Start all daemons, and return the environment variables of a user of the cluster."""
        keyring, monmap, osd_uuid = f"{self.folder}/keyring", f"{self.folder}/monmap", str(uuid.uuid4())
        for name in ("mon", "osd"):
            (self.folder / name).mkdir()
        self.run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "client.admin", conf=False)
        address = f"[v1:127.0.0.1:{self.mon_port}]"
        self.run("monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", address, monmap, conf=False)
        self.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self.start("ceph-mon", "-i", "a")
        self.run("ceph", "--connect-timeout", "60", "osd", "new", osd_uuid)
        self.run(*OSD, "--mkfs", "--osd-uuid", osd_uuid)
        self.start(*OSD)
        self.start("radosgw", "-n", "client.admin")
        self._wait_for_port()
        user = json.loads(self.run("radosgw-admin", "user", "create", "--uid", "tests", "--display-name", "tests"))
        keys = {"AWS_ACCESS_KEY_ID": "access_key", "AWS_SECRET_ACCESS_KEY": "secret_key"}
        environment: dict[str, str] = {name: user["keys"][0][key] for name, key in keys.items()}
        return {**environment, "RADOSGW_ENDPOINT_URL": f"http://127.0.0.1:{self.s3_port}"}

    def stop(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.kill()
            daemon.wait()

    def _wait_for_port(self) -> None:
        deadline, restarts = time.monotonic() + START_LIMIT_S, 0
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.s3_port), timeout=1):
                return
            for daemon in [daemon for daemon in self.daemons if daemon.poll() is not None]:
                # An OSD may connect too early, and the monitor then rejects it ("wrong fsid").
                restarts += 1
                if daemon.args[0] != OSD[0] or restarts > 5:  # type: ignore[index]
                    raise SystemExit(f"A daemon ended with {daemon.returncode}. {self._logs()}")
                self.daemons.remove(daemon)
                self.start(*OSD)
            time.sleep(0.2)
        raise SystemExit(f"radosgw did not open its port in {START_LIMIT_S} s. {self._logs()}")

    def _logs(self) -> str:
        logs = sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")])
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)


def main() -> int:
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        raise SystemExit(
            f"Not installed: {', '.join(missing)}. Try: apt-get install --no-install-recommends "
            "radosgw ceph-mon ceph-osd ceph-common"
        )
    with tempfile.TemporaryDirectory(prefix="ceph-") as folder, contextlib.ExitStack() as stack:
        ceph = Ceph(Path(folder))
        stack.callback(ceph.stop)  # also stop the daemons if the start fails half-way
        environment = ceph.start_all()
        return subprocess.run(sys.argv[1:], env={**os.environ, **environment}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
