"""The figures that follow from a run, worked out by hand; and a report that needs nothing else."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import api
from tests.api import page_render as render
from tests.api import page_write as write


def run(strategy: str, losses: list[float], step_s: float, sent: float) -> api.Run:
    points = [
        {
            "step": 10 * i,
            "seconds": 10 * i * step_s,
            "loss": loss,
            "library_bytes": 10 * i * sent,
        }
        for i, loss in enumerate(losses)
    ]
    told = {
        "strategy": strategy,
        "steps": points[-1]["step"],
        "seconds": points[-1]["seconds"],
        "parameters": 1000,
        "gradient_bytes": 4000.0,
        "evaluations": points,
        "alike": False,
        "steady_from_step": 2,
        "step_ms": [1e3 * step_s] * 3,
        "median_step_ms": 1e3 * step_s,
        "median_bare_step_ms": 250.0,
        "library_bytes_per_step": sent,
        "kernel_sent_bytes_per_step": 1.05 * sent,
        "preparation_seconds": 5.1,
        "settings": {
            "lr": 0.1,
            "optimizer": "AdamW (betas 0.9 and 0.95, weight decay 0.1)",
            "dgc": {"sparsity": [0.75, 0.999]},
        },
    }
    return api.Run.of(0, told)


def results(
    *,
    emulated: bool = True,
    failed: dict[str, str] | None = None,
    tune: bool = False,
    **line: str | None,
) -> api.Results:
    typed: dict[str, Any] = {
        "link": "100mbit",
        "latency": "0ms",
        "strategies": ["dense", "dgc"],
        "steps": 20,
    } | line
    rest: dict[str, Any] = {
        "workers": 2,
        "seconds": None,
        "size": "tiny",
        "text": None,
        "batch": 2,
        "seed": 0,
    }
    settings = api.Settings.check(**typed, **rest, out=Path("out"), lr=None, tune=tune)
    runs = [run("dense", [5.0, 4.0, 3.0], 1.0, 4000), run("dgc", [5.0, 4.5, 3.5], 0.3, 10)]
    if not emulated:
        for one in runs:
            one.kernel_sent_bytes_per_step = None
    ledger = api.Ledger(
        runs=runs,
        settings=settings,
        corpus=api.Corpus(b"train", b"valid", b"held", 1, "a <test>"),
        machine={"cores": 2},
        emulated=emulated,
        reason=None if emulated else "needs root",
        failures=[api.Failure(**failed)] if failed else [],
        started_s=0.0,
        common={"ramp_steps": 20},
    )
    return ledger.results()


def test_derived_figures() -> None:
    measured = results()
    dense, dgc = measured.strategies
    assert measured.common_loss == 3.5
    assert (dense.final_loss, dgc.final_loss) == (3.0, 3.5)
    assert dense.seconds_to_common_loss == pytest.approx(15.0)  # half-way between 10 s and 20 s
    assert dgc.seconds_to_common_loss == pytest.approx(6.0)
    assert dense.bytes_to_common_loss == pytest.approx(60_000)
    assert measured.dense_loss == 3.0
    assert (dense.seconds_to_dense_loss, dense.bytes_to_dense_loss) == (20.0, 80_000)
    assert dgc.seconds_to_dense_loss is dgc.bytes_to_dense_loss is None
    assert dense.ratio_to_dense == 1.0  # 2 (W - 1) / W = 1 for two workers, four bytes each
    assert dgc.ratio_to_dense == 400.0
    assert dense.exchange_share == 0.75
    assert dgc.exchange_share == pytest.approx(1 - 0.25 / 0.3)


def test_a_loss_that_is_never_reached_has_no_time() -> None:
    points = [(0.0, 5.0), (1.0, 4.0), (2.0, 4.5)]
    assert api.first_reached(points, 3.9) is None
    assert api.first_reached(points, 4.25) == pytest.approx(0.75)
    assert api.first_reached(points, 6.0) == 0.0


def test_every_key_is_described_and_every_description_has_its_key() -> None:
    measured = results(emulated=False).to_dict()
    described = {re.sub(r".*\.|\[\]", "", key) for key in api.KEYS}
    for key in measured.keys() - {"thinwire", "started", "keys"}:
        assert key in described
    for entry in measured["strategies"]:
        raw = {
            *("strategy", "steps", "parameters", "gradient_bytes", "steady_from_step", "summary"),
            "bytes_to_common_loss",
        }
        assert entry.keys() - raw <= described
        assert described - set(measured) <= entry.keys() | {"strategies", "seconds_on_asked_link"}


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    write(results(), tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(
        json.dumps(results().to_dict())
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted([api.BEST, "report.html", "results.json"])


def columns(measured: api.Results) -> dict[str, api.Column]:
    return {column.label: column for column in (*api.summary(measured), *api.further(measured))}


def test_columns_that_were_not_measured_are_not_shown() -> None:
    emulated, local = columns(results()), columns(results(emulated=False))
    assert emulated["bytes per worker and step, by the kernel, B"].texts == ("4,200", "10")
    assert "bytes per worker and step, by the kernel, B" not in local
    assert "training time on the requested link, s" not in emulated
    # 20 steps of 4000 bytes at 100 Mbit/s are 6.4 ms
    assert local["training time on the requested link, s"].texts == ("20.0", "6.0")


def test_a_column_has_one_unit_and_one_precision_and_marks_its_best() -> None:
    found = columns(results())
    loss = found["loss"]
    assert (loss.texts, loss.best) == (("3.000", "3.500"), {0})
    assert found["time to dense's loss (3.000), s"].texts == ("20.0", "-")
    assert found["time to the common loss (3.500), s"].texts == ("15.0", "6.0")
    # the last of that name; in the smallest unit that a number in it needs
    assert found["bytes per worker to that loss, B"].texts == ("60,000", "200")
    assert found["times fewer"].best == {1}
    assert found["waits, %"].texts == ("75", "17")
    by_time = results()
    by_time.settings = {**by_time.settings, "seconds": 20.0}
    by_time.strategies[1].steps += 5
    for same_work in (found["compute-only step, ms"], found["steps"], columns(by_time)["steps"]):
        assert same_work.best == set()


def test_small_losses_are_distinguished() -> None:
    measured = results()
    for entry, loss in zip(measured.strategies, (0.00212, 0.00231), strict=True):
        entry.final_loss = loss
    found = columns(replace(measured, dense_loss=0.00212))
    assert (found["loss"].texts, found["loss"].best) == (("0.00212", "0.00231"), {0})
    assert "time to dense's loss (0.00212), s" in found
    texts = [api.loss_text(loss) for loss in (12.5, 0.125, 0.044512, 4.2e-5, 0.0, -0.0213)]
    assert texts == ["12.500", "0.125", "0.0445", "0.0000420", "0.000", "-0.0213"]


def test_the_loss_that_all_reached_is_shown_where_it_says_something() -> None:
    label = "time to the common loss (3.500), s"
    measured = results()
    assert label in columns(measured)
    assert label not in columns(
        replace(measured, strategies=measured.strategies[1:], dense_loss=None)
    )
    reached = [replace(run, seconds_to_dense_loss=1.0) for run in measured.strategies]
    assert label not in columns(replace(measured, strategies=reached))


def test_command_prints_verdict_and_a_narrow_table(capsys: pytest.CaptureFixture[str]) -> None:
    measured = results(failed={"strategy": "powersgd", "error": "it [broke]"})
    long = [
        replace(run, strategy=run.strategy + "-with-a-long-name" * 2) for run in measured.strategies
    ]
    for strategies in (measured.strategies, long):
        api.print_table(replace(measured, strategies=strategies))
        printed = capsys.readouterr().out
        assert " ".join(printed.split()).startswith(measured.verdict)
        assert max(map(len, printed.splitlines())) <= 80
        assert printed.count("─ \n") == 1
        assert "powersgd failed: it [broke]" in printed
    first, second = zip(*(column.texts for column in api.summary(measured)), strict=True)
    assert first == ("3.000", "20.0", "1,000", "75", "4,000", "1.0", "5.1")
    assert second == ("3.500", "-", "300", "17", "10", "400.0", "5.1")
    api.print_table(measured, every=True)
    printed = capsys.readouterr().out
    figures = api.further(measured)
    assert all(column.label in printed for column in figures)
    assert {column.label for column in figures}.isdisjoint(
        column.label for column in api.summary(measured)
    )


def test_the_report_needs_nothing_else() -> None:
    page = render(results())
    assert not re.search(r"\b(src|href)=.?[^#\"']|<(link|img|iframe|object|base)\b", page)
    assert not re.search(r"http|@import|url\(", page)
    assert len(page) < 100_000


def test_report_has_commands_to_repeat_and_to_use_the_winner(tmp_path: Path) -> None:
    measured = results()
    assert measured.command == (
        "thinwire compare --workers 2 --link 100mbit --strategies dense dgc --steps 20 --size tiny "
        "--batch 2"
    )
    measured.winner = "dgc"
    page = render(measured)
    assert measured.command in page
    assert "sparsity: [0.75, 0.9375, 0.984375, 0.996, 0.999]" in page
    write(measured, tmp_path)
    strategy = api.DistributedStrategy.load(tmp_path / api.BEST)
    assert strategy.dgc == api.DGC(
        rampup_step=20, sparsity=(0.75, 0.9375, 0.984375, 0.996, 0.999), value_bits=1
    )
    text = (tmp_path / api.BEST).read_text()
    assert "# It trained with AdamW (betas 0.9 and 0.95, weight decay 0.1) and a peak " in text
    measured.winner = None
    write(measured, tmp_path)
    assert not (tmp_path / api.BEST).exists(), "a file of an earlier winner would mislead"
    (tmp_path / api.BEST).write_text("dgc: {}\n")  # not ours
    write(measured, tmp_path)
    assert (tmp_path / api.BEST).exists()


@pytest.mark.parametrize("name", api.STRATEGIES)
def test_every_strategy_can_be_used_in_another_folder(name: str) -> None:
    recipe = api.STRATEGIES[name]
    document = recipe.document(20)
    if document is None:
        assert recipe.code is not None
        compile(recipe.code, name, "exec")
    else:
        fields = api.DistributedStrategy.from_dict(document).on
        assert list(fields) == (
            [recipe.field] if recipe.field else list(recipe.options.get("document", {}))
        )


def test_the_report_says_first_that_nothing_was_emulated() -> None:
    page = render(results(emulated=False))
    body = re.sub(r"<[^>]*>", "", page[page.index("<body>") :]).strip()
    assert body.startswith("By an estimate for a link of 100mbit, which was NOT emulated, ")
    assert "The link of 100mbit was NOT emulated (needs root)" in body.split("Result")[0]


def test_losses_that_settings_were_chosen_by_are_named_as_such() -> None:
    assert "on the validation part" in results(tune=True).headline
    assert "on the validation part" in results(tune=True, emulated=False).headline


def test_the_report_names_a_failure() -> None:
    page = render(results(failed={"strategy": "powersgd", "error": "it <broke>"}))
    assert "a &lt;test&gt;" in page
    assert "failed: it &lt;broke&gt;" in page
    assert "powersgd failed and is excluded." in page


def test_links_are_described_as_asked() -> None:
    home = results(link=None, up="10mbit", down="100mbit")
    assert home.link.rate_bit_s == 1e7, "an estimate counts the slower direction"
    assert "--up 10mbit --down 100mbit" in home.command
    assert "10mbit up and 100mbit down" in home.headline


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A folder for reports may be one where others can write."""
    measured, other = results(), tmp_path / "other"
    other.write_text("as it was")
    for name in ("results.json", "report.html", api.BEST):
        for planted in (name, f"{name}.tmp"):
            (tmp_path / planted).symlink_to(other)
    measured.winner = "dgc"
    write(measured, tmp_path)
    assert other.read_text() == "as it was"
    assert json.loads((tmp_path / "results.json").read_text())
    assert not any((tmp_path / name).is_symlink() for name in ("results.json", "report.html"))
