"""Loops are compiled ahead, once per machine, and nothing that lies in the cache, or in its place,
ends a start."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("numba")

WARM = """
import logging, sys
import torch
from thinwire.kernels.needs import needs_of
from thinwire.kernels.warm import warm_up
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
def warm(work, dtype=torch.float32, **settings):
    return warm_up(needs_of(work, [torch.zeros(3, dtype=dtype)], **settings))
"""
LARS = f"{WARM}\nwarm('lars')"


def start(code, cache, *, strict=True, **environment):
    return subprocess.Popen(
        [sys.executable, *(["-W", "error"] if strict else []), "-c", code],
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process):
    with process:
        try:
            output, _ = process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 0, output
    return output


def run(code, cache, **settings):
    return output_of(start(code, cache, **settings))


@pytest.fixture(scope="module")
def warm_cache(tmp_path_factory):
    """A cache with the loops of LARS."""
    folder = tmp_path_factory.mktemp("cache")
    assert re.search(r"compiled \d+ loops", run(LARS, folder))
    return folder


def copied(cache, to):
    to.mkdir()
    for path in loops_in(cache):
        (to / path.parent.name).mkdir(exist_ok=True)
        (to / path.parent.name / path.name).write_bytes(path.read_bytes())
    return to


def loops_in(cache):
    return sorted(Path(cache).rglob("*.loop"))


def mount_or_skip(*arguments):
    if subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")


def the_loop(cache):
    """That of LARS itself, which the others are compiled into."""
    [path] = [path for path in loops_in(cache) if path.name.startswith("jit_steps.lars-")]
    return path


NOTHING_IS_LEFT = f"""{WARM}
import math
from numba.core import event
from thinwire import optim
from thinwire import kernels
from thinwire.core import feedback, message, outer
from thinwire.kernels import cpu_select
from thinwire.core.merge import sum_sparse
from thinwire.core.select import top_k

def train(optimizer, params):
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()

def params_of(dtype, sizes):
    return [torch.nn.Parameter(torch.randn(n, dtype=dtype)) for n in sizes]

def dgc(dtype, state, bits, sizes=(3_000_000, 200_000, *[20_000] * 12, 100)):
    first, rest = sizes[:1], sizes[1:]
    for chosen, levels in ((sizes, (0.75, 0.75, 0.999)), (rest, (0.99,)), (first, (0.6, 0.999))):
        params = params_of(dtype, chosen)
        how = dict(sparsity=levels, value_bits=bits, state_dtype=state)
        train(optim.DGCMomentum(params, 0.1, **how), params)

for need in NEEDS:
    warm(*need[0], **need[1])
with event.install_recorder("numba:compile") as compilations:
    for make in USES:
        make()
