"""The benchmarks run, and pages made from their figures are those of the repository."""

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import choosing, joining, keep_batch, report, streams
from benchmarks.__main__ import SUITE
from benchmarks.common import json_lines
from benchmarks.limits import LIMITS
from tests.processes import ran

ROOT = Path(__file__).parent.parent
BENCHMARKS = [sys.executable, "-m", "benchmarks"]
GPU_PARTS = ("kernels", "strategies", "steps", "waits")


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITE)
def test_a_benchmark_runs_and_its_figures_can_be_read(name: str, tmp_path: Path) -> None:
    command = [*BENCHMARKS, "--quick", "--only", name, "--folder", str(tmp_path)]
    done = ran(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert f"benchmarks.{name}" in result["command"]
    assert report.machine(result)
    table = report.limits_table({name: result})
    assert all(limit.figure in table for limit in LIMITS if limit.benchmark == name)


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
    command = [sys.executable, "-m", "benchmarks.large", "--sizes", "tiny"]
    command += ["--methods", "dgc", "muon-local", "--kinds", "method", "join"]
    done = ran([*command, "--results", str(out)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    dgc, muon, join = map(json.loads, out.read_text().splitlines())
    assert {"rest", "alone", "start", "step", "save"} <= dgc.keys()
    assert {"rest", "averaging", "load"} <= muon.keys()
    assert join["received"] > join["params"]  # its tensors; equal ones are not sent


def test_every_benchmark_has_its_section_and_every_limit_its_benchmark() -> None:
    assert list(report.SECTIONS) == list(SUITE)
    assert {limit.benchmark for limit in LIMITS} <= set(SUITE)


def test_pages_are_made_from_figures() -> None:
    results = report.read(report.RESULTS)
    assert report.TABLE.read_text(encoding="utf-8") == report.limits_table(results) + "\n", (
        "run: make bench"
    )
    assert report.PAGE.read_text(encoding="utf-8") == report.page(results), (
        "python -m benchmarks.report"
    )


def test_pages_have_the_tables_of_today() -> None:
    lines = choosing.evidence()
    old = [p.name for p in choosing.PAGES if choosing.filled(text := p.read_text(), lines) != text]
    assert old == [], "run: python -m benchmarks.choosing --write"


def test_quick_figures_do_not_overwrite_full_ones() -> None:
    done = ran([*BENCHMARKS, "--quick"], cwd=ROOT)
    assert done.returncode == 2
    assert "name another --folder" in done.stderr


def test_page_tells_the_joins_that_were_measured() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    rows = json.loads((report.RESULTS / "joining.json").read_text())["rows"]
    assert "\n".join(joining.table(rows)) in page
    assert "\n".join(keep_batch.table(json_lines(keep_batch.RESULTS))) in page
    (slow,) = (row for row in rows if row["error"])
    for rate in re.findall(r"[\d.]+ Mbit/s", slow["error"]):
        assert rate in page
    rows = json.loads((report.RESULTS / "streams.json").read_text())["rows"]
    assert "\n".join(streams.table(rows)) in page
