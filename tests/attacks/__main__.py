"""Repeat the attacks at random moments: `python -m tests.attacks [NAME ...] --out results.json`."""

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.attacks import ATTACKS
from tests.attacks.outcome import Attack, Outcome
from tests.ranks import Pool

VERDICTS = ("held", "silent", "false", "late", "crash", "skipped")


def once(attack: Attack, pool: Pool, seed: int) -> Outcome:
    try:
        return attack.make(pool, seed)
    except Exception as error:  # the campaign goes on; the table shows it
        return Outcome("crash", f"the attack itself failed: {type(error).__name__}: {error}")


def _fits(attack: Attack, name: str) -> bool:
    return name == attack.letter if len(name) == 1 else name in attack.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="letters, or parts of names; all without any")
    parser.add_argument("--times", type=int, help="at most so many of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="only the few that run as tests")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    chosen = [a for a in ATTACKS if not given.names or any(_fits(a, name) for name in given.names)]
    chosen = [a for a in chosen if a.quick or not given.quick]
    if given.list:
        print("\n".join(f"{a.letter}  {a.times:4}  {a.name}" for a in chosen))
        return 0
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # what the store says of itself fills pages
    rows, pool = [], Pool()
    print(
        f"{'':2} {'attack':48} {'made':>5} "
        + " ".join(f"{v:>7}" for v in VERDICTS)
        + "  updates  seconds"
    )
    try:
        for attack in chosen:
            times = min(attack.times, given.times or attack.times)
            begin_s = time.monotonic()
            outcomes = [once(attack, pool, 1000 * given.seed + n) for n in range(times)]
            counts = Counter(o.verdict for o in outcomes)
            found = [o.updates for o in outcomes if o.verdict == "held" and o.updates is not None]
            slowest = [o.seconds for o in outcomes if o.seconds is not None]
            rows.append({"letter": attack.letter, "attack": attack.name, "made": times, **counts,
                         "most_updates": max(found, default=None),
                         "most_seconds": max(slowest, default=None),
                         "took_s": round(time.monotonic() - begin_s, 1),
                         "outcomes": [asdict(o) for o in outcomes]})  # fmt: skip
            marks = (
                f"{max(found) if found else '-':>8} {f'{max(slowest):.1f}' if slowest else '-':>8}"
            )
            counted = " ".join(f"{counts[v] or '.':>7}" for v in VERDICTS)
            print(f"{attack.letter:2} {attack.name:48} {times:5} {counted} {marks}", flush=True)
            worst = next((o for o in outcomes if o.verdict not in ("held", "skipped")), None)
            if worst is not None:
                print(f"      {worst.verdict}: {worst.detail[:400]}", flush=True)
            if given.out is not None:
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps(rows, indent=1))
    finally:
        pool.close()
    total = Counter(o["verdict"] for row in rows for o in row["outcomes"])
    print(", ".join(f"{total[v]} {v}" for v in VERDICTS))
    return 0 if set(total) <= {"held", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
