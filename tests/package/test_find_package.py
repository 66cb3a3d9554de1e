"""An outside CMake project finds the installed package, links weft::weft and runs a forward through the C ABI."""

from pathlib import Path


def test_outside_project(tmp_path: Path, root: Path, release_build: Path, run) -> None:
    prefix, build = tmp_path / "prefix", tmp_path / "build"
    run("cmake", "--install", release_build, "--prefix", prefix, "--component", "development")
    run(
        "cmake",
        "-S",
        root / "tests/package/consumer",
        "-B",
        build,
        "-G",
        "Ninja",
        f"-DCMAKE_PREFIX_PATH={prefix}",
    )
    run("cmake", "--build", build)
    assert "y = [-0.731058578630" in run(build / "consumer_c")
    printed = run(build / "consumer_cpp")
    assert "y = [-0.731058578630" in printed
    assert "refused: top_k is 2" in printed


def test_package_can_be_moved(tmp_path: Path, root: Path, release_build: Path, run) -> None:
    """Nothing that is installed names the sources or the build folder."""
    prefix = tmp_path / "prefix"
    run("cmake", "--install", release_build, "--prefix", prefix, "--component", "development")
    texts = [path for path in prefix.rglob("*") if path.suffix in {".cmake", ".h", ".hpp"}]
    assert texts
    for path in texts:
        for folder in (root / "src", root / "include", release_build):
            assert str(folder) not in path.read_text(), path
