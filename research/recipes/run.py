"""Scripts in the manner of public ones, before and after their diff to thinwire.

python -m research.recipes.run                    # all, two ranks at 20 Mbit/s; the table
python -m research.recipes.run nanogpt titan      # some of them

`--lines` prints how many lines change, `--link loopback` needs neither root nor pyroute2.

Each script of `RECIPES` is examples/recipes/NAME.py, its change NAME.diff. Two ranks train it in
networks of their own, as `thinwire compare` makes them. The loss is of held-out data after the last
step; the bytes are what rank 0 has sent, with all headers. Needs root, pyroute2 and the packages of
the scripts: .venv-integrations/bin/python -m research.recipes.run.
"""

import difflib
import json
import re
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import bare_parser, markdown
from benchmarks.ranks import run_on_ranks
from thinwire.tools.network.netns import Link, Network, network

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"
RESULTS = Path(__file__).with_suffix(".json")
RANKS, TIMEOUT_S = 2, 560.0


class Recipe(NamedTuple):
    """What a script is like, and the package that it needs."""

    title: str
    package: str | None = None


RECIPES = {
    "nanogpt": Recipe("nanoGPT"),
    "nanochat": Recipe("nanochat, its Muon replaced"),
    "timm_train": Recipe("timm", "sklearn"),
    "titan": Recipe("torchtitan, FSDP2 with `mesh=`"),
    "run_clm": Recipe("Transformers' Trainer", "transformers"),
    "run_clm_no_trainer": Recipe("Accelerate", "transformers"),
    "lightning_fit": Recipe("Lightning's Trainer", "lightning"),
    "fabric_loop": Recipe("Fabric", "lightning"),
    "peft_lora": Recipe("PEFT", "peft"),
}


def before(name: str) -> str:
    """Return the text of a script."""
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def after(name: str) -> str:
    """Return the text of a script with its diff applied; each hunk must fit exactly one place."""
    text = before(name)
    diff = (FOLDER / f"{name}.diff").read_text(encoding="utf-8")
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        old, new = (
            "".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +")
        )
        if text.count(old) != 1:
            raise ValueError(f"{name}.diff fits {text.count(old)} places of {name}.py:\n{old}")
        text = text.replace(old, new)
    return text


def changed_lines(name: str) -> int:
    """Count changed lines that are not blank: of each place the more of those before and after."""
    old, new = before(name).splitlines(), after(name).splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return sum(
        max(sum(bool(line.strip()) for line in part) for part in (old[i1:i2], new[j1:j2]))
        for kind, i1, i2, j1, j2 in matcher.get_opcodes()
        if kind != "equal"
    )


def held_out_loss(text: str, net: Network | None = None) -> float:
    """Train a script on two ranks, and return the loss that rank 0 prints last.

    Args:
        text: The script.
        net: The networks that the ranks run in; None for this machine's.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(text, encoding="utf-8")
        command = [sys.executable, str(script)]
        printed = run_on_ranks(command, RANKS, TIMEOUT_S, net=net, paths=[FOLDER])
    return float(re.findall(r"val loss ([\d.]+)", printed[0])[-1])


def measured(name: str, rate: str) -> dict[str, object]:
    """Return a row of the table."""
    row: dict[str, object] = {"recipe": name, "changed_lines": changed_lines(name), "link": rate}
    for when, text in (("before", before(name)), ("after", after(name))):
        begin_s = time.monotonic()
        line: AbstractContextManager[Network | None]
        line = nullcontext() if rate == "loopback" else network(RANKS, Link.parse(rate))
        with line as net:
            row[when] = {
                "loss": held_out_loss(text, net),
                "bytes": net.bytes_sent()[0] if net else None,
                "seconds": round(time.monotonic() - begin_s, 1),
            }
    return row


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of the documents."""
    found = []
    for name, recipe in RECIPES.items():
        for row in rows:
            if row["recipe"] == name:
                old, new = row["before"], row["after"]
                cells = [f"{recipe.title}, `{name}`", row["changed_lines"]]
                cells.append(f"{old['loss']:.2f}, {new['loss']:.2f}")
                cells.append(f"{old['bytes'] / 1e6:.1f}, {new['bytes'] / 1e6:.2f}")
                found.append(cells)
    return markdown(["recipe", "changed lines", "loss", "MB"], found)


def main() -> None:
    """Measure, keep the rows, and print the table."""
    parser = bare_parser(__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(RECIPES))
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--link", default="20mbit")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if unknown := set(given.names).difference(RECIPES):
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(RECIPES)}")
    if given.lines:
        print(json.dumps({name: changed_lines(name) for name in RECIPES}))
        return
    rows = {}
    if given.results.exists():
        rows = {row["recipe"]: row for row in json.loads(given.results.read_text())}
    for name in given.names or RECIPES:
        rows[name] = measured(name, given.link)
        print(rows[name], flush=True)
        given.results.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    if given.results == RESULTS:
        print("\n".join(table(list(rows.values()))))


if __name__ == "__main__":
    main()
