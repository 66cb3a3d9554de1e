"""The trainer's configuration: what is accepted, and the words in which the rest is refused."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from weft_moe.train.config import PRESETS, ConfigError, load_config, parse_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny.toml"


def tables(**trainer):
    return {"trainer": {"steps": 1, **trainer}}


@pytest.mark.parametrize("path", sorted(EXAMPLE.parent.glob("*.toml")), ids=lambda path: path.name)
def test_examples_and_the_commands_in_them_are_valid(path):
    text = path.read_text()
    load_config(path)
    # "#   ... FILE --set KEY=VALUE ...", continued by a backslash.
    commands = re.sub(r"\\\n#", "", text)
    for command in re.findall(rf"^#   .*{path.name}(.*)$", commands, re.MULTILINE):
        words = shlex.split(command, comments=True)
        load_config(path, [word for word in words if word != "--set"])


def test_full_sizes_are_trained_in_long_sequences():
    config = parse_config(tables(model={"preset": "qwen3-30b-a3b"}, dtype="fp32"))
    assert (config.data.batch_size, config.data.sequence_length) == (1, 16384)
    assert config.trainer.checkpoint_activations
    assert config.trainer.dtype == "fp32", "a file's own key comes first"
    assert parse_config(tables()).data.sequence_length == 128


def test_a_run_may_be_repeated_for_the_same_bits():
    config = parse_config(tables(compare={"type": "mega_moe", "tolerance": 0}))
    assert [d.label for d in config.trainer.dispatches] == ["mega_moe bf16"] * 2


def test_example_is_valid():
    config = load_config(EXAMPLE)
    assert config.trainer.ep == 2
    assert [d.type for d in config.trainer.dispatches] == ["mega_moe", "torch"]


def test_defaults():
    config = parse_config(tables())
    assert config.trainer.model.sizes == PRESETS["tiny"]
    assert [d.label for d in config.trainer.dispatches] == ["mega_moe bf16"]
    assert config.data.path is None


def test_sizes_replace_those_of_the_preset():
    model = {"preset": "qwen3-30b-a3b", "num_layers": 2, "hidden": 256}
    sizes = parse_config(tables(model=model)).trainer.model.sizes
    assert (sizes.num_layers, sizes.hidden, sizes.num_experts) == (2, 256, 128)


def test_overrides_replace_keys_and_keep_their_neighbours():
    config = load_config(EXAMPLE, ["trainer.steps = 5", 'trainer.compare.precision = "bf16"'])
    assert config.trainer.steps == 5
    assert config.trainer.ep == 2
    assert config.trainer.dispatches[1].label == "torch bf16"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"trainr": {}}, r"the file has an unknown key 'trainr': known are trainer, data"),
        (tables(step=3), r"\[trainer\] has an unknown key 'step': known are steps, num_ranks, ep"),
        (
            tables(model={"moe": {"dispatch": {"kind": "torch"}}}),
            r"\[trainer.model.moe.dispatch\] has an unknown key 'kind': known are type, precision",
        ),
        ({}, r"\[trainer\] lacks the key 'steps'"),
        (tables(compare={"type": "torch"}), r"\[trainer.compare\] lacks the key 'tolerance'"),
        (tables(model=3), r"\[trainer.model\] = 3: a table is needed"),
        (tables(ep="two"), r"\[trainer\] ep = 'two': a whole number is needed"),
        (tables(ep=2.0), r"\[trainer\] ep = 2.0: a whole number is needed"),
        (tables(ep=True), r"\[trainer\] ep = True: a whole number is needed"),
        (tables(checkpoint_activations=1), r"checkpoint_activations = 1: true or false is needed"),
        (tables(device=0), r"\[trainer\] device = 0: text is needed"),
        (
            tables(optimizer={"learning_rate": "fast"}),
            r"\[trainer.optimizer\] learning_rate = 'fast': a number is needed",
        ),
        (tables(steps=0), r"\[trainer\] steps = 0: must be at least 1"),
        (tables(optimizer={"learning_rate": 0}), r"learning_rate = 0: must be more than 0"),
        (tables(optimizer={"beta2": 1.0}), r"beta2 = 1.0: must be less than 1"),
        (
            tables(optimizer={"learning_rate": float("nan")}),
            r"learning_rate = nan: must be more than 0",
        ),
        (tables(device="tpu"), r"device = 'tpu': choose one of 'cpu', 'cuda'"),
        (
            tables(model={"preset": "qwen"}),
            r"preset = 'qwen': choose one of 'tiny', 'qwen3-30b-a3b', 'qwen3-235b-a22b'",
        ),
        (
            tables(model={"moe": {"dispatch": {"type": "deep"}}}),
            r"\[trainer.model.moe.dispatch\] type = 'deep': choose one of 'mega_moe', 'torch', 'trans",
        ),
        (
            tables(model={"moe": {"dispatch": {"precision": "int4"}}}),
            r"\[trainer.model.moe.dispatch\] precision = 'int4': choose one of 'fp32', 'bf16'",
        ),
        (
            tables(model={"moe": {"dispatch": {"type": "torch", "precision": "mxfp8"}}}),
            r"that type does 'fp32', 'bf16'; types that do 'mxfp8': 'mega_moe'",
        ),
        (
            tables(
                model={"moe": {"dispatch": {"precision": "fp8"}}},
                compare={"type": "torch", "tolerance": 0.1},
            ),
            r"\[trainer.compare\] precision = 'fp8' with type = 'torch'",
        ),
        (
            tables(compare={"type": "mega_moe", "tolerance": 0.1}),
            r"\[trainer.compare\] would repeat the run 'mega_moe bf16'",
        ),
        (
            tables(compare={"type": "torch", "tolerance": -0.1}),
            r"\[trainer.compare\] tolerance = -0.1: must be at least 0",
        ),
        (
            tables(compare={"type": "torch", "tolerance": 1}, checkpoint={"folder": "x"}),
            r"\[trainer.checkpoint\] with \[trainer.compare\]: .* leave one of the tables out",
        ),
        (
            tables(model={"moe": {"dispatch": {"type": "transformers", "precision": "bf16"}}}),
            r"\[trainer.model.moe.dispatch\] precision = 'bf16' with type = 'transformers' and "
            r"trainer.dtype = 'fp32': .* choose the same for both",
        ),
        (
            tables(
                model={"moe": {"dispatch": {"precision": "fp32"}}},
                dtype="bf16",
                compare={"type": "transformers", "tolerance": 0.1},
            ),
            r"\[trainer.compare\] precision = 'fp32' with type = 'transformers' and trainer.dtype",
        ),
        (tables(checkpoint={"every": 0}), r"\[trainer.checkpoint\] every = 0: must be at least 1"),
        (
            tables(param_dtype="bf16"),
            r"\[trainer\] param_dtype = 'bf16' with dtype = 'fp32' would .* choose dtype = 'bf16'",
        ),
        (tables(num_ranks=3, ep=2), r"num_ranks = 3 does not divide into groups of ep = 2"),
        (tables(ep=3), r"ep = 3 ranks cannot share 8 experts evenly: .* divides 8"),
        (tables(model={"top_k": 9}), r"\[trainer.model\] top_k = 9 is more than num_experts = 8"),
        (tables(model={"num_kv_heads": 3}), r"num_heads = 4 is no multiple of num_kv_heads = 3"),
        (tables(model={"head_dim": 7}), r"head_dim = 7: rotary embeddings need an even size"),
        (tables(model={"vocab_size": 255}), r"vocab_size = 255: must be at least 256"),
    ],
)
def test_refused(table, words):
    with pytest.raises(ConfigError, match=words):
        parse_config(table)


@pytest.mark.parametrize(
    ("trainer", "num_ranks", "words"),
    [
        ({"num_ranks": 2}, 4, r"num_ranks = 2, but 4 ranks were started"),
        ({"ep": 2}, 3, r"ep = 2 does not divide the 3 ranks that were started"),
        (
            {"ep": 2, "dp_replicate": 3},
            4,
            r"dp_replicate = 3 copies cannot share 4 ranks, in groups of ep = 2, .* divides 2",
        ),
        ({}, 3, r"batch_size = 8 cannot be shared evenly by 3 ranks: choose a multiple of 3"),
    ],
)
def test_number_of_started_ranks_is_checked(trainer, num_ranks, words):
    with pytest.raises(ConfigError, match=words):
        parse_config(tables(**trainer)).check_world(num_ranks)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none.toml: cannot be read as TOML"):
        load_config(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[trainer\n")
    with pytest.raises(ConfigError, match=r"broken.toml: cannot be read as TOML: .*line 1"):
        load_config(broken)
    with pytest.raises(ConfigError, match=r"override 'trainer.output=runs' is no TOML"):
        load_config(EXAMPLE, ["trainer.output=runs"])
