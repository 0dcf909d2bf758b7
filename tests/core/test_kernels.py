import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.api import Fold, commit_list_, numba_body, propose_list, reference, threads
from tests.precision import assert_same_bits
from thinwire import kernels

CPU = torch.device("cpu")
SIZES = [1, 2, 63, 64, 65, 129, 1000, 8193, 29_000]
"""Around a block (64); the last is large enough to be sampled."""


@pytest.fixture
def small_parts(monkeypatch):
    """Three threads and little room, so that small tensors show what large ones do."""
    monkeypatch.setattr(threads, "SMALLEST", 64)
    monkeypatch.setattr(numba_body, "_SMALLEST_ROOM", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def inputs(kind, numel, dtype):
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=torch.float64)
    return {
        "random": normal,
        "tied": (3 * normal).round(),
        "denormal": normal * 1e-42,
        "huge": normal * 2e37,
        "zero": normal * 0,
        "equal": torch.full_like(normal, -0.7),
        "ascending": torch.arange(numel, dtype=torch.float64),
        "descending": torch.arange(numel, 0, -1, dtype=torch.float64),
        "rare": torch.where(normal > 3, normal, 0.0),
        "one block": torch.where(torch.arange(numel) // 64 == 7, normal, normal * 1e-6),
    }[kind].to(dtype)


def counts(numel):
    return sorted({1, max(1, numel // 1000), max(1, numel // 4), max(1, numel - 1), numel})


@pytest.mark.parametrize("lengths", [(8, 64, 64), (64, 8, 64), (64, 64, 8)])
def test_buffers_of_unequal_lengths_are_refused(lengths):
    folds = [Fold(*map(torch.ones, of), 0.9, False) for of in [(64, 64, 64), lengths]]
    before = [tensor.clone() for fold in folds for tensor in fold[:3]]
    sent = [(torch.tensor([1]), torch.ones(1))] * 2
    with pytest.raises(ValueError, match=r"\b8\b"):
        propose_list(folds, [2, 2])
    with pytest.raises(ValueError, match=r"\b8\b"):
        commit_list_(folds, sent, [0, 0])
    assert all(map(torch.equal, before, (tensor for fold in folds for tensor in fold[:3])))


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
@pytest.mark.parametrize(
    "kind",
    [
        "random",
        "tied",
        "denormal",
        "huge",
        "zero",
        "equal",
        "ascending",
        "descending",
        "rare",
        "one block",
    ],
)
@pytest.mark.usefixtures("small_parts")
def test_the_fast_fold_gives_the_bits_of_the_readable_one(kind, dtype, grad_dtype):
    for numel in SIZES:
        residual = inputs(kind, numel, dtype)
        grad, buffer = inputs(kind, numel, torch.float64).flip(0), residual.roll(3)
        grad = (grad.clamp(-6e4, 6e4) if grad_dtype == torch.float16 else grad).to(grad_dtype)
        for k in counts(numel):
            assert_same_bits(numba_body.top_k(residual, k), reference.top_k(residual, k))
        for k, (has_buffer, nesterov) in zip(
            counts(numel), [(1, 0), (1, 1), (0, 0), (1, 0), (1, 1)], strict=False
        ):
            rule = (0.9, bool(nesterov))
            u = buffer if has_buffer else None
            fast, slow = (
                body.propose_list([Fold(grad, residual, u, *rule)], [k])[0]
                for body in (numba_body, reference)
            )
            assert fast[2] and slow[2]
            assert_same_bits(fast[0], slow[0])
            assert_same_bits(fast[1], slow[1])
            ends = []
            for body in (numba_body, reference):
                v, u = residual.clone(), buffer.clone() if has_buffer else None
                fold = Fold(grad, v, u, *rule)
                body.commit_list_([fold], [(fast[0], (fast[1] * 0.7).float())], [numel + k])
                ends.append((v, u))
            assert_same_bits(ends[0][0], ends[1][0])
            if has_buffer:
                assert_same_bits(ends[0][1], ends[1][1])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("dtype", "k"), [(torch.float32, 150_000), (torch.bfloat16, 300)])
def test_the_number_of_threads_changes_no_bit(monkeypatch, dtype, k, nesterov):
    grad, ends = inputs("random", 300_003, torch.float32), []
    for count in (1, 2, 3, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        v, u = inputs("tied", 300_003, dtype), inputs("ascending", 300_003, dtype)
        fold = Fold(grad, v, u, 0.9, nesterov)
        [(at, values, _)] = numba_body.propose_list([fold], [k])
        numba_body.commit_list_([fold], [(at, (values / 2).float())], [7])
        ends.append((at, values, v, u))
    for end in ends[1:]:
        for a, b in zip(end, ends[0], strict=True):
            assert_same_bits(a, b)


def test_several_threads_may_call_at_once():
    tensors = [inputs("random", 140_000 + i, torch.float32) for i in range(6)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda x: numba_body.top_k(x, 500), tensors * 3))
    for x, result in zip(tensors * 3, results, strict=True):
        assert torch.equal(result, reference.top_k(x, 500))


def test_the_environment_and_a_missing_numba_choose_torch(monkeypatch):
    monkeypatch.delenv("THINWIRE_KERNELS", raising=False)
    assert kernels.for_device(CPU) is numba_body
    assert kernels.for_device(torch.device("meta")) is reference
    monkeypatch.setenv("THINWIRE_KERNELS", "reference")
    assert kernels.for_device(CPU) is reference
    monkeypatch.setenv("THINWIRE_KERNELS", "fast")
    with pytest.raises(ValueError, match="THINWIRE_KERNELS is 'fast': allowed"):
        kernels.for_device(CPU)
    monkeypatch.setenv("THINWIRE_KERNELS", "triton")
    with pytest.raises(ValueError, match=r"'triton': .* left in 0\.4, .* torch .* 'reference'"):
        kernels.for_device(CPU)
    monkeypatch.delenv("THINWIRE_KERNELS")
    monkeypatch.setitem(sys.modules, "numba", None)
    kernels._numba_kernels.cache_clear()
    assert kernels.for_device(CPU) is reference
    monkeypatch.undo()
    kernels._numba_kernels.cache_clear()


@pytest.mark.slow
def test_numba_that_compiles_nothing_leaves_the_work_to_the_reference():
    code = """
import torch
from tests.precision import assert_same_bits
from thinwire import kernels
assert kernels.for_device(torch.device("cpu")).__name__.endswith("reference")
"""
    assert_succeeds(run_python(code, NUMBA_DISABLE_JIT="1"))


@pytest.mark.slow
def test_package_in_an_archive_compiles_its_loops(tmp_path):
    archive = shutil.make_archive(
        str(tmp_path / "thinwire"), "zip", Path(kernels.__file__).parents[2], "thinwire"
    )
    code = f"""
import sys
sys.path.insert(0, {archive!r})
{TOP_K}
from thinwire.kernels import loops
assert {archive!r} in loops.__file__
"""
    environment = {
        "PYTHONPATH": "",
        "XDG_CACHE_HOME": str(tmp_path / "home"),
        "NUMBA_CACHE_DIR": "",
    }
    assert_succeeds(run_python(code, **environment))


def run_python(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def assert_succeeds(process):
    with process:  # ends with its pipe closed, whatever happens
        try:
            output, _ = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 0, output


@pytest.mark.slow
def test_numba_is_not_imported_before_it_is_needed():
    assert_succeeds(
        run_python("import sys, thinwire, thinwire.wire.message\nassert 'numba' not in sys.modules")
    )


TOP_K = """
import torch
from thinwire.core.feedback import top_k
x = torch.arange(300_000.).flip(0)
assert top_k(x, 3).tolist() == [0, 1, 2]
"""


STEP = """
import torch
from thinwire import optim
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
optim.Lars([p], lr=0.1).step()
assert p[0] < 1
from thinwire.kernels import loops
stats = loops.lars.stats
hits, misses = sum(stats.cache_hits.values()), sum(stats.cache_misses.values())
"""


@pytest.mark.slow
def test_cache_of_this_user_spares_a_second_process_the_compiling(tmp_path):
    home = {"XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    assert_succeeds(run_python(STEP + "assert (hits, misses) == (0, 1)", **home))
    assert_succeeds(run_python(STEP + "assert (hits, misses) == (1, 0)", **home))
    for file in (tmp_path / "thinwire").rglob("*.nb[ic]"):
        file.write_bytes(b"damaged")
    assert_succeeds(run_python(STEP + "assert (hits, misses) == (0, 1)", **home))
    assert_succeeds(run_python(STEP + "assert (hits, misses) == (1, 0)", **home))


@pytest.mark.slow
@pytest.mark.parametrize(("inside", "mode"), [("", 0o777), ("", 0o775), ("loops", 0o755)])
@pytest.mark.parametrize("variable", ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME"])
def test_cache_that_others_can_write_is_neither_read_nor_written(variable, inside, mode, tmp_path):
    folder = tmp_path / "thinwire" / inside
    folder.mkdir(mode=0o700, parents=True)
    folder.chmod(mode)
    home = {"XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    if variable == "NUMBA_CACHE_DIR":
        home["NUMBA_CACHE_DIR"] = str(tmp_path / "thinwire")
    assert_succeeds(run_python(STEP + "assert hits == 0", **home))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own():
    child = (
        "import os\nif not os.fork():\n    os._exit(0 if top_k(x, 3).tolist() == [0, 1, 2] else "
        "1)\n"
    )
    code = (
        f"{TOP_K}\ntorch.set_num_threads(2)\ntop_k(x, 3)\n{child}assert "
        "os.waitstatus_to_exitcode(os.wait()[1]) == 0"
    )
    assert_succeeds(run_python(code))


@pytest.mark.slow
def test_a_selection_stays_in_its_memory_whatever_it_is_from(tmp_path):
    code = """
import torch
from thinwire.kernels import cpu as numba_body, reference
from thinwire.kernels.rules import Fold
numba_body.SMALLEST, numba_body._SMALLEST_ROOM = 64, 1
torch.get_num_threads = lambda: 3
generator = torch.Generator().manual_seed(0)
nan, inf = float("nan"), float("inf")
for dtype in (torch.float32, torch.float64):
    for numel in (1, 65, 1000, 20_000):
        for fill in (None, 0.0, nan, inf, -inf):
            for share in (0.0, 0.002, 0.1, 1.0):
                v = torch.randn(numel, generator=generator)
                at = torch.rand(numel, generator=generator) < share
                v = v if fill is None else torch.where(at, fill, v)
                for k in {1, numel // 1000 + 1, numel // 4 + 1, numel}:
                    fold = Fold(torch.zeros(numel), v.to(dtype), None, 0.0, False)
                    own, other = (b.propose_list([fold], [k])[0] for b in (numba_body, reference))
                    assert own[2] == other[2], (dtype, numel, fill, share, k)
                    same = torch.equal(own[0], other[0]) and torch.equal(own[1], other[1])
                    assert same or not own[2]
"""
    assert_succeeds(run_python(code, NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(tmp_path)))
