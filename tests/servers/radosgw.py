"""A real Ceph on loopback, for one command: `python -m servers.radosgw COMMAND…`

One monitor, one OSD with its objects in memory, one radosgw, in a folder of their own. The command runs with AWS_* set
for a user there and with RADOSGW_ENDPOINT_URL, and then all is stopped. Needs Debian's packages radosgw, ceph-mon,
ceph-osd and ceph-common.
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
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph-authtool", "monmaptool", "ceph")
START_LIMIT_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ceph:
    """The daemons, and the folder they live in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.s3_port = free_port()
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.conf = folder / "ceph.conf"
        self.fsid = str(uuid.uuid4())
        self.mon_port = free_port()
        self.conf.write_text(self._settings())

    def _settings(self) -> str:
        folder = self.folder
        return f"""
[global]
fsid = {self.fsid}
mon_host = v1:127.0.0.1:{self.mon_port}
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
rgw_frontends = beast endpoint=127.0.0.1:{self.s3_port}
rgw_data = {folder}
ms_bind_ipv6 = false
"""

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [command[0], "-c", str(self.conf), *command[1:]], capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed: {done.stderr}")
        return done.stdout

    def daemon(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}.out").open("wb")
        self.daemons.append(
            subprocess.Popen(
                [command[0], "-c", str(self.conf), *command[1:], "--foreground"],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        )

    def start(self) -> None:
        folder = self.folder
        for name in ("mon", "osd"):
            (folder / name).mkdir()
        subprocess.run(
            ["ceph-authtool", "--create-keyring", f"{folder}/keyring", "--gen-key", "-n", "client.admin"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        subprocess.run(
            ["monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", f"[v1:127.0.0.1:{self.mon_port}]",
             f"{folder}/monmap"],
            check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{folder}/monmap", "--keyring", f"{folder}/keyring")
        self.daemon("ceph-mon", "-i", "a")
        self.run("ceph", "--connect-timeout", "60", "osd", "new", str(uuid.uuid4()))
        self.run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", self._osd_uuid())
        self.daemon("ceph-osd", "-i", "0")
        self.daemon("radosgw", "-n", "client.admin")
        self._wait_for_port()

    def _osd_uuid(self) -> str:
        return str(json.loads(self.run("ceph", "osd", "dump", "-f", "json"))["osds"][0]["uuid"])

    def _wait_for_port(self) -> None:
        deadline, restarts = time.monotonic() + START_LIMIT_S, 0
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.s3_port), timeout=1):
                return
            for daemon in [daemon for daemon in self.daemons if daemon.poll() is not None]:
                # An OSD may speak before it knows its monitor, which then takes it for a stranger ("wrong fsid").
                restarts += 1
                if daemon.args[0] == "ceph-osd" and restarts <= 5:  # type: ignore[index]
                    self.daemons.remove(daemon)
                    self.daemon("ceph-osd", "-i", "0")
                else:
                    raise SystemExit(f"A daemon ended with {daemon.returncode}. {self._last_words()}")
            time.sleep(0.2)
        raise SystemExit(f"radosgw did not open its port in {START_LIMIT_S} s. {self._last_words()}")

    def _last_words(self) -> str:
        logs = sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")])
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)

    def user(self) -> dict[str, str]:
        """Make a user; return the environment that makes a client this user."""
        made = json.loads(self.run("radosgw-admin", "user", "create", "--uid", "tests", "--display-name", "tests"))
        keys = made["keys"][0]
        return {"AWS_ACCESS_KEY_ID": keys["access_key"], "AWS_SECRET_ACCESS_KEY": keys["secret_key"]}

    def stop(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.kill()
            daemon.wait()


@contextlib.contextmanager
def running_ceph() -> Iterator[dict[str, str]]:
    """Start it; give the environment for a client; stop it."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        raise SystemExit(
            f"Not installed: {', '.join(missing)}. Try: apt-get install --no-install-recommends "
            "radosgw ceph-mon ceph-osd ceph-common"
        )
    with tempfile.TemporaryDirectory(prefix="ceph-") as folder:
        ceph = Ceph(Path(folder))
        try:
            ceph.start()
            environment = {**ceph.user(), "RADOSGW_ENDPOINT_URL": f"http://127.0.0.1:{ceph.s3_port}"}
            yield environment
        finally:
            ceph.stop()


def main() -> int:
    with running_ceph() as environment:
        return subprocess.run(sys.argv[1:], env={**os.environ, **environment}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
