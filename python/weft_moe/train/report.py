"""What a training leaves behind: progress lines, a table, a plot, the losses as a file."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .config import TrainerConfig
from .trainer import Run

# Steps whose mean stands for the loss at the end of a run: a single batch's loss is noisy.
_NUM_LAST = 10


@contextlib.contextmanager
def progress(
    console: Console, label: str, trainer: TrainerConfig
) -> Iterator[Callable[[int, float], None]]:
    """Show a bar where the console is a terminal, and a line every `log_every` steps anywhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=trainer.steps)

        def on_step(step: int, loss: float) -> None:
            bar.update(task, completed=step + 1, description=f"{label}  loss {loss:.3f}")
            if step % trainer.log_every == 0 or step == trainer.steps - 1:
                console.print(f"{label:<14} step {step:>5}  loss {loss:.4f}")

        yield on_step


def write_report(console: Console, runs: list[Run], folder: Path) -> None:
    """Print the table; write loss.png and losses.csv into a folder, made where it is missing."""
    table = Table(title="Training")
    last_loss = f"mean loss, last {min(_NUM_LAST, len(runs[0].losses))}"
    for column in ("dispatch", "first loss", last_loss, "seconds", "tokens/s"):
        table.add_column(column, justify="left" if column == "dispatch" else "right")
    for run in runs:
        last = run.losses[-_NUM_LAST:]
        table.add_row(
            run.label,
            f"{run.losses[0]:.4f}",
            f"{sum(last) / len(last):.4f}",
            f"{run.seconds:.1f}",
            f"{run.tokens_per_second:,.0f}",
        )
    console.print(table)
    write_losses(runs, folder)
    console.print(f"loss plot: {folder / 'loss.png'}   losses: {folder / 'losses.csv'}")


def write_losses(runs: list[Run], folder: Path) -> None:
    """Write the losses of runs of the same steps into loss.png and losses.csv of a folder, made
    where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = range(runs[0].first_step, runs[0].first_step + len(runs[0].losses))
    with (folder / "losses.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["step", *(run.label for run in runs)])
        writer.writerows(zip(steps, *(run.losses for run in runs), strict=True))
    _plot_losses(runs, steps, folder / "loss.png")


def largest_difference(first: Run, second: Run) -> float:
    """The largest difference between two runs' losses at a step, relative to the second's."""
    return max(abs(a - b) / abs(b) for a, b in zip(first.losses, second.losses, strict=True))


def _plot_losses(runs: list[Run], steps: range, path: Path) -> None:
    # The object interface: pyplot would look for a display.
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for run, style in zip(runs, ("-", "--"), strict=False):
        axes.plot(steps, run.losses, style, label=run.label)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="Training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
