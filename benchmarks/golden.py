"""Bits and bytes of twelve steps of every method through every frontend, to compare a change with.

    python -m benchmarks.golden write FILE     # before a change
    python -m benchmarks.golden compare FILE   # after it, on the same machine

Bits depend on the processor, so a file is good for one kind of machine and is not kept with the
sources. `compare` ends with status 1 and one line for each training whose bits or bytes differ.
The trainings are those of the laws: `python -m tests.laws.answers` makes them.
"""

import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Write what is measured, or compare it."""
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "compare"):
        sys.exit(str(__doc__))
    file = Path(sys.argv[2])
    command = [sys.executable, "-m", "tests.laws.answers"]
    answers = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    if sys.argv[1] == "write":
        file.write_text(answers)
        return
    before, now = json.loads(file.read_text()), json.loads(answers)
    wrong = [name for name in before if before[name] != now.get(name)]
    for name in wrong:
        print(f"{name}: before {before[name]}, now {now.get(name)}")
    print(f"{len(before) - len(wrong)} of {len(before)} as before")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
