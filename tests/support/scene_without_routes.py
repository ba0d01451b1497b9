"""A script that trains four replicas, each in a network that reaches an S3 server and nothing else.

Run it as root of a new network and mount namespace. Each replica moves to a namespace with one cable (a veth pair) to
the server's namespace, which does not forward packets.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import signal
import socket
import subprocess
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# Imported before the forks. Otherwise torch.optim would import it in the first step of each process.
import torch._dynamo
from servers.s3.server import CREDENTIALS, running_server

from diloco.outer import open_diloco
from diloco.rendezvous.round import Limits
from executors.store import open_store
from executors.store.records import exists
from executors.testing import eventually

SERVER, PORT, N, ROUNDS, GATE, INNER_STEPS = "10.77.0.1", 4444, 4, 6, 4, 2
CLONE_NEWNET = 0x40000000

fork = multiprocessing.get_context("fork")


class Replica:
    """A process in its own network namespace."""

    def __init__(self, rank: int, url: str) -> None:
        self._mine, theirs = fork.Pipe()
        self._process = fork.Process(target=replica, args=(rank, url, theirs))
        self._process.start()
        theirs.close()

    def says(self) -> Any:
        return self._mine.recv()

    def pass_gate(self) -> None:
        self._mine.send("open")

    def kill(self) -> None:
        self._process.kill()

    def ends(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def main() -> None:
    lay_cables()
    os.environ.update(CREDENTIALS, AWS_EC2_METADATA_DISABLED="true")
    with running_server(SERVER) as server:
        server.empty()
        url = server.url("runs")
        replicas = [Replica(rank, url) for rank in range(N)]
        for rank, each in enumerate(replicas):
            reached = each.says()
            assert reached == {address(other): "ENETUNREACH" for other in range(N) if other != rank}, reached
        seal = f"run/diloco/main/seal/{GATE // 2}"
        eventually(partial(exists, open_store(url), seal), f"{seal} exists")
        replicas[2].kill()
        assert replicas[2].ends() == -signal.SIGKILL
        replicas[2] = Replica(2, url)
        replicas[2].says()
        for each in replicas:
            each.pass_gate()
        told = [each.says() for each in replicas]
        assert [each.ends() for each in replicas] == [0] * N
    assert [(each["attempt"], each["rounds"]) for each in told] == [(int(r == 2), ROUNDS) for r in range(N)], told
    assert all(each["anchor"] == told[0]["anchor"] for each in told), told


def address(rank: int) -> str:
    return f"10.77.1.{rank + 1}"


def lay_cables() -> None:
    run("mount -t tmpfs none /run")
    run("ip link set lo up")
    run(f"ip address add {SERVER}/32 dev lo")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("0\n")
    for rank in range(N):
        run(f"ip netns add r{rank}")
        run(f"ip link add cable{rank} type veth peer name eth0 netns r{rank}")
        run(f"ip link set cable{rank} up")
        run(f"ip route add {address(rank)}/32 dev cable{rank}")
        for command in ("link set lo up", "link set eth0 up", f"address add {address(rank)}/32 dev eth0"):
            run(f"ip -netns r{rank} {command}")
        run(f"ip -netns r{rank} route add {SERVER}/32 dev eth0")


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def replica(rank: int, url: str, test: Connection) -> None:
    """Report which other replicas this network reaches, train with them, and report the result."""
    move_to_network(f"/run/netns/r{rank}")
    with socket.create_server((address(rank), PORT)):  # no other replica can reach it
        test.send({address(other): try_to_reach(other) for other in range(N) if other != rank})
        test.send(train(rank, url, test))


def train(rank: int, url: str, test: Connection) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    where: dict[str, Any] = {"store": url, "run_id": "run", "rank": rank, "world_size": N}
    plain: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "snapshot_every": 2}
    waits, steps = True, INNER_STEPS * ROUNDS
    limits = Limits(grace_s=2.0, takeover_after_s=0.5)
    with open_diloco(model, inner_steps=INNER_STEPS, total_steps=steps, limits=limits, **plain, **where) as diloco:
        for _ in diloco.steps():
            if waits and diloco.rounds >= GATE:
                test.recv()
                waits = False
            x = torch.randn(16, 8)
            (model(x).squeeze(1) - x.sum(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
        bits = [[value.hex() for value in values.flatten().tolist()] for values in diloco.anchor().values()]
        attempt = diloco._training_side._context.me.attempt
    return {"attempt": attempt, "rounds": diloco.rounds, "anchor": bits}


def move_to_network(path: str) -> None:
    with open(path) as network:  # os.setns is new in Python 3.12
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {path}")


def try_to_reach(other: int) -> str:
    try:
        with closing(socket.create_connection((address(other), PORT), timeout=5)):
            return "reached"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))


if __name__ == "__main__":
    main()
