"""Cost of starting: import, compilation, and first step with compiled or cached loops.

    python -m benchmarks.startup --out benchmarks/results/startup.json
    python -m benchmarks.startup --quick

Every figure is from a fresh process, so nothing is warm but the disk. *Empty* is numba's cache in a
new folder, *warm* the same folder in later processes, *torch* the same step without numba
(THINWIRE_KERNELS=reference). Processor seconds of compiling hold what numba needs for itself, but
not its import; those of a loop do not hold the loops it calls.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.common import markdown, parser_for, save, surroundings

IMPORTS = """
import json, sys, time
begin = time.perf_counter()
import torch
torch_s = time.perf_counter() - begin
begin = time.perf_counter()
import thinwire
import thinwire.kernels
added_s = time.perf_counter() - begin
begin = time.perf_counter()
import thinwire.optim
optim_s = time.perf_counter() - begin
found = {"torch": torch_s, "thinwire": added_s, "optim": optim_s}
print(json.dumps({**found, "numba": "numba" in sys.modules}))
"""
STEPS = """
import json, sys, time
import torch
from thinwire import optim
params = [torch.nn.Parameter(torch.randn(100_000)) for _ in range(4)]
for param in params:
    param.grad = torch.randn(100_000)
begin = time.perf_counter()
optimizer = MAKE
made = time.perf_counter() - begin
seconds = []
for _ in range(2):
    begin = time.perf_counter()
    optimizer.step()
    seconds.append(time.perf_counter() - begin)
modules = list(sys.modules.items())
modules = [module for name, module in modules if name.startswith("thinwire.kernels")]
values = [value for module in modules for value in vars(module).values()]
functions = {value for value in values if hasattr(value, "stats")}
compiled = sum(sum(function.stats.cache_misses.values()) for function in functions)
print(json.dumps({"made": made, "first": seconds[0], "second": seconds[1], "compiled": compiled}))
"""
COMPILING = """
import collections, json, time
import numba
import torch
from numba.core import event
from thinwire import optim
from thinwire.core.feedback import compile_loops

class Own(event.Listener):
    def __init__(self):
        self.begun, self.seconds = [], collections.Counter()
    def on_start(self, event):
        self.begun.append([time.thread_time(), 0.0])
    def on_end(self, event):
        begin, inner = self.begun.pop()
        took, function = time.thread_time() - begin, event.data["dispatcher"].py_func
        if self.begun:
            self.begun[-1][1] += took
        module = function.__module__.rpartition(".")[2]
        self.seconds[f"{module}.{function.__name__}"] += took - inner

own = Own()
event.register("numba:compile", own)
cpu = time.process_time()
begin = time.perf_counter()
params = [torch.nn.Parameter(torch.zeros(1))]
WORK
wall = time.perf_counter() - begin
cpu = time.process_time() - cpu
each = dict(own.seconds.most_common(5))
print(json.dumps({"wall": wall, "cpu": cpu, "loops": len(own.seconds), "each": each}))
"""
WORKS = {
    "DGC, one bit a value": "compile_loops(params)",
    "DGC, state in bfloat16": "compile_loops(params, 'bfloat16')",
    "LAMB": "optim.Lamb(params).compile_loops()",
    "LARS": "optim.Lars(params, lr=0.1).compile_loops()",
}
OPTIMIZERS = {
    "DGCMomentum": "optim.DGCMomentum(params, lr=0.1, sparsity=(0.99,))",
    "Lamb": "optim.Lamb(params)",
}


def in_a_process(code: str, **environment: str) -> dict[str, Any]:
    command, surrounding = [sys.executable, "-c", code], {**os.environ, **environment}
    done = subprocess.run(command, env=surrounding, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"a process that was to be measured failed:\n{done.stderr}")
    return dict(json.loads(done.stdout))


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def compiling(work: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return in_a_process(COMPILING.replace("WORK", work), NUMBA_CACHE_DIR=folder)


def measure(repeats: int, works: int, optimizers: int) -> dict[str, Any]:
    in_a_process(IMPORTS)  # byte code is compiled and the files are in memory
    imports = medians([in_a_process(IMPORTS) for _ in range(repeats)])
    rows = []
    for name, make in list(OPTIMIZERS.items())[:optimizers]:
        code = STEPS.replace("MAKE", make)
        with tempfile.TemporaryDirectory() as folder:
            kinds = {
                "empty": [in_a_process(code, NUMBA_CACHE_DIR=folder)],
                "warm": [in_a_process(code, NUMBA_CACHE_DIR=folder) for _ in range(repeats)],
                "torch": [in_a_process(code, THINWIRE_KERNELS="reference") for _ in range(repeats)],
            }
        rows += [
            {"optimizer": name, "cache": kind, **medians(runs)} for kind, runs in kinds.items()
        ]
    compiled = [
        {"work": name, **compiling(arguments)} for name, arguments in list(WORKS.items())[:works]
    ]
    return {"imports_s": imports, "compiling_s": compiled, "steps_s": rows}


def printed(result: dict[str, Any]) -> str:
    imports = result["imports_s"]
    loaded = "numba is imported too" if imports["numba"] else "numba is not imported"
    lines = [
        f"`import torch` takes {imports['torch']:.2f} s, `import thinwire, thinwire.kernels` "
        f"after it {1e3 * imports['thinwire']:.0f} ms more and `thinwire.optim` "
        f"{1e3 * imports['optim']:.0f} ms; {loaded}.",
        "",
        "Compiling with an empty cache, once per machine:",
        "",
    ]
    titles = ["for", "processor, s", "wall, s", "loops", "the dearest, processor s"]
    rows = []
    for row in result["compiling_s"]:
        dearest = ", ".join(f"`{name}` {seconds:.2f}" for name, seconds in row["each"].items())
        times = f"{row['cpu']:.1f}", f"{row['wall']:.1f}"
        rows.append([row["work"], *times, row["loops"], dearest])
    lines += [*markdown(titles, rows), ""]
    titles = ["optimizer", "cache", "construction, s", "first step, ms", "second step, ms"]
    rows = []
    for row in result["steps_s"]:
        steps = f"{1e3 * row['first']:.1f}", f"{1e3 * row['second']:.2f}"
        cells = [f"{row['made']:.2f}", *steps, f"{row['compiled']:.0f}"]
        rows.append([row["optimizer"], row["cache"], *cells])
    return "\n".join(lines + markdown([*titles, "compiled functions"], rows))


def main() -> None:
    arguments = parser_for(__doc__).parse_args()
    if arguments.threads:
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    repeats, works, optimizers = min(arguments.repeats, 5), len(WORKS), len(OPTIMIZERS)
    if arguments.quick:
        repeats = works = optimizers = 1
    result = {**surroundings(repeats), **measure(repeats, works, optimizers)}
    print(printed(result))
    save(result, arguments.out)


if __name__ == "__main__":
    main()
