"""Text as bytes, and its batches."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from weft_moe.train.config import DataConfig
from weft_moe.train.data import Batches, load_text, load_tokens


def test_default_text_is_the_standard_library_in_a_fixed_order():
    text = load_text(None, max_bytes=1 << 16)
    assert len(text) == 1 << 16
    assert b"import" in text.tobytes()
    assert load_text(None, max_bytes=1 << 16).tobytes() == text.tobytes()


def test_a_file_is_read_up_to_the_limit(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes(b"warp and weft")
    assert load_text(str(file), 100).tobytes() == b"warp and weft"
    assert load_text(str(file), 4).tobytes() == b"warp"


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_bytes(b"three")
    (tmp_path / "c.txt").write_bytes(b"four")
    (tmp_path / "a.txt").write_bytes(b"one")
    assert load_text(str(tmp_path), 100).tobytes() == b"onethreefour"
    assert load_text(str(tmp_path), 5).tobytes() == b"oneth"


def test_missing_empty_and_short_texts_are_refused(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(ValueError, match=r"data.path = '.*empty.txt' is empty: name a file"):
        load_text(str(empty), 100)
    with pytest.raises(ValueError, match=r"data.path = '.*' is empty"):
        load_text(str(tmp_path), 100)
    with pytest.raises(ValueError, match=r"data.path = 'nowhere' does not exist"):
        load_text("nowhere", 100)
    with pytest.raises(ValueError, match=r"data.path = '' names nothing: .* leave the key out"):
        load_text("", 100)
    # A file whose first byte nobody may read, whoever the user is.
    with pytest.raises(ValueError, match=r"data.path = '/proc/self/mem' cannot be read \(.*error"):
        load_text("/proc/self/mem", 100)
    empty.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"the text has 5 bytes, .* = 128 needs 129"):
        Batches(DataConfig(path=str(empty)), seed=0, rank=0, num_ranks=1)


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "counting.txt"
    file.write_bytes(bytes(range(256)) * 4)
    return DataConfig(path=str(file), batch_size=4, sequence_length=16)


def test_targets_are_the_next_bytes(config):
    inputs, targets = Batches(config, seed=0, rank=0, num_ranks=1)[0]
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == torch.int64
    assert torch.equal((inputs + 1) % 256, targets)


def test_batches_follow_from_seed_and_step(config):
    batches = Batches(config, seed=0, rank=0, num_ranks=1)
    assert torch.equal(batches[3][0], Batches(config, seed=0, rank=0, num_ranks=1)[3][0])
    assert not torch.equal(batches[3][0], batches[4][0])
    assert not torch.equal(batches[3][0], Batches(config, seed=1, rank=0, num_ranks=1)[3][0])


def test_ranks_share_the_batch_of_one_rank(config):
    whole = Batches(config, seed=0, rank=0, num_ranks=1)[7][0]
    shares = [Batches(config, seed=0, rank=rank, num_ranks=2)[7][0] for rank in range(2)]
    assert not torch.equal(*shares)
    assert torch.equal(torch.cat(shares), whole)


def test_the_last_window_is_reachable(tmp_path):
    file = tmp_path / "one_window.txt"
    file.write_bytes(b"abcde")
    config = DataConfig(path=str(file), batch_size=2, sequence_length=4)
    inputs, targets = Batches(config, seed=0, rank=0, num_ranks=1)[0]
    assert bytes(inputs[1].tolist()) == b"abcd"
    assert bytes(targets[1].tolist()) == b"bcde"


@pytest.fixture
def words(tmp_path):
    file = tmp_path / "words.txt"
    file.write_bytes(b"if if if x == if\n")
    return file


def test_words_are_numbered_by_how_common_they_are(words):
    # " if" three times; then, once each and by their bytes: "\n", " ", " x", "==", "if".
    tokens = load_tokens(DataConfig(path=str(words), tokenizer="words"), 256)
    assert tokens.tolist() == [5, 0, 0, 3, 2, 4, 0, 1]


def test_rare_words_share_the_last_token(words):
    tokens = load_tokens(DataConfig(path=str(words), tokenizer="words"), 3)
    assert tokens.tolist() == [2, 0, 0, 2, 2, 2, 0, 1]


def test_words_of_python_fill_a_large_vocabulary():
    tokens = load_tokens(DataConfig(tokenizer="words"), 151936)
    assert len(tokens) > 16384 and tokens.max() > 10_000
    assert tokens.max() + 1 == len(set(tokens.tolist()))


def test_a_tokenizer_file_is_used_and_checked(tmp_path, words):
    file = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer(models.WordLevel({"if": 7, "x": 300, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(file))
    config = DataConfig(path=str(words), tokenizer=str(file))
    assert load_tokens(config, 301).tolist() == [7, 7, 7, 300, 1, 7]
    with pytest.raises(ValueError, match=r"gives token 300 where the model's vocab_size is 300"):
        load_tokens(config, 300)
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer = '.*' cannot be read \(.*or choose 'bytes'"):
        load_tokens(config, 302)
