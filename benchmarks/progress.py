"""Progress per step of each method, from the lines of `benchmarks.evidence`.

python -m benchmarks.progress            # prints what was measured
python -m benchmarks.progress --write    # into src/thinwire/tools/planning/progress.json

A step of a method that ends at dense's last loss or below is worth one of dense: what is below is
chance, with the same optimizer. Of any other it is worth the steps after which dense has the loss
that the method ends with, over all steps. From runs with equal steps, each at the rate that its
tuning chose. What was not measured keeps its prior (results/priors.json), scaled like the nearest
setting of the same method that was.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.choosing import evidence
from benchmarks.evidence import RESULTS, STEPS
from thinwire.tools.compare.record import first_reached
from thinwire.tools.compare.strategies import STRATEGIES
from thinwire.tools.planning.grid import LEFT_OUT

PRIORS = Path(__file__).parent / "results" / "priors.json"
PROGRESS = (
    Path(__file__).parent.parent / "src" / "thinwire" / "tools" / "planning" / "progress.json"
)
PRIOR = "a prior from published runs"
RELATIVES = {
    "low-rank": "powersgd",
    "localsgd": "quantized-local",
    "sparse-local": "quantized-local",
    "diloco": "quantized-local",
}
"""Methods whose prior is scaled like that of another one until they are measured themselves: the
same algorithm, or local steps of the same optimizer.
"""
_TOO_SMALL = ("tiny",)
"""Models of which a method leaves most tensors as they are."""
_OUTER = ("outer_lr", "outer_momentum")
Line = Mapping[str, Any]
Curve = Sequence[tuple[int, float]]


def measured(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """One entry for each method and setting whose loss was measured beside that of dense training
    with the same optimizer.

    Held-out runs of several seeds where there are, else the best run of the tuning.
    """
    by_setting: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        cell = line["cell"]
        if (
            cell["kind"] != "link"
            and cell["steps"] == STEPS
            and cell["size"] not in _TOO_SMALL
            and line.get("loss") is not None
        ):
            setting = {key: cell[key] for key in ("workers", "size", "options", "optimizer")}
            setting["method"] = _method(cell)
            by_setting[json.dumps(setting, sort_keys=True)].append(line)
    runs = {key: _best(of_setting) for key, of_setting in by_setting.items()}
    found = []
    for key, kinds in runs.items():
        setting = json.loads(key)
        if setting["method"] in ("dense", *LEFT_OUT):
            continue
        if setting["optimizer"] != (STRATEGIES[setting["method"]].optimizer or "adamw"):
            continue  # the planner knows every method with one optimizer
        options = STRATEGIES[setting["method"]].options
        if ("sent" in _settings(options)) != ("sent" in _settings(setting["options"])):
            continue  # what that strategy was before it compressed otherwise
        if any(options.get(key) != setting["options"].get(key) for key in _OUTER):
            continue  # another outer step
        name = "dense-muon" if setting["optimizer"] == "muon" else "dense"
        yardstick = {"method": name, "options": {}}
        dense = runs.get(json.dumps({**setting, **yardstick}, sort_keys=True), {})
        for kind in ("training", "tuning"):
            if kind in kinds and kind in dense:
                found.append(_entry(setting, kind, kinds[kind], dense[kind]))
                break
    return found


def _method(cell: Mapping[str, Any]) -> str:
    """Return the strategy of the command to which a cell belongs."""
    compression = cell["options"].get("compression") or {}
    if cell["optimizer"] == "adamw" and "quantized" in compression:
        return "quantized-local"
    return str(cell["strategy"])


def _best(lines: Sequence[Line]) -> dict[str, list[Line]]:
    kinds: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        kinds[line["cell"]["kind"]].append(line)
    if "tuning" in kinds:
        kinds["tuning"] = [min(kinds["tuning"], key=lambda line: float(line["loss"]))]
    return dict(kinds)


def _entry(
    setting: Mapping[str, Any], kind: str, own: Sequence[Line], dense: Sequence[Line]
) -> dict[str, Any]:
    seeds = {line["cell"]["seed"] for line in own} & {line["cell"]["seed"] for line in dense}
    own = [line for line in own if line["cell"]["seed"] in seeds]
    dense = [line for line in dense if line["cell"]["seed"] in seeds]
    settings = _settings(setting["options"])
    shares = [
        _share(one["losses"], beside["losses"])
        for one in own
        for beside in dense
        if one["cell"]["seed"] == beside["cell"]["seed"]
    ]
    seeds_text = f"{len(shares)} seed{'s' * (len(shares) > 1)}"
    part = f"held-out part, {seeds_text}" if kind == "training" else "validation part"
    return {
        "method": setting["method"],
        "workers": setting["workers"],
        **settings,
        "progress": round(fmean(shares), 3),
        "source": f"benchmarks/results/evidence.jsonl: {setting['size']} model, {STEPS:,} steps, "
        f"{setting['workers']} ranks, {part}, over dense with the same optimizer",
    }


def _share(own: Curve, dense: Curve) -> float:
    if own[-1][1] <= dense[-1][1]:  # with the same optimizer: seeds differ by more than that
        return 1.0
    there = first_reached(dense, own[-1][1])
    return 0.01 if there is None else there / STEPS


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    own: Mapping[str, Any] = next(iter((options.get("compression") or {}).values()), {})
    found: dict[str, Any] = {"k_steps": options.get("k_steps", 1)}
    if "sparsity" in own:
        found["sent"] = round(1 - own["sparsity"], 6)
    if "value_bits" in own:
        found["value_bits"] = own["value_bits"]
    if options.get("delay"):
        found["delay"] = options["delay"]
    return found


def merged(priors: Sequence[Mapping[str, Any]], new: Sequence[dict[str, Any]]) -> list[Any]:
    """The priors, scaled where their method was measured, and all that was measured."""
    found: list[dict[str, Any]] = []
    in_time = [run for run in new if "delay" not in run]
    for prior in priors:
        beside_it = [run for run in in_time if run["workers"] == prior["workers"]]
        own = [run for run in beside_it if run["method"] == prior["method"]]
        if any(_setting(prior).items() <= _setting(run).items() for run in own):
            continue
        relative = RELATIVES.get(prior["method"])
        runs = own or [run for run in beside_it if run["method"] == relative]
        scale, source = 1.0, f"{PRIOR}, not measured here"
        if runs:
            run = min(runs, key=lambda run: abs(log(run["k_steps"] / prior["k_steps"])))
            of_run = [prior for prior in priors if prior["method"] == run["method"]]
            beside = min(of_run, key=lambda prior: abs(log(prior["k_steps"] / run["k_steps"])))
            scale = run["progress"] / beside["progress"]
            source = f"{PRIOR}, scaled by {scale:.2f} as {run['method']} was at k_steps="
            source += f"{run['k_steps']} in benchmarks/results/evidence.jsonl"
        found.append({**prior, "progress": round(prior["progress"] * scale, 3), "source": source})
    return [*found, *new]


def _setting(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in ("progress", "source")}


def main() -> None:
    """Print what was measured, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    new = measured(evidence(arguments.results))
    if not arguments.write:
        for entry in new:
            print(json.dumps(entry))
        return
    entries = merged(json.loads(PRIORS.read_text()), new)
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    PROGRESS.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
