"""Data parallelism across nodes, experts shared inside a node: two nodes of two ranks each, started
by torchrun as docs/guide.md says.

Where this user may make network namespaces, each node is one, and they see each other over a virtual
wire alone. Elsewhere they are two launchers on one network.
"""

from __future__ import annotations

import contextlib
import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from training import run
from weft_moe.train.config import load_config

CONFIG = """
[trainer]
steps = 3
device = "cpu"
ep = {ep}
output = "{output}"
checkpoint_activations = true
[trainer.model]
num_layers = 1
hidden = 64
intermediate = 64
[trainer.model.moe.dispatch]
type = "mega_moe"
precision = "fp32"
[data]
sequence_length = 16
max_bytes = 65536
"""


@dataclass(frozen=True)
class Node:
    """How to run a program on a node, and where the node is found."""

    prefix: tuple[str, ...]
    address: str
    interface: str


@contextlib.contextmanager
def two_nodes() -> Iterator[list[Node]]:
    names = [f"weft{os.getpid()}{side}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(("ip", *words), check=True, capture_output=True)

    with contextlib.ExitStack() as stack:
        try:
            nodes = []
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ends = [word for name in names for word in ("name", name, "netns", name)]
            ip("link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
            for i, name in enumerate(names):
                address = f"10.77.0.{i + 1}"
                ip("-n", name, "address", "add", f"{address}/24", "dev", name)
                ip("-n", name, "link", "set", name, "up")
                ip("-n", name, "link", "set", "lo", "up")
                nodes.append(Node(("ip", "netns", "exec", name), address, name))
        except (OSError, subprocess.CalledProcessError):
            nodes = [Node((), "127.0.0.1", "lo")] * 2
        yield nodes


def test_two_nodes_give_the_losses_of_one_rank(tmp_path: Path):
    alone = tmp_path / "alone.toml"
    alone.write_text(CONFIG.format(ep=1, output=tmp_path))
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(ep=2, output=tmp_path))
    with two_nodes() as nodes:
        running = []
        for rank, node in enumerate(nodes):
            launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            launch += ["--nproc-per-node", "2", "--rdzv-backend", "c10d"]
            launch += ["--rdzv-endpoint", f"{nodes[0].address}:29513"]
            # What the machines' names would tell: here both have one.
            is_host = "true" if rank == 0 else "false"
            launch += ["--local-addr", node.address, "--rdzv-conf", f"is_host={is_host}"]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": node.interface}
            command = [*node.prefix, *launch, "-m", "weft_moe.train", str(config)]
            running.append(
                subprocess.Popen(
                    command,
                    env=environment | {"OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            printed = [process.communicate(timeout=180)[0] for process in running]
        finally:
            for process in running:
                process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(printed)
    with (tmp_path / "losses.csv").open() as stream:
        losses = [float(row["mega_moe fp32"]) for row in csv.DictReader(stream)]
    assert losses == pytest.approx(run(load_config(alone)).losses, rel=1e-5)