made = [each.data for _, each in compilations.buffer]
made = [(each["dispatcher"].py_func.__name__, each["args"]) for each in made]
assert not made, made
"""
# each compiles for five seconds: every type of a state once, every type of a parameter, every code
# of values
DGC_USES = [
    ("float32", None, 1),
    ("float64", None, 8),
    ("bfloat16", "bfloat16", 4),
    ("bfloat16", None, 32),
]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("dtype", "state", "bits"), DGC_USES)
def test_training_with_dgc_compiles_nothing_that_was_not_compiled_ahead(
    tmp_path, dtype, state, bits
):
    settings = f"dict(value_bits={bits}, state_dtype={f'torch.{state}' if state else None})"
    needs = f"[(('sparse', torch.{dtype}), {settings})]"
    uses = f"[lambda: dgc(torch.{dtype}, {state!r}, {bits})]"
    run(NOTHING_IS_LEFT.replace("NEEDS", needs).replace("USES", uses), tmp_path, strict=False)


def test_steps_and_changes_compile_nothing_that_was_not_compiled_ahead(tmp_path):
    uses = """[
        lambda: train(optim.Lamb(ps := params_of(torch.float32, (5, 100_000))), ps),
        lambda: train(optim.Lars(ps := params_of(torch.float32, (5, 100_000)), 0.1), ps),
        lambda: outer.outer_list_(
            *[[torch.ones(9)] for _ in range(3)], outer.OuterRule(0.1, 0.9, True)
        ),
        lambda: top_k(torch.randn(300_000), 3_000),
        lambda: top_k(torch.randn(300_000), 200_000),
    ]"""
    needs = "[(('lamb',), {}), (('lars',), {}), (('outer',), {}), (('changes',), {})]"
    run(NOTHING_IS_LEFT.replace("NEEDS", needs).replace("USES", uses), tmp_path, strict=False)


def test_one_line_says_that_loops_are_compiled_and_a_warm_start_is_silent(tmp_path):
    first, second = run(LARS, tmp_path), run(LARS, tmp_path)
    assert "INFO compiling the loops of this training, once per machine" in first
    assert re.search(r"INFO compiled \d+ loops in \d", first)
    assert second == ""


def test_nothing_is_warmed_where_nothing_is_compiled(tmp_path):
    code = f"{WARM}\nassert warm('sparse') == 0"
    for environment in ({"NUMBA_DISABLE_JIT": "1"}, {"THINWIRE_KERNELS": "reference"}):
        assert run(code, tmp_path, **environment) == ""
    code = f"import sys\nsys.modules['numba'] = None\n{code}\nassert warm('lamb', torch.int64) == 0"
    assert run(code, tmp_path) == ""
    assert not loops_in(tmp_path)


DAMAGE = {
    "empty": lambda raw: b"",
    "cut off": lambda raw: raw[: len(raw) // 2],
    "cut off in its head": lambda raw: raw[:20],
    "one bit": lambda raw: raw[:-500] + bytes([raw[-500] ^ 4]) + raw[-499:],
    "another's bytes": lambda raw: b"\x80\x04garbage" * 300,
    "a pickle of something else": lambda raw: b"\x80\x04K\x01.",
}


STARTS = f"""{WARM}
import os, traceback
import numba
from thinwire.kernels import jit_steps
for cache in CACHES:
    for start in ("first", "second"):
        print(f"{{start}} start with {{cache}}", flush=True)
        if not os.fork():  # into a process that has not looked for a folder yet
            try:
                numba.config.CACHE_DIR = cache
                warm("lars")
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        os.wait()
"""


@pytest.mark.timeout(240)  # twelve starts
def test_a_damaged_file_is_made_anew_once_with_a_warning(warm_cache, tmp_path):
    caches = {kind: copied(warm_cache, tmp_path / kind) for kind in DAMAGE}
    for kind, cache in caches.items():
        path = the_loop(cache)
        path.write_bytes(DAMAGE[kind](path.read_bytes()))
    output = run(
        STARTS.replace("CACHES", repr([str(cache) for cache in caches.values()])),
        tmp_path / "no cache",
    )
    for cache in caches.values():
        first = output.partition(f"first start with {cache}\n")[2].partition("second start")[0]
        second = output.partition(f"second start with {cache}\n")[2].partition("first start")[0]
        assert first.count("WARNING") == 1
        assert f"{the_loop(cache)} is damaged" in first
        assert "compiled 1 loops" in first
        assert second == ""


def test_damage_is_mended_by_processes_that_start_together(warm_cache, tmp_path):
    cache = copied(warm_cache, tmp_path / "cache")
    the_loop(cache).write_bytes(b"")
    for process in [start(LARS, cache) for _ in range(3)]:
        output_of(process)
    assert run(LARS, cache) == ""


def test_a_folder_in_the_place_of_a_file_does_not_end_a_start(warm_cache, tmp_path):
    cache = copied(warm_cache, tmp_path / "cache")
    path = the_loop(cache)
    path.unlink()
    path.mkdir()
    output = run(LARS, cache, strict=False)
    assert "compiled 1 loops" in output
    assert output.count("RuntimeWarning: compiled loops cannot be written to") == 1


@pytest.mark.parametrize("obstacle", ["file", "read-only"])
def test_a_cache_that_cannot_be_written_is_said_once_and_loops_work(tmp_path, obstacle):
    cache = tmp_path / "cache"
    if obstacle == "file":
        cache.write_text("")
    else:
        cache.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "ro", "none", str(cache)],
            capture_output=True,
            check=False,
        )
        if made.returncode:
            pytest.skip("needs the right to mount")
    try:
        output = run(f"{WARM}\nwarm('lars')\nwarm('outer')", cache, strict=False)
    finally:
        if obstacle == "read-only":
            subprocess.run(["umount", str(cache)], check=True)
    assert output.count("RuntimeWarning") == 1
    assert f"cannot be written to {cache}" in output
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in output
    assert len(re.findall(r"compiled \d+ loops", output)) == 2


def test_what_was_compiled_is_read_where_nothing_can_be_written(warm_cache, tmp_path):
    cache = copied(warm_cache, tmp_path / "cache")
    mount_or_skip("--bind", str(cache), str(cache))
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(cache)], check=True)
        assert run(LARS, cache) == ""
    finally:
        subprocess.run(["umount", str(cache)], check=True)


def test_processes_that_start_together_share_the_work(tmp_path):
    code = f"{WARM}\nfor work in ('lamb', 'lars', 'outer'): warm(work)"
    outputs = [output_of(process) for process in [start(code, tmp_path) for _ in range(3)]]
    compiled = [
        int(line.split()[2])
        for output in outputs
        for line in output.splitlines()
        if "INFO compiled" in line
    ]
    alone = run(code, tmp_path / "alone")
    inner = [int(line.split()[2]) for line in alone.splitlines() if "INFO compiled" in line]
    assert sum(compiled) == sum(inner), "no loop was compiled twice"


def test_a_process_that_was_stopped_while_it_compiled_holds_nobody_up_for_ever(tmp_path):
    hold = """
import sys, time
from thinwire.kernels import jit_cache, jit_steps
class Holding(jit_cache.LoopCache):
    def save_overload(self, sig, data):
        print("holding", flush=True)
        time.sleep(60)
jit_steps.lars._cache = Holding("jit_steps.lars")
"""
    first = start(f"{hold}{LARS}", tmp_path)
    with first:
        try:
            assert (
                first.stdout.readline().startswith("INFO compiling")
                or first.stdout.readline() == "holding\n"
            )
            begun = time.monotonic()
            patience = "from thinwire.kernels import jit_cache\njit_cache._PATIENCE_S = 1.0\n"
            assert re.search(r"compiled \d+ loops", run(patience + LARS, tmp_path))
            assert time.monotonic() - begun < 50
        finally:
            first.kill()


def test_a_lock_ends_with_its_process(tmp_path):
    dying = """
import os
from thinwire.kernels import jit_cache, jit_steps
class Dying(jit_cache.LoopCache):
    def save_overload(self, sig, data):
        os._exit(0)
jit_steps.lars._cache = Dying("jit_steps.lars")
"""
    run(f"{dying}{LARS}", tmp_path)
    assert not [path for path in loops_in(tmp_path) if path.name.startswith("jit_steps.lars-")]
    assert re.search(r"compiled \d+ loops", run(LARS, tmp_path))
