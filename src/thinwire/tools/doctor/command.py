"""`thinwire doctor`: the arguments are checked before torch is loaded."""

import json as json_format
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from thinwire._launched import environment_rank
from thinwire.tools.doctor.local_checks import (
    Finding,
    as_text,
    document,
    has_remote_ranks,
    machine_findings,
    meeting_point,
    one_wait_s,
    status_of,
)

EXAMPLES = """Examples:

thinwire doctor

torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -m thinwire doctor

(and the same with --node-rank 1 on the other machine)
"""
_SHORTEST_S, _LONGEST_S = 15.0, 600.0
_WIDTH = 100


def doctor(*, timeout: float = 30.0, json: bool = False, quiet: bool = False) -> None:
    """Find network problems between machines, with a remedy for each.

    Checks addresses, interfaces, listeners, connections of all pairs, MTU, clocks and versions. Run
    alone, it checks this machine. Started by torchrun, all ranks check the network between them and
    rank 0 prints the findings. The exit status is 1 if something is wrong. docs/machines.md has
    recipes.

    Args:
        timeout: Seconds for all checks together, from 15 to 600.
        json: Print the findings as JSON.
        quiet: Print only problems, and show no progress.
    """
    begun = time.monotonic()
    if not _SHORTEST_S <= timeout <= _LONGEST_S:
        raise ValueError(f"timeout={timeout:g} is out of range; 15 to 600 seconds are allowed")
    launched = environment_rank(os.environ)
    speaks = launched is None or launched[0] == 0
    stdout = sys.stdout if launched is None else _without_gloo()

    def report(title: str, findings: tuple[Finding, ...]) -> None:
        line.stop()
        out = stdout if speaks else sys.stderr
        if json and out is stdout:
            data = document(title, findings, time.monotonic() - begun)
            print(json_format.dumps(data, indent=1), file=out, flush=True)
            return
        columns = shutil.get_terminal_size((_WIDTH, 0)).columns
        text = as_text(findings, quiet=quiet, width=min(columns, _WIDTH))
        for part in (text,) if quiet else (title, text):
            if part:
                print(part, file=out, flush=True)

    from rich.console import Console

    # a line on a terminal that says what comes next, until findings are printed
    with Console(stderr=True, quiet=quiet or not speaks).status("loading torch") as line:
        if launched is None:
            sys.exit(_alone(timeout, report))
        from thinwire.tools.doctor.ranks import Examination

        status = Examination(*launched, begun, timeout, line.update, report).run()
    # a thread that torch does not let go of would keep the interpreter from ending
    sys.stdout.flush()
    os._exit(status)


def _without_gloo() -> TextIO:
    """Return standard output, and let what gloo writes there under torch 2.9 go to the error."""
    sys.stdout.flush()
    apart = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return apart


def _alone(timeout: float, report: Callable[[str, tuple[Finding, ...]], None]) -> int:
    from thinwire.tools.doctor.machine import Machine

    machine = Machine.look()
    own = machine.addresses
    findings = (
        *machine_findings(machine, others=has_remote_ranks(os.environ.get("MASTER_ADDR", ""), own)),
        meeting_point(os.environ, own, one_wait_s(timeout), started=False),
    )
    report("this machine alone; started by torchrun, all ranks look at what is between", findings)
    return status_of(findings)
