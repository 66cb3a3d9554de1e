"""The record of a GPU: its hash is the shell's, its counts are the reports', its figures the rows'."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from weft_moe.bench import ledger
from weft_moe.bench.layer import BASELINE, DIRECTIONS, SHAPES, Case, Problem, Row, measure

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def test_sources_hash_is_what_the_shell_prints() -> None:
    command = "find include src -type f | LC_ALL=C sort | xargs sha256sum | sha256sum"
    printed = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert ledger.sources_sha256(ROOT) == printed.stdout.split()[0]


def test_sources_hash_sees_a_changed_and_a_renamed_file(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "include").mkdir()
    file = tmp_path / "src" / "a.cpp"
    hashes = set()
    for text in ("one", "two"):
        file.write_text(text)
        hashes.add(ledger.sources_sha256(tmp_path))
    file.rename(tmp_path / "src" / "b.cpp")
    hashes.add(ledger.sources_sha256(tmp_path))
    assert len(hashes) == 3


def test_commit_is_unknown_outside_git(tmp_path: Path) -> None:
    assert ledger.commit(tmp_path) == "unknown"


def test_commit_says_when_the_sources_differ(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.cpp").write_text("one")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = ledger.commit(tmp_path)
    assert len(clean) == 40
    (tmp_path / "src" / "a.cpp").write_text("two")
    assert ledger.commit(tmp_path) == f"{clean}-dirty"


def test_counts_pytest_and_ctest_reports(tmp_path: Path) -> None:
    pytest_report, ctest_report = tmp_path / "pytest.xml", tmp_path / "ctest.xml"
    pytest_report.write_text(
        '<testsuites><testsuite tests="7" failures="1" errors="1" skipped="2"/></testsuites>'
    )
    ctest_report.write_text('<testsuite tests="5" failures="1" disabled="1" skipped="0"/>')
    skipped = tmp_path / "skipped.txt"
    skipped.write_text("a: no GoogleTest\nb: no GoogleTest\n")
    counts = ledger.count_tests([pytest_report, ctest_report], skipped)
    assert counts == {"passed": 6, "failed": 3, "skipped": 5}


def test_flops_are_the_layers_own() -> None:
    """6 R H I forward, 12 backward wherever its rows are, and 4 more to recompute gate and up."""
    shape, tokens = SHAPES["30b"], 16384
    unit = tokens * 8 * 2048 * 768
    assert [shape.flops(direction, tokens) // unit for direction in DIRECTIONS] == [6, 12, 12, 16]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    options = dict(precision="fp32", device=CPU, regimes=("burst",), dense_size=64)
    return list(measure(Case("tiny", 32), note=print, **options))


def test_each_row_follows_from_its_times(rows: list[Row]) -> None:
    baseline = {row.direction: row for row in rows if row.implementation == BASELINE}
    assert set(baseline) == set(DIRECTIONS)
    for row in rows:
        flops = SHAPES["tiny"].flops(row.direction, 32)
        assert row.ms > 0
        assert row.tflops == pytest.approx(flops / row.ms / 1e9)
        assert row.share_of_dense == pytest.approx(row.tflops / row.dense_tflops)
        assert row.unfused_ms == baseline[row.direction].ms
        assert row.speedup == pytest.approx(row.unfused_ms / row.ms)


def test_record_and_plot(tmp_path: Path, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"device": "a GPU", "driver": "1", "cuda": "2", "torch": "3"}
    monkeypatch.setattr(ledger, "describe_machine", lambda device: machine)
    tests = {"passed": 1, "failed": 0, "skipped": 2}
    path = tmp_path / "results" / "gpu.json"
    layer = [row.as_dict() for row in rows]
    breakdown = [{"direction": "forward", "tail_ms": 0.2}]
    ledger.write_record(path, root=ROOT, device=CPU, tests=tests, layer=layer, breakdown=breakdown)
    record = json.loads(path.read_text())
    assert machine.items() <= record.items()
    assert record["tests"] == tests
    assert record["sources_sha256"] == ledger.sources_sha256(ROOT)
    assert record["layer"] == layer and record["breakdown"] == breakdown
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_plot_takes_an_older_record(tmp_path: Path, rows: list[Row]) -> None:
    """One without a direction, and whose rows do not tell their source."""
    layer = [row.as_dict() for row in rows if row.direction != "backward_saved"]
    for row in layer:
        del row["source"]
    assert {row["direction"] for row in layer} == set(DIRECTIONS) - {"backward_saved"}
    record = {"device": "a GPU", "date": "2026-01-01T00:00:00+00:00", "layer": layer}
    path = tmp_path / "older.png"
    ledger.plot(record, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_problem_is_the_same_again() -> None:
    first, again = (Problem(SHAPES["tiny"], 16, "bf16", CPU) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.inputs, again.inputs, strict=True))
    assert (first.topk_idx.sort(1).values.diff(dim=1) > 0).all(), "a token's experts are distinct"


def test_plot_shows_one_rank_with_the_most_tokens(rows: list[Row]) -> None:
    shown = [row.as_dict() for row in rows]
    others = [{**row, "tokens_per_rank": 8, "ep": ep} for row in shown for ep in (1, 4)]
    others += [{**row, "tokens_per_rank": 512, "ep": 2} for row in shown]
    another = [{**row, "shape": "another", "tokens_per_rank": 8} for row in shown]
    assert ledger._plotted(others + shown + another) == shown + another
