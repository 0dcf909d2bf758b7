"""What starting costs: importing, and the first step of an optimizer while its loops are compiled or read from disk.

    python -m benchmarks.startup --out benchmarks/results/startup.json
    python -m benchmarks.startup --quick

Every figure is from a fresh process, so nothing is warm but the disk. *Empty* is numba's cache in a new folder, *warm*
the same folder in later processes, *torch* the same step without numba (THINWIRE_KERNELS=reference).
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.common import parser_for, save, surroundings

IMPORTS = """
import json, sys, time
begin = time.perf_counter()
import torch
torch_s = time.perf_counter() - begin
begin = time.perf_counter()
import thinwire
import thinwire.core.kernels
added_s = time.perf_counter() - begin
begin = time.perf_counter()
import thinwire.optim
optim_s = time.perf_counter() - begin
print(json.dumps({"torch": torch_s, "thinwire": added_s, "optim": optim_s, "numba": "numba" in sys.modules}))
"""
STEPS = """
import json, sys, time
import torch
from thinwire import optim
params = [torch.nn.Parameter(torch.randn(100_000)) for _ in range(4)]
for param in params:
    param.grad = torch.randn(100_000)
optimizer = MAKE
seconds = []
for _ in range(2):
    begin = time.perf_counter()
    optimizer.step()
    seconds.append(time.perf_counter() - begin)
modules = [module for name, module in list(sys.modules.items()) if name.startswith("thinwire.core.kernels")]
functions = {value for module in modules for value in vars(module).values() if hasattr(value, "stats")}
compiled = sum(sum(function.stats.cache_misses.values()) for function in functions)
print(json.dumps({"first": seconds[0], "second": seconds[1], "compiled": compiled}))
"""
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


def measure(repeats: int) -> dict[str, Any]:
    in_a_process(IMPORTS)  # byte code is compiled and the files are in memory
    imports = medians([in_a_process(IMPORTS) for _ in range(repeats)])
    rows = []
    for name, make in OPTIMIZERS.items():
        code = STEPS.replace("MAKE", make)
        with tempfile.TemporaryDirectory() as folder:
            kinds = {
                "empty": [in_a_process(code, NUMBA_CACHE_DIR=folder)],
                "warm": [in_a_process(code, NUMBA_CACHE_DIR=folder) for _ in range(repeats)],
                "torch": [in_a_process(code, THINWIRE_KERNELS="reference") for _ in range(repeats)],
            }
        rows += [{"optimizer": name, "cache": kind, **medians(runs)} for kind, runs in kinds.items()]
    return {"imports_s": imports, "steps_s": rows}


def printed(result: dict[str, Any]) -> str:
    imports = result["imports_s"]
    loaded = "numba is imported too" if imports["numba"] else "numba is not imported"
    lines = [
        f"`import torch` takes {imports['torch']:.2f} s, `import thinwire, thinwire.core.kernels` after it "
        f"{1e3 * imports['thinwire']:.0f} ms more and `thinwire.optim` {1e3 * imports['optim']:.0f} ms; {loaded}.",
        "",
        "| optimizer | cache | first step, s | second step, ms | compiled functions |",
        "|---|---|---|---|---|",
    ]
    for row in result["steps_s"]:
        cells = [f"{row['first']:.2f}", f"{1e3 * row['second']:.2f}", f"{row['compiled']:.0f}"]
        lines.append(f"| {row['optimizer']} | {row['cache']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    arguments = parser_for(__doc__).parse_args()
    if arguments.threads:
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    repeats = 1 if arguments.quick else min(arguments.repeats, 5)
    result = {**surroundings(repeats), **measure(repeats)}
    print(printed(result))
    save(result, arguments.out)


if __name__ == "__main__":
    main()
