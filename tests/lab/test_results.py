"""The figures that follow from a run, against figures worked out by hand; and a report that needs nothing else."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from thinwire.lab.link import Link
from thinwire.lab.report import render, write_report
from thinwire.lab.results import KEYS, seconds_to_loss, summarise, write_json
from thinwire.lab.settings import Settings
from thinwire.lab.table import bytes_text, lines, print_table
from thinwire.lab.text import Corpus


def run(strategy: str, losses: list[float], step_s: float, sent: float) -> dict[str, Any]:
    points = [
        {
            "step": 10 * i,
            "seconds": 10 * i * step_s,
            "loss": loss,
            "library_bytes": 10 * i * sent,
            "kernel_bytes": 10.5 * i * sent,
        }
        for i, loss in enumerate(losses)
    ]
    return {
        "strategy": strategy,
        "steps": points[-1]["step"],
        "seconds": points[-1]["seconds"],
        "parameters": 1000,
        "evaluations": points,
        "steady_from_step": 2,
        "step_ms": [1e3 * step_s] * 3,
        "bare_step_ms": [250.0] * 3,
        "median_step_ms": 1e3 * step_s,
        "median_bare_step_ms": 250.0,
        "library_bytes_per_step": sent,
        "kernel_sent_bytes_per_step": 1.05 * sent,
        "kernel_received_bytes_per_step": 1.05 * sent,
        "settings": {"lr": 0.1, "sparsity": [0.75, 0.999]},
    }


def results(*, emulated: bool = True, failed: dict[str, str] | None = None, tune: bool = False) -> dict[str, Any]:
    typed: dict[str, Any] = {"link": "100mbit", "latency": "0ms", "strategies": ["dense", "dgc"], "steps": 20}
    rest: dict[str, Any] = {"workers": 2, "seconds": None, "size": "tiny", "text": None, "batch": 2, "seed": 0}
    settings = Settings.check(**typed, **rest, out=Path("out"), lr=None, tune=tune)
    runs = [run("dense", [5.0, 4.0, 3.0], 1.0, 4000), run("dgc", [5.0, 4.5, 3.5], 0.3, 10)]
    if not emulated:
        for one in runs:
            one["kernel_sent_bytes_per_step"] = None
    return summarise(
        runs,
        settings=settings,
        shape=settings.shape,
        corpus=Corpus(b"train", b"valid", b"held", 1, "a <test>"),
        machine={"cores": 2},
        emulated=emulated,
        reason=None if emulated else "needs root",
        failed=failed,
        started_s=0.0,
        common={},
    )


def test_derived_figures() -> None:
    measured = results()
    dense, dgc = measured["strategies"]
    assert measured["common_loss"] == 3.5
    assert (dense["final_loss"], dgc["final_loss"]) == (3.0, 3.5)
    assert dense["seconds_to_common_loss"] == pytest.approx(15.0)  # half-way between 10 s and 20 s
    assert dgc["seconds_to_common_loss"] == pytest.approx(6.0)
    assert dense["bytes_to_common_loss"] == pytest.approx(60_000)
    assert measured["dense_loss"] == 3.0
    assert (dense["seconds_to_dense_loss"], dense["bytes_to_dense_loss"]) == (20.0, 80_000)
    assert dgc["seconds_to_dense_loss"] is dgc["bytes_to_dense_loss"] is None
    assert dense["ratio_to_dense"] == 1.0  # 2 (W - 1) / W = 1 for two workers, four bytes each
    assert dgc["ratio_to_dense"] == 400.0
    assert dense["step_ratio_to_bare"] == 4.0
    assert dense["exchange_share"] == 0.75
    assert dgc["exchange_share"] == pytest.approx(1 - 0.25 / 0.3)


def test_a_loss_that_is_never_reached_has_no_time() -> None:
    points = [{"loss": 5.0, "seconds": 0.0}, {"loss": 4.0, "seconds": 1.0}, {"loss": 4.5, "seconds": 2.0}]
    assert seconds_to_loss(points, 3.9) is None
    assert seconds_to_loss(points, 4.25) == pytest.approx(0.75)
    assert seconds_to_loss(points, 6.0) == 0.0


def test_every_key_is_described_and_every_description_has_its_key() -> None:
    measured = results(emulated=False)
    described = {re.sub(r".*\.|\[\]", "", key) for key in KEYS}
    for key in measured.keys() - {"thinwire", "started", "keys"}:
        assert key in described
    for entry in measured["strategies"]:
        raw = {"strategy", "steps", "parameters", "steady_from_step", "summary", "bare_step_ms", "bytes_to_common_loss"}
        assert entry.keys() - raw <= described
        assert described - set(measured) <= entry.keys() | {"strategies", "seconds_on_asked_link"}


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    write_json(results(), tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(results()))
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_columns_that_were_not_measured_are_not_shown() -> None:
    emulated, local = dict(lines(results())), dict(lines(results(emulated=False)))
    assert emulated["sent per step, by the kernel"] == ["4.2 kB", "10.5 B"]
    assert "sent per step, by the kernel" not in local
    assert "training time on the asked link" not in emulated
    # 20 steps of 4000 bytes at 100 Mbit/s are 6.4 ms
    assert local["training time on the asked link"] == ["20.0 s", "6.0 s"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (13_200_000, "13.2 MB"), (5e12, "5e+03 GB")]
)
def test_bytes_for_people(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(results())
    printed = capsys.readouterr().out
    assert printed.startswith("2 workers, each in a network namespace")
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_many_strategies_are_printed_below_each_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    measured = results()
    measured["strategies"] = [{**measured["strategies"][0], "strategy": f"adaptive-local-{i}"} for i in range(6)]
    print_table(measured)
    printed = capsys.readouterr().out
    assert "…" not in printed
    for i in range(6):
        assert printed.count(f"adaptive-local-{i}") == 1
    labels = [label for label, _ in lines(measured)]
    assert all(printed.count(f" {label} ") == printed.count(f" {labels[0]} ") >= 2 for label in labels)


class Outside(HTMLParser):
    """Collects everything that a page would load, and its first text."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [
            str(value)
            for name, value in attrs
            if name in ("src", "href", "xlink:href") and not str(value).startswith("#")
        ]


