"""Loops are compiled ahead, once per machine, and nothing that lies in the cache, or in its place,
ends a start."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("numba")

WARM = """
import logging, sys
import torch
from thinwire.kernels.rules import needs_of
from thinwire.kernels.warm import warm_up
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
def warm(work, dtype=torch.float32, **settings):
    return warm_up(needs_of(work, [torch.zeros(3, dtype=dtype)], **settings))
"""
LARS = f"{WARM}\nwarm('lars')"


def start(code, cache, **environment):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
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


FORKS = """
import json, os, sys, traceback, warnings
import numba, torch
from thinwire.kernels.cpu import calls

numba.njit(lambda: None)()  # which loads what every compilation needs

def begin(code, cache, strict, output):
    if child := os.fork():
        return child
    status = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        warnings.simplefilter("error" if strict else "always")
        numba.config.CACHE_DIR = cache
        exec(code, {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)

for line in sys.stdin:
    children = [begin(*job) for job in json.loads(line)]
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)
"""


class Starts:
    """Starts that cost no imports: forks of a process that has compiled and read nothing yet."""

    def __init__(self, folder):
        self._folder = folder
        self._server = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", FORKS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, code, cache, *, strict=True):
        """What it prints."""
        return self.run_together([code], cache, strict=strict)[0]

    def run_together(self, codes, cache, *, strict=True):
        """What each of them prints; `cache` None: where a start without a setting has it."""
        files = [self._folder / f"output {number}" for number in range(len(codes))]
        for file in files:
            file.write_text("")
        jobs = [
            (code, str(cache or ""), strict, str(file))
            for code, file in zip(codes, files, strict=True)
        ]
        self._server.stdin.write(json.dumps(jobs) + "\n")
        self._server.stdin.flush()
        ends, outputs = json.loads(self._server.stdout.readline()), [f.read_text() for f in files]
        assert ends == [0] * len(codes), outputs
        return outputs

    def close(self):
        with self._server:
            os.killpg(self._server.pid, signal.SIGKILL)  # and forks that have not ended


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    made = Starts(tmp_path_factory.mktemp("starts"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def warm_cache(starts, tmp_path_factory):
    """A cache with the loops of LARS."""
    folder = tmp_path_factory.mktemp("cache")
    assert re.search(r"compiled \d+ loops", starts.run(LARS, folder))
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
from numba.core import event
from thinwire import optim
from thinwire.kernels.cpu import jit_cache
from thinwire.core.feedback import top_k

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
asked, load = [], jit_cache.LoopCache.load_overload
def asking(self, signature, context):
    asked.append((self._name, signature))
    return load(self, signature, context)
jit_cache.LoopCache.load_overload = asking
with event.install_recorder("numba:compile") as compilations:
    for make in USES:
        make()
made = [each.data for _, each in compilations.buffer]
made = [(each["dispatcher"].py_func.__name__, each["args"]) for each in made]
assert not made, made
assert not asked, asked  # what is on disk here would be compiled on another machine
"""
# every type of a state once, every type of a parameter, every code of values
DGC_USES = [
    ("float32", None, 1),
    ("float64", None, 8),
    ("bfloat16", "bfloat16", 4),
    ("bfloat16", None, 32),
]


@pytest.mark.slow  # where the loops have not been compiled yet
@pytest.mark.parametrize(("dtype", "state", "bits"), DGC_USES)
def test_training_with_dgc_compiles_nothing_that_was_not_compiled_ahead(starts, dtype, state, bits):
    settings = f"dict(value_bits={bits}, state_dtype={f'torch.{state}' if state else None})"
    needs = f"[(('sparse', torch.{dtype}), {settings})]"
    uses = f"[lambda: dgc(torch.{dtype}, {state!r}, {bits})]"
    code = NOTHING_IS_LEFT.replace("NEEDS", needs).replace("USES", uses)
    starts.run(code, None, strict=False)


