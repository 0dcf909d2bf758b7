"""The benchmarks run, and pages made from their figures are those of the repository."""

import json
import sys
from pathlib import Path

import pytest

from tests.processes import ran

ROOT = Path(__file__).parent.parent
BENCHMARKS = [sys.executable, "-m", "benchmarks"]
SUITE = ("codec", "optimizers", "scaling", "scale", "startup", "memory", "overlap")
LIMITS = (ROOT / "benchmarks" / "results" / "limits.md").read_text(encoding="utf-8")
GPU_PARTS = ("kernels", "strategies", "steps", "averaging", "waits")


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITE)
def test_a_benchmark_runs_and_its_figures_can_be_read(name: str, tmp_path: Path) -> None:
    command = [*BENCHMARKS, "--quick", "--only", name, "--folder", str(tmp_path)]
    done = ran(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert f"benchmarks.{name}" in result["command"]
    assert result["machine"]["cores"] > 0
    for row in LIMITS.splitlines():
        assert f"`{name}`" not in row or f"{row.partition(' | ')[0]} |" in done.stdout


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--minutes", "30"]
    command += ["--only", *GPU_PARTS, "--out", str(out)]
    done = ran(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert all(found[part]["passed"] for part in GPU_PARTS)
    table = ran([sys.executable, "-m", "benchmarks.gpu", "table", str(out)], cwd=ROOT)
    assert table.returncode == 0
    assert table.stdout in done.stdout
    assert "| thinwire local Muon, 1 bit |" in table.stdout


@pytest.mark.slow
def test_the_benchmark_of_large_models_measures_methods_and_a_join(tmp_path: Path) -> None:
    out = tmp_path / "large.jsonl"
    command = [sys.executable, "-m", "research.large.methods", "--sizes", "tiny"]
    command += ["--methods", "dgc", "muon-local", "--kinds", "method", "join"]
    done = ran([*command, "--results", str(out)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    dgc, muon, join = map(json.loads, out.read_text().splitlines())
    assert {"rest", "alone", "start", "step", "save"} <= dgc.keys()
    assert {"rest", "averaging", "load"} <= muon.keys()
    assert join["received"] > join["params"]  # its tensors; equal ones are not sent


@pytest.mark.parametrize("module", ["benchmarks.report", "research.pages"])
def test_pages_are_made_from_figures(module: str) -> None:
    done = ran([sys.executable, "-m", module, "--check"], cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_benchmark_is_tested() -> None:
    assert f"{{{','.join(SUITE)}}}" in ran([*BENCHMARKS, "--help"], cwd=ROOT).stdout


def test_quick_figures_do_not_overwrite_full_ones() -> None:
    done = ran([*BENCHMARKS, "--quick"], cwd=ROOT)
    assert done.returncode == 2
    assert "name another --folder" in done.stderr