def test_the_report_needs_nothing_else(tmp_path: Path) -> None:
    write_report(results(), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    outside = Outside()
    outside.feed(page)
    assert outside.loads == []
    assert not {"script", "link", "img", "iframe"} & outside.tags
    assert "http" not in page
    assert page.count("<svg") == 2
    assert "@import" not in page
    assert "url(http" not in page


def test_the_report_suits_light_and_dark_and_escapes_what_it_shows() -> None:
    page = render(results())
    assert "prefers-color-scheme: dark" in page
    assert "a &lt;test&gt;" in page
    for number in range(2):
        assert page.count(f"var(--series-{number})") >= 3
    # no colour of matplotlib's own is left that would not follow the page
    plots = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert re.findall(r"#[0-9a-f]{6}", plots) == []


def test_many_strategies_keep_their_colours_apart_from_the_text() -> None:
    measured = results()
    measured["strategies"] = measured["strategies"] * 4
    svg = re.findall(r"<svg.*?</svg>", render(measured), flags=re.DOTALL)[0]
    for number in range(8):
        assert 0 < svg.count(f"var(--series-{number})") < svg.count("var(--ink)")


def test_the_report_says_first_that_nothing_was_emulated() -> None:
    page = render(results(emulated=False))
    body = page[page.index("<body>") :]
    assert re.sub(r"<[^>]*>", "", body).strip().startswith("The link of 100mbit was NOT emulated (needs root)")


def test_losses_that_settings_were_chosen_by_are_named_as_such() -> None:
    assert lines(results())[1][0] == "held-out loss, nats per byte"
    assert lines(results(tune=True))[1][0] == "loss on the validation part, nats per byte"
    assert "kept for choosing settings" in results(tune=True)["headline"]
    assert "kept for choosing settings" in results(tune=True, emulated=False)["headline"]


def test_the_report_names_a_failure() -> None:
    assert "powersgd failed: it &lt;broke&gt;" in render(
        results(failed={"strategy": "powersgd", "error": "it <broke>"})
    )


def test_links_are_described_as_asked() -> None:
    assert results()["link"]["asked"] == str(Link.parse("100mbit"))