@pytest.mark.slow
def test_steps_and_changes_compile_nothing_that_was_not_compiled_ahead(starts):
    uses = """[
        lambda: train(optim.Lamb(ps := params_of(torch.float32, (5, 100_000))), ps),
        lambda: train(optim.Lars(ps := params_of(torch.float32, (5, 100_000)), 0.1), ps),
        lambda: top_k(torch.randn(300_000), 3_000),
        lambda: top_k(torch.randn(300_000), 200_000),
    ]"""
    needs = "[(('lamb',), {}), (('lars',), {}), (('changes',), {})]"
    code = NOTHING_IS_LEFT.replace("NEEDS", needs).replace("USES", uses)
    starts.run(code, None, strict=False)


@pytest.mark.slow
def test_one_line_says_that_loops_are_compiled_and_a_warm_start_is_silent(starts, tmp_path):
    first, second = starts.run(LARS, tmp_path), starts.run(LARS, tmp_path)
    assert "INFO compiling the loops of this training, once per machine" in first
    assert re.search(r"INFO compiled \d+ loops in \d", first)
    assert second == ""


@pytest.mark.slow
def test_nothing_is_warmed_where_nothing_is_compiled(starts, tmp_path):
    code = f"{WARM}\nassert warm('sparse') == 0"
    assert output_of(start(code, tmp_path, NUMBA_DISABLE_JIT="1")) == ""
    reference = "import os\nos.environ['THINWIRE_KERNELS'] = 'reference'"
    assert starts.run(f"{reference}\n{code}", tmp_path) == ""
    code = f"import sys\nsys.modules['numba'] = None\n{code}\nassert warm('lamb', torch.int64) == 0"
    assert output_of(start(code, tmp_path)) == ""
    assert not loops_in(tmp_path)


DAMAGE = {
    "empty": lambda raw: b"",
    "cut off": lambda raw: raw[: len(raw) // 2],
    "cut off in its head": lambda raw: raw[:20],
    "one bit": lambda raw: raw[:-500] + bytes([raw[-500] ^ 4]) + raw[-499:],
    "another's bytes": lambda raw: b"\x80\x04garbage" * 300,
    "a pickle of something else": lambda raw: b"\x80\x04K\x01.",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_made_anew_once_with_a_warning(starts, warm_cache, tmp_path, kind):
    cache = copied(warm_cache, tmp_path / "cache")
    path = the_loop(cache)
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    first, second = starts.run(LARS, cache), starts.run(LARS, cache)
    assert first.count("WARNING") == 1
    assert f"{the_loop(cache)} is ignored" in first
    assert "compiled 1 loops" in first
    assert second == ""


@pytest.mark.slow
def test_damage_is_mended_by_processes_that_start_together(starts, warm_cache, tmp_path):
    cache = copied(warm_cache, tmp_path / "cache")
    the_loop(cache).write_bytes(b"")
    starts.run_together([LARS] * 3, cache)
    assert starts.run(LARS, cache) == ""


OPENED = {
    "folder of another": lambda folder, file: os.chown(folder, 1234, -1),
    "folder for all": lambda folder, file: folder.chmod(0o777),
    "file of another": lambda folder, file: os.chown(file, 1234, -1),
    "file for a group": lambda folder, file: file.chmod(0o664),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPENED)
def test_code_writable_by_others_is_not_run(starts, warm_cache, tmp_path, kind):
    if "another" in kind and os.geteuid():
        pytest.skip("only root gives files away")
    cache, proof = copied(warm_cache, tmp_path / "cache"), tmp_path / "proof"
    path = the_loop(cache)
    payload = f"cpathlib\nPath.touch\n(cpathlib\nPath\n(V{proof}\ntRtR.".encode()
    head = path.read_bytes()[:16]
    path.write_bytes(head + hashlib.sha256(payload).digest() + payload)
    OPENED[kind](path.parent, path)
    first, second = (starts.run(LARS, cache, strict=False) for _ in range(2))
    assert not proof.exists()
    why = "it belongs to user 1234" if "another" in kind else "others can write to it"
    if "folder" in kind:
        for output in (first, second):
            assert f"cannot be cached in {path.parent} ({why})" in output
            assert re.search(r"compiled \d+ loops", output)
    else:
        assert f"{path} is ignored ({why}): the loop is compiled again" in first
        assert "compiled 1 loops" in first
        assert second == ""


@pytest.mark.slow
def test_a_mask_that_lets_others_write_is_not_that_of_the_cache(starts, tmp_path):
    code = f"import os\nos.umask(0)\n{LARS}"
    assert re.search(r"compiled \d+ loops", starts.run(code, tmp_path / "cache"))
    assert starts.run(code, tmp_path / "cache") == ""


@pytest.mark.slow
def test_cache_folder_instead_of_a_file_does_not_stop_a_start(starts, warm_cache, tmp_path):
    cache = copied(warm_cache, tmp_path / "cache")
    path = the_loop(cache)
    path.unlink()
    path.mkdir()
    output = starts.run(LARS, cache, strict=False)
    assert "compiled 1 loops" in output
    assert output.count("RuntimeWarning: compiled loops cannot be cached in") == 1


@pytest.mark.slow
@pytest.mark.parametrize("obstacle", ["file", "read-only"])
def test_cache_that_cannot_be_written_is_reported_once_and_loops_work(starts, tmp_path, obstacle):
    cache = tmp_path / "cache"
    if obstacle == "file":
        cache.write_text("")
    else:
        cache.mkdir()
        mount_or_skip("-t", "tmpfs", "-o", "ro", "none", str(cache))
    try:
        output = starts.run(f"{WARM}\nwarm('lars')\nwarm('lamb')", cache, strict=False)
    finally:
        if obstacle == "read-only":
            subprocess.run(["umount", str(cache)], check=True)
    assert output.count("RuntimeWarning") == 1
    assert f"cannot be cached in {cache}" in output
    assert "set NUMBA_CACHE_DIR to a persistent folder that only this user can write" in output
    assert len(re.findall(r"compiled \d+ loops", output)) == 2


def test_compiled_code_is_read_where_nothing_can_be_written(starts, warm_cache, tmp_path):
    cache = copied(warm_cache, tmp_path / "cache")
    mount_or_skip("--bind", str(cache), str(cache))
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(cache)], check=True)
        assert starts.run(LARS, cache) == ""
    finally:
        subprocess.run(["umount", str(cache)], check=True)


