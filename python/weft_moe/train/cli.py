"""weft-train CONFIG.toml: train a Qwen3-style mixture-of-experts model.

Under torchrun this process is one rank. Otherwise it starts as many ranks as the configuration
asks for, on this machine, through the same launcher.
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from pathlib import Path

import torch
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .attention import attention_kernel
from .config import Config, ConfigError, load_config
from .ranks import join_ranks
from .report import largest_difference, progress, write_report
from .trainer import (
    Run,
    check_dispatch_runs,
    check_machine,
    free_memory,
    make_output,
    train,
)

_USAGE_ERROR = 2


def main(argv: list[str] | None = None) -> int:
    """The console script. Returns 0; 1 where two compared runs disagree or a rank failed; 2 where
    the configuration cannot be used, with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="weft-train", description=__doc__.split("\n")[0])
    parser.add_argument("config", help="a TOML file, such as examples/tiny.toml")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a key of the file, in TOML: --set trainer.steps=5 "
        "--set 'data.path=\"book.txt\"'",
    )
    arguments = parser.parse_args(argv)
    try:
        config = load_config(arguments.config, arguments.set)
        num_ranks = _num_started_ranks() or config.trainer.num_ranks or config.trainer.ep
        config.check_world(num_ranks)
        check_machine(config)
        for dispatch in config.trainer.dispatches:
            check_dispatch_runs(config, dispatch)
        make_output(config)
    except (ValueError, ImportError) as error:
        # ImportError: a dispatch that needs the compiled ops, on a machine without them.
        print(f"weft-train: {error}", file=sys.stderr)
        return _USAGE_ERROR
    if num_ranks > 1 and not _num_started_ranks():
        return _launch(config, num_ranks)
    try:
        return run(config)
    except ConfigError as error:  # of weights or a checkpoint, which are not read before
        print(f"weft-train: {error}", file=sys.stderr)
        return _USAGE_ERROR


def run(config: Config) -> int:
    """Train with each dispatch that a configuration asks for; rank 0 reports. Collective.

    Returns 1 where two compared runs disagree, else 0, and the same on every rank.
    """
    with join_ranks(config) as ranks:
        console = Console(quiet=ranks.rank != 0, soft_wrap=True)
        if ranks.rank == 0:
            console.print(f"attention: {attention_kernel(config, ranks.device)}")
        runs = []
        for dispatch in config.trainer.dispatches:
            with progress(console, dispatch.label, config.trainer) as on_step:
                runs.append(train(config, dispatch, ranks, on_step))
            free_memory(ranks.device)
        if ranks.rank == 0:
            write_report(console, runs, Path(config.trainer.output))
        compare = config.trainer.compare
        return 0 if compare is None else _compare(console, runs, compare.tolerance)


def _compare(console: Console, runs: list[Run], tolerance: float) -> int:
    difference = largest_difference(*runs)
    agree = difference <= tolerance
    console.print(
        f"{runs[0].label} and {runs[1].label} gave {'the same' if agree else 'DIFFERENT'} losses: "
        f"at no step do they differ by more than {difference:.1e} of the loss "
        f"(tolerance {tolerance:.1e})"
    )
    return 0 if agree else 1


def _num_started_ranks() -> int | None:
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None


def _launch(config: Config, num_ranks: int) -> int:
    launcher = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        # The ranks are on this machine, whose own name need not resolve.
        local_addr="localhost",
        max_restarts=0,
    )
    try:
        return max(elastic_launch(launcher, _run_rank)(config, num_ranks).values())
    except ChildFailedError as error:
        print(f"weft-train: {error}", file=sys.stderr)
        return 1


def _run_rank(config: Config, num_ranks: int) -> int:
    if config.trainer.device_type == "cpu":
        # Ranks that each took all cores would slow one another down many times over.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    return run(config)
