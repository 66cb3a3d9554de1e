"""The step benchmark at tiny sizes: its arithmetic, its marks, and the entries that it writes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from weft_moe.bench.cli import main
from weft_moe.bench.ledger import is_of_other_sources, sources_sha256
from weft_moe.bench.step import (
    BACKENDS,
    Measurement,
    StepCase,
    StepOptions,
    StepRow,
    flops_per_token,
    measure_steps,
    step_config,
)
from weft_moe.bench.step_parts import PARTS, PartClock, marked
from weft_moe.bench.step_report import merge_rows, plot_steps, step_ratios
from weft_moe.train.config import PRESETS, ConfigError, ModelSizes
from weft_moe.train.dispatch import DISPATCHES
from weft_moe.train.ranks import join_ranks
from weft_moe.train.trainer import Trainer

sys.path.append(str(Path(__file__).parents[1] / "torch"))
from ranks import run_ranks  # noqa: E402
from training import make_config, one_thread  # noqa: E402

KEYS = [
    "preset",
    "num_layers",
    "ep",
    "backend",
    "precision",
    "step_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "peak_gib",
    "moe_share",
]
TINY = StepCase("tiny", 1)
OPTIONS = StepOptions(device="cpu", tokens=16, compile=False, warm_up=1, steps=3)


def row(**changes) -> StepRow:
    values = ("qwen3-30b-a3b", 8, 1, "torch", "bf16", 0.5, 100.0, 0.3, 40.0, 0.4)
    return StepRow(**{**dict(zip(KEYS, values, strict=True)), **changes})


def measurement(shares: tuple[float, ...] = (0.5, 0.2, 0.1, 0.15, 0.05), **changes) -> Measurement:
    return Measurement(row(**changes), dict(zip(PARTS, shares, strict=True)), loss=2.0)


def test_flops_of_a_small_model_counted_by_hand():
    sizes = ModelSizes(
        num_layers=3,
        hidden=10,
        intermediate=7,
        num_experts=4,
        top_k=2,
        num_heads=4,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=100,
    )
    q, kv, out = 10 * 32, 2 * 10 * 8, 32 * 10
    router, experts = 10 * 4, 2 * (10 * 14 + 7 * 10)
    products = 2 * (3 * (q + kv + out + router + experts) + 10 * 100)
    # A token meets half of the 6 positions: scores, and values, 2 * 32 each.
    scores = 3 * 2 * 2 * 32 * 6 // 2
    assert flops_per_token(sizes, 6) == 3 * (products + scores)


def test_flops_of_a_preset_are_six_for_each_active_parameter():
    sizes = PRESETS["qwen3-30b-a3b"]
    active = 3.35e9 - sizes.vocab_size * sizes.hidden  # published; the embedding is a look-up
    assert flops_per_token(sizes, 0) == pytest.approx(6 * active, rel=0.01)


class ListedParts(PartClock):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.parts: list[str] = []

    def enter(self, part: str) -> None:
        self.parts.append(part)


@pytest.mark.parametrize("backend", BACKENDS)
def test_marks_follow_a_checkpointed_step(backend):
    config = make_config(type=backend, model={"num_layers": 1}, checkpoint_activations=True)
    clock = ListedParts()
    with one_thread(), join_ranks(config) as ranks:
        trainer = Trainer(config, config.trainer.dispatches[0], ranks)
        plain = trainer.forward_backward(0)
        with marked(trainer.model, clock):
            assert torch.equal(trainer.forward_backward(0), plain)
        num_marks = len(clock.parts)
        trainer.forward_backward(0)
    assert len(clock.parts) == num_marks, "marks stay after their end"
    into_experts = ["layer", "attention", "layer", "moe"]
    forward = ["layer", *into_experts, "layer", "head"]
    # The recomputation begins and ends inside the experts' backward.
    backward = ["layer", "moe", *into_experts, "layer", "attention", "layer", "layer", "head"]
    assert clock.parts == forward + backward


def test_time_belongs_to_the_part_that_was_entered(monkeypatch):
    times = iter((1.0, 2.0, 4.0, 7.0, 11.0, 16.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = PartClock(torch.device("cpu"))
    for part in ("head", "moe", "head", "", "moe", ""):
        clock.enter(part)
    seconds = clock.seconds()
    assert (seconds["head"], seconds["moe"], seconds["attention"]) == (1 + 3, 2 + 5, 0)


def test_steps_are_measured_and_written(tmp_path, capsys):
    output = tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--case", "tiny:1", "--tokens", "16", "--no-compile"]
    arguments += ["--warm-up", "1", "--steps", "3", "--output", str(output)]
    with one_thread():
        assert main(["step", *arguments]) == 0
    rows = json.loads(output.read_text())["step"]
    assert [entry["backend"] for entry in rows] == ["torch", "transformers", "mega_moe"]
    for entry in rows:
        assert list(entry) == KEYS
        assert (entry["preset"], entry["num_layers"]) == ("tiny", 1)
        assert entry["tokens_per_s_per_gpu"] == pytest.approx(16 / entry["step_s"])
        assert 0 < entry["moe_share"] < 1
        assert entry["mfu"] is None and entry["peak_gib"] > 0.1
    printed = capsys.readouterr().out
    for words in (
        "tiny, 1 layers, bf16 parameters, flash_attention_for_cpu",
        "tokens/s/GPU",
        f"EP 1: a step without MoE would be {1 - rows[0]['moe_share']:.3f} of torch's",
        "EP 1: step, mega_moe : torch: ",
        "EP 1: decoder layers alone, mega_moe : torch: ",
        "EP 1: peak memory, mega_moe : torch: ",
        "EP 1: step, mega_moe : transformers: ",
        "EP 1: decoder layers alone, mega_moe : transformers: ",
    ):
        assert words in printed
    assert (tmp_path / "gpu_step.png").read_bytes().startswith(b"\x89PNG")


def measure_on_rank(rank: int, ep: int) -> tuple[list[Measurement], list[str]]:
    os.environ["WORLD_SIZE"] = "2"  # as a launcher says it
    options = StepOptions(**{**vars(OPTIONS), "ep": ep, "param_dtype": "fp32"})
    notes = []
    return list(measure_steps(TINY, options, notes.append)), notes


@pytest.mark.parametrize("ep", [1, 2])
def test_ranks_measure_one_step_together(ep):
    both, notes = zip(*run_ranks(measure_on_rank, 2, ep), strict=True)
    for backends in zip(*both, strict=True):
        assert {m.row.ep for m in backends} == {ep}
        assert len({m.loss for m in backends}) == 1
    able = [backend for backend in BACKENDS if backend != "transformers" or ep == 1]
    assert [m.row.backend for m in both[0]] == able
    for other in both[0][1:]:
        assert other.loss == pytest.approx(both[0][0].loss, rel=1e-3)
    reason = (
        "tiny: transformers is not measured: dispatch type 'transformers' cannot run here: ep = 2"
    )
    assert any(note.startswith(reason) for note in notes[0]) == (ep == 2)


def without_ops(**_):
    raise ImportError("weft_moe was not built")


def test_a_backend_that_cannot_run_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "weft_moe", SimpleNamespace(supports=without_ops))
    notes = []
    with one_thread():
        measured = list(measure_steps(TINY, OPTIONS, notes.append))
    assert [m.row.backend for m in measured] == ["torch", "transformers"]
    assert "tiny: mega_moe is not measured: weft_moe was not built" in notes


def test_a_case_that_no_backend_can_run_is_refused(monkeypatch):
    def unsupported(layer, ep_size):
        return "too small"

    for dispatch in DISPATCHES.values():
        monkeypatch.setattr(dispatch, "unsupported", unsupported)
    notes = []
    with pytest.raises(ValueError, match="tiny: no backend can run here"):
        next(measure_steps(TINY, OPTIONS, notes.append))
    assert [note.split()[1] for note in notes] == list(BACKENDS)


def test_weft_is_set_beside_the_others_of_its_case():
    own = {"backend": "mega_moe", "peak_gib": 30.0}
    ratios = list(
        step_ratios(
            [
                measurement(),
                measurement(step_s=0.8, backend="transformers"),
                measurement(step_s=0.4, shares=(0.25, 0.25, 0.125, 0.2, 0.175), **own),
                measurement(step_s=0.1, **own, num_layers=9),  # has nothing beside it
            ]
        )
    )
    assert {r.row.backend for r in ratios} == {"mega_moe"}
    assert [(r.other, r.meaning, round(r.value, 6), r.target) for r in ratios] == [
        ("torch", "step", 0.8, 0.76),
        ("torch", "decoder layers alone", 0.625, 0.73),
        ("torch", "peak memory", 0.75, 1.0),
        ("transformers", "step", 0.5, None),
        ("transformers", "decoder layers alone", 0.390625, None),
    ]


def test_a_step_without_moe_is_what_is_left_of_the_baseline():
    assert row(moe_share=0.287).share_without_moe == pytest.approx(0.713)
    assert "share_without_moe" not in row().as_dict()


def test_rows_replace_their_own_kind_and_leave_the_rest(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"device": "a GPU", "layer": [1], "tests": {"passed": 3}}))
    merge_rows(path, [row(), row(backend="mega_moe")])
    merge_rows(path, [row(backend="mega_moe", step_s=0.25), row(num_layers=4)])
    record = json.loads(path.read_text())
    assert (record["device"], record["layer"], record["tests"]) == ("a GPU", [1], {"passed": 3})
    steps = [(r["backend"], r["num_layers"], r["step_s"]) for r in record["step"]]
    assert steps == [("torch", 8, 0.5), ("mega_moe", 8, 0.25), ("torch", 4, 0.5)]
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 3}', '{"layer": {}}'])
def test_a_file_that_is_no_record_is_left_alone(tmp_path, text):
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="gpu.json is no results file"):
        merge_rows(path, [row()])
    assert path.read_text() == text


def test_rows_of_other_sources_are_noticed(tmp_path):
    path, root = tmp_path / "gpu.json", tmp_path / "checkout"
    (root / "src").mkdir(parents=True)
    (root / "src" / "a.cpp").write_text("one")
    assert not is_of_other_sources(path, root)
    path.write_text(json.dumps({"sources_sha256": sources_sha256(root)}))
    assert not is_of_other_sources(path, root)
    (root / "src" / "a.cpp").write_text("two")
    assert is_of_other_sources(path, root)


def test_bars_are_as_high_as_the_steps(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: seen.append(figure))
    steps_s = {"torch": 0.5, "transformers": 0.8, "mega_moe": 0.4}
    measurements = [measurement(backend=name, step_s=step_s) for name, step_s in steps_s.items()]
    plot_steps(measurements, "Training step", tmp_path / "step.png")
    (axes,) = seen[0].axes
    assert len(axes.containers) == len(PARTS)
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
    assert tops == pytest.approx([500.0, 800.0, 400.0])


def test_the_model_is_the_preset_cut_and_fully_checkpointed():
    trainer = step_config(StepCase("qwen3-235b-a22b", 2), OPTIONS).trainer
    sizes = trainer.model.sizes
    assert (sizes.num_layers, sizes.hidden, sizes.num_experts) == (2, 4096, 128)
    assert (trainer.checkpoint_activations, trainer.dtype) == (True, "bf16")
    assert [d.label for d in trainer.dispatches] == ["torch bf16"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", "tiny"], "--case tiny: write PRESET:LAYERS"),
        (["--case", "huge:2"], "preset = 'huge': choose one of 'tiny'"),
        (["--steps", "5"], "steps = 5 with warm_up = 5 leaves no step to time"),
        (["--ep", "2"], "num_ranks = 1 does not divide into groups of ep = 2"),
    ],
)
def test_what_cannot_be_measured_is_told_in_words(capsys, arguments, words):
    assert main(["step", "--device", "cpu", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_no_step_to_time_is_refused():
    with pytest.raises(ConfigError, match="choose more steps than warm_up"):
        step_config(TINY, StepOptions(device="cpu", tokens=16, warm_up=-1))