@pytest.mark.slow
def test_processes_that_start_together_share_the_work(starts, tmp_path):
    code = f"{WARM}\nfor work in ('lamb', 'lars'): warm(work)"
    outputs = starts.run_together([code] * 3, tmp_path)
    compiled = [
        int(line.split()[2])
        for output in outputs
        for line in output.splitlines()
        if "INFO compiled" in line
    ]
    alone = starts.run(code, tmp_path / "alone")
    inner = [int(line.split()[2]) for line in alone.splitlines() if "INFO compiled" in line]
    assert sum(compiled) == sum(inner), "no loop was compiled twice"


@pytest.mark.slow
def test_a_process_that_was_stopped_while_it_compiled_holds_nobody_up_for_ever(starts, tmp_path):
    hold = """
import sys, time
from thinwire.kernels.cpu import jit_cache, jit_steps
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
            patience = "from thinwire.kernels.cpu import jit_cache\njit_cache._PATIENCE_S = 1.0\n"
            assert re.search(r"compiled \d+ loops", starts.run(patience + LARS, tmp_path))
            assert time.monotonic() - begun < 50
        finally:
            first.kill()


@pytest.mark.slow
def test_a_lock_ends_with_its_process(starts, tmp_path):
    dying = """
import os
from thinwire.kernels.cpu import jit_cache, jit_steps
class Dying(jit_cache.LoopCache):
    def save_overload(self, sig, data):
        os._exit(0)
jit_steps.lars._cache = Dying("jit_steps.lars")
"""
    starts.run(f"{dying}{LARS}", tmp_path)
    assert not [path for path in loops_in(tmp_path) if path.name.startswith("jit_steps.lars-")]
    assert re.search(r"compiled \d+ loops", starts.run(LARS, tmp_path))
