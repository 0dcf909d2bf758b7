"""Messages, strategies, times and waits on one GPU, from a source tree, in some minutes.

python -m benchmarks.gpu                      # about nine minutes on one GPU
python -m benchmarks.gpu --device cpu --only kernels strategies waits
python -m benchmarks.gpu table FILE           # Markdown of the results

Nothing has to be installed but torch, numpy, numba, safetensors and PyYAML. Parts: "kernels" makes
and reads messages by torch operations on the device, and compares their bits with those of the
CPU's kernels; "strategies" trains two ranks on the one device over gloo, by every method, and
compares the losses with those on the CPU; "steps" times a transformer in bfloat16 beside torch's
DDP; "averaging" takes one apart for models of 124 million parameters and more, with state on the
device and on the host; "waits" counts where the host waits for the device, and trains a compiled
model, a CUDA graph and in a stream. A part that its share of the minutes is too short for says so,
beside what it has found until then. Results are JSON. The status is 1 if a part failed, or has
found nothing.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))  # thinwire need not be installed

from benchmarks.common import bare_parser, markdown, save  # noqa: E402
from benchmarks.ranks import RanksFailed, RanksLate, run_on_ranks  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "gpu.json"
PARTS = ("kernels", "strategies", "steps", "averaging", "waits")
RANKS = 2
SHARES = {"kernels": 0.2, "strategies": 0.2, "steps": 0.25, "averaging": 0.2, "waits": 0.15}
"""Of the minutes, the most that a part may take; what one leaves is for those after it."""
SIZE: dict[str, dict[str, tuple[str, ...]]] = {
    "steps": {"cuda": ("124M", "8"), "cpu": ("0.14M", "4")},
    "averaging": {"cuda": ("124M", "350M", "1B"), "cpu": ("0.14M",)},
}
"""By part and device: a model and its sequences a step and rank; models."""
COUNTED = {"kernels": "codes", "strategies": "methods"}
"""The rows of a part."""


class PartFailed(Exception):
    """What a part printed before it failed."""


def _nothing(limit_s: float) -> str:
    return f"nothing was finished in {limit_s:.0f} s: give more --minutes"


def on_ranks(part: str, device: str, limit_s: float) -> dict[str, Any]:
    """What rank 0 of a part found; all ranks are ended where one fails or the limit is over."""
    options = SIZE[part][device] if part in SIZE else ()
    command = [sys.executable, "-m", "benchmarks.gpu_run", part, device, *options]
    reason = ""
    try:
        printed = run_on_ranks(command, RANKS, limit_s, paths=[ROOT / "src", ROOT])
    except RanksLate as late:
        printed = late.printed
    except RanksFailed as failed:
        printed, reason = failed.printed, str(failed)
    lines = [line for line in printed[0].splitlines() if line.startswith('{"')]
    if not lines:
        raise PartFailed(reason or _nothing(limit_s))
    found: dict[str, Any] = {"ended": False, **json.loads(lines[-1])}
    if reason:
        return {**found, "passed": False, "printed": reason}
    found["passed"] = all(row.get("passed", True) for row in found["rows"]) and all(
        check in ("passed", "needs a GPU") for check in found.get("checks", {}).values()
    )
    return found


def measured(device: str, minutes: float, parts: list[str]) -> dict[str, Any]:
    """The results of the parts, each with its seconds; of one that failed what it printed."""
    begin_s = time.monotonic()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
    }
    for index, part in enumerate(parts):
        left_s = 60 * minutes - (time.monotonic() - begin_s)
        limit_s = left_s * SHARES[part] / sum(SHARES[each] for each in parts[index:])
        if left_s < 10:
            found[part] = {"passed": True, "left out": "no time was left"}
            continue
        part_s = time.monotonic()
        try:
            result = on_ranks(part, device, limit_s)
        except PartFailed as error:
            result = {"passed": False, "printed": str(error)}
        found[part] = {**result, "seconds": round(time.monotonic() - part_s, 1)}
        print(f"{part}: {'passed' if result['passed'] else 'FAILED'}", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, Any]) -> str:
    """Markdown of the results, for `docs/cuda.md`."""
    parts = []
    for part in PARTS:
        if part in found:
            result = found[part]
            outcome = "passed" if result["passed"] else "failed"
            if part in ("kernels", "strategies") and "rows" in result:
                outcome += f", {len(result['rows'])} {COUNTED[part]}"
            if not result.get("ended", True):
                outcome += f"; not finished in {result['seconds']:.0f} s"
            parts.append((part, result.get("left out", outcome)))
    about = f"{found['device']}, torch {found['torch']}, {found['date']}: `{found['command']}`"
    lines = [about, "", *markdown(["part", "result"], parts)]
    if rows := found.get("steps", {}).get("rows"):
        shown = []
        for row in rows:
            peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f} GB"
            cells = row["method"], f"{row['step_s']:.3f}", f"{row['exposed']:.0%}", peak
            shown.append(cells)
        lines += ["", *markdown(["a step", "s", "exposed", "peak memory"], shown)]
    if rows := found.get("averaging", {}).get("rows"):
        heads = ["averaging", "state on", "seconds", "device_s", "wire_s", "host_s", "waits"]
        lines += [
            "",
            *markdown(heads, [[str(row.get(head, "-")) for head in heads] for row in rows]),
        ]
    if "rows" in (waits := found.get("waits", {})):
        counts = [
            (row["method"], ", ".join(map(str, row["waits in four steps"])))
            for row in waits["rows"]
        ]
        counts += waits.get("checks", {}).items()
        lines += ["", *markdown(["waits of the host in four steps", ""], counts)]
    return "\n".join(lines)


def main() -> int:
    parser = bare_parser(__doc__)
    parser.add_argument("action", nargs="?", choices=("run", "table"), default="run")
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS, help="of table")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=None, help=f"default: {RESULTS.name} for cuda")
    given = parser.parse_args()
    if given.action == "table":
        print(table(json.loads(given.file.read_text())))
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu runs what a CPU can")
    found = measured(given.device, given.minutes, given.only)
    out = given.out or (RESULTS if given.device == "cuda" else None)
    save(found, out)
    for part in given.only:
        if "printed" in found[part]:
            print(f"{part}: {found[part]['printed']}", file=sys.stderr)
    print(table(found))
    return int(not all(found[part]["passed"] for part in given.only))


if __name__ == "__main__":
    sys.exit(main())
