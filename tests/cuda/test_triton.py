"""The Triton kernels give the bits of the readable twin; through Triton's interpreter where there
is no GPU."""

import os
import subprocess
import sys
import zlib
from collections.abc import Iterator

import pytest
import torch

from tests.core.test_kernels import assert_same_bits, inputs
from tests.triton_body import DEVICE, SMALL_BLOCK, require_triton, triton_kernels

require_triton()

from tests.api import (  # noqa: E402
    VALUE_BITS,
    Fold,
    crc32,
    launch,
    position_parts,
    reference,
    triton_body,
)
from thinwire import kernels  # noqa: E402

pytestmark = pytest.mark.triton
KINDS = ["random", "tied", "denormal", "huge", "zero", "equal", "ascending", "rare"]
SIZES = [1, 2, SMALL_BLOCK - 1, SMALL_BLOCK, SMALL_BLOCK + 1, 3 * SMALL_BLOCK + 5]


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    with triton_kernels():
        yield


def there(*tensors):
    return [None if t is None else t.to(DEVICE) for t in tensors]


def assert_same(on_device, expected):
    for a, b in zip(on_device, expected, strict=True):
        assert_same_bits(a.cpu(), b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_fold_and_selection(kind, dtype):
    rules = [(True, False), (True, True), (False, False)]
    turn = KINDS.index(kind)
    for i, numel in enumerate(SIZES):
        has_buffer, nesterov = rules[(i + turn) % 3]
        k = [1, numel, max(1, numel // 3), max(1, numel - 1)][(i + turn) % 4]
        rule = (0.9, nesterov)
        residual = inputs(kind, numel, dtype)
        grad, buffer = residual.flip(0), residual.roll(3) if has_buffer else None
        indices, values, finite = reference.propose(Fold(grad, residual, buffer, *rule), k)
        proposed = triton_body.propose(Fold(*there(grad, residual, buffer), *rule), k)
        assert_same(proposed[:2], (indices, values))
        assert bool(proposed[2]) is finite is True
        sent = (values * 0.7).float()
        g, v, u = there(grad, residual.clone(), None if buffer is None else buffer.clone())
        triton_body.commit_(Fold(g, v, u, *rule), *there(indices, sent), numel)
        reference.commit_(Fold(grad, residual, buffer, *rule), indices, sent, numel)
        assert_same([v], [residual])
        if buffer is not None:
            assert_same([u], [buffer])
    assert_same([triton_body.top_k(v, k)], [reference.top_k(residual, k)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_and_values_of_half_precision(dtype):
    grad = inputs("random", 70, torch.float32).to(dtype)
    residual = inputs("tied", 70, torch.float32)
    expected = reference.propose(Fold(grad, residual, residual, 0.9, False), 9)
    proposed = triton_body.propose(Fold(*there(grad, residual, residual), 0.9, False), 9)
    assert_same(proposed[:2], expected[:2])
    assert_same([triton_body.top_k(grad.to(DEVICE), 9)], [reference.top_k(grad, 9)])


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # NumPy's, which the interpreter computes with
@pytest.mark.parametrize("kind", ["random", "denormal", "huge"])
def test_state_in_bfloat16_is_rounded_alike(kind):
    for numel, seed, (has_buffer, nesterov) in [
        (70, 0xFFFFFFFF, (1, False)),
        (33, 1, (1, True)),
        (65, 1 << 31, (0, False)),
    ]:
        grad = 3e3 * inputs(kind, numel, torch.float32)  # beyond the largest bfloat16, if huge
        residual = inputs(kind, numel, torch.float32).bfloat16()
        assert_same(
            [triton_body.top_k(residual.to(DEVICE), 7)], [reference.top_k(residual.float(), 7)]
        )
        residual[5:7] = torch.tensor([float("inf"), float("nan")])
        buffer = residual.roll(3) if has_buffer else None
        rule = (0.9, nesterov)
        indices = torch.tensor([0, 3, 7, numel - 1])
        sent = torch.tensor([0.3, -0.01, 1e-40, 2e37])
        g, v, u = there(grad, residual.clone(), None if buffer is None else buffer.clone())
        wide = reference._folded_residual(Fold(grad, residual, buffer, *rule))
        fold = Fold(g, v, u, *rule)
        assert_same(triton_body.propose(fold, numel)[:2], (torch.arange(numel), wide))
        triton_body.commit_(fold, *there(indices, sent), seed)
        reference.commit_(Fold(grad, residual, buffer, *rule), indices, sent, seed)
        for made, expected in ((v, residual), (u, buffer)):
            if expected is not None:
                assert torch.equal(made.cpu().view(torch.int16), expected.view(torch.int16))
        place, expected = (
            torch.empty(numel, dtype=torch.bfloat16, device=where) for where in (DEVICE, "cpu")
        )
        triton_body.store_(place, g, seed)
        reference.store_(expected, grad, seed)
        assert torch.equal(place.cpu().view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_told(bad):
    x = torch.zeros(100, device=DEVICE)
    x[77] = bad
    zeros = torch.zeros_like(x)
    for grad, residual in ((x, zeros), (zeros, x)):
        assert not bool(triton_body.propose(Fold(grad, residual, zeros, 0.9, False), 1)[2])


@pytest.mark.parametrize("kind", ["random", "tied", "denormal", "huge", "equal", "ascending"])
@pytest.mark.parametrize("bits", VALUE_BITS)
def test_value_codes(bits, kind):
    for i, count in enumerate([0, 1, 2, SMALL_BLOCK - 1, SMALL_BLOCK + 1, 100]):
        values = inputs(kind, count, (torch.float32, torch.float64)[i % 2])
        code, sent = reference.encode_values(values, bits, count + 5)
        made = triton_body.encode_values(values.to(DEVICE), bits, count + 5)
        assert_same(made, (code, sent))
        assert_same([triton_body.decode_values(made[0], count, bits)], [sent])


def test_values_that_do_not_lie_side_by_side():
    values = inputs("random", 90, torch.float32)[::3]
    for bits in VALUE_BITS:
        assert_same(
            triton_body.encode_values(values.to(DEVICE), bits, 30),
            reference.encode_values(values, bits, 30),
        )


@pytest.mark.parametrize("numel", [1, SMALL_BLOCK, SMALL_BLOCK + 1, 300])
def test_position_codes(numel):
    for k in sorted({1, max(1, numel // 9), max(1, numel // 2), numel}):
        low_bits, low_bytes, high_bytes = position_parts(numel, k)
        indices = (
            torch.randperm(numel, generator=torch.Generator().manual_seed(numel))[:k].sort().values
        )
        for kept in (indices, indices[: k // 2]):
            code = triton_body.encode_positions(kept.to(DEVICE), low_bits, low_bytes, high_bytes)
            assert_same([code], [reference.encode_positions(kept, low_bits, low_bytes, high_bytes)])
            decoded, count = triton_body.decode_positions(code, k, low_bits, low_bytes)
            assert count == kept.numel()
            assert_same([decoded], [kept])


def test_the_sum_of_all_sources_is_added_in_their_order():
    parts = [
        inputs("random", 200, torch.float32).topk(40).indices.sort().values - shift
        for shift in (0, 1, 0, 7)
    ]
    parts = [p[p >= 0] for p in parts] + [torch.empty(0, dtype=torch.int64)]
    values = [inputs("random", p.numel(), torch.float32) for p in parts]
    for dtype in (torch.float32, torch.float64):
        assert_same(
            triton_body.sum_sparse(there(*parts), there(*values), dtype),
            reference.sum_sparse(parts, values, dtype),
        )


@pytest.mark.parametrize(
    "nbytes", [1, 2, SMALL_BLOCK, SMALL_BLOCK + 1, 10 * SMALL_BLOCK, 40 * SMALL_BLOCK + 3]
)
def test_the_checksum_is_that_of_zlib(nbytes):
    rows = torch.randint(256, (3, nbytes), generator=torch.Generator().manual_seed(nbytes)).to(
        torch.uint8
    )
    whole = [zlib.crc32(bytes(row.tolist())) for row in rows]
    assert [int(c) & 0xFFFFFFFF for c in crc32(rows.to(DEVICE))] == whole
    start, stop = nbytes // 3, nbytes // 2
    punched = rows.clone()
    punched[:, start:stop] = 0
    holed = [zlib.crc32(bytes(row.tolist())) for row in punched]
    assert [int(c) & 0xFFFFFFFF for c in crc32(rows.to(DEVICE), hole=(start, stop))] == holed


def test_the_environment_chooses_triton(monkeypatch):
    assert kernels.for_device(DEVICE) is triton_body
    assert kernels.is_static(DEVICE)
    monkeypatch.setenv("THINWIRE_KERNELS", "auto")
    assert kernels.for_device(torch.device("cuda")) is triton_body
    assert not kernels.is_static(torch.device("cpu"))
    monkeypatch.setenv("THINWIRE_KERNELS", "reference")
    assert kernels.for_device(torch.device("cuda")) is reference
    monkeypatch.setenv("THINWIRE_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(
        ValueError, match=r"the tensors are on cpu: install triton, and .* TRITON_INTERPRET=1"
    ):
        kernels.for_device(torch.device("cpu"))
    monkeypatch.setenv("THINWIRE_KERNELS", "auto")
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels._triton_kernels.cache_clear()
    assert kernels.for_device(torch.device("cuda")) is reference
    monkeypatch.setenv("THINWIRE_KERNELS", "triton")
    with pytest.raises(ValueError, match="triton cannot be imported"):
        kernels.for_device(DEVICE)
    monkeypatch.undo()
    kernels._triton_kernels.cache_clear()


def test_kernels_are_launched_without_contraction():
    given = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda **constants: given.update(constants, grid=grid)

    launch(Kernel(), (3,), torch.zeros(1, device=DEVICE), BLOCK=4)
    assert given == {"grid": (3,), "BLOCK": 4, "enable_fp_fusion": False}


COMPILE_ALL = """
import re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from thinwire.kernels.cuda import codes, device_steps, triton_body as select
from thinwire.core.lamb import LambRule
from thinwire.kernels.rules import Fold
from thinwire.core.lars import LarsRule
from thinwire.core.outer import OuterRule
from thinwire.core.norms import TrustRule
TYPES = {torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
         torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
compiled = set()
def compile_only(kernel, grid, like, *arguments, **constants):
    whole = lambda a: "i64" if a >> 31 else "i32"
    kinds = {torch.Tensor: lambda a: TYPES[a.dtype], int: whole, float: lambda a: "fp32"}
    signature = {n: kinds[type(a)](a) for n, a in zip(kernel.arg_names, arguments)}
    signature |= dict.fromkeys(constants, "constexpr")
    seen = (kernel.fn.__name__, str(signature), str(constants))
    if seen in compiled:
        return
    compiled.add(seen)
    ptx = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 80, 32),
                         options={"enable_fp_fusion": False}).asm["ptx"]
    found = re.findall(r"fma[.]|[.]full|[.]approx|[.]ftz", ptx)
    assert not found, (kernel.fn.__name__, found)
for module in (codes, select, device_steps):
    module.launch = compile_only
zeros = lambda dtype: torch.zeros(3000, dtype=dtype)
for dtype in (torch.float32, torch.float64):
    x, at = zeros(dtype), torch.arange(5)
    for buffer, nesterov in ((x, False), (x, True), (None, False)):
        rule = (0.9, nesterov)
        select.commit_(Fold(x, x, buffer, *rule), at, torch.zeros(5), 7)
        select.propose(Fold(x, x, buffer, *rule), 5)
    select.top_k(x, 5)
    select.propose(Fold(x.bfloat16(), x, x, 0.9, False), 5)
    codes.sum_rows(at.view(1, 5), torch.zeros(1, 5), torch.tensor([5]), 10, dtype)
narrow = zeros(torch.bfloat16)
fold = Fold(x, narrow, narrow, *rule)
select.commit_(fold, at, torch.zeros(5), 7)
select.propose(fold, 5)
select.store_(narrow, zeros(torch.float32), 7)
for bits in (1, 4, 16):
    code, _ = codes.encode_values(zeros(torch.float32), torch.tensor(5), bits)
    codes.decode_values(code.unsqueeze(0), torch.tensor([5]), bits, 3000)
code = codes.encode_positions(torch.arange(5), torch.tensor(5), 7, 5, 3)
codes.decode_positions(code.unsqueeze(0), 5, 7, 5)
codes.crc32(torch.zeros(1, 99, dtype=torch.uint8))
for dtype in (torch.float32, torch.float64):
    lists = [[zeros(dtype)] for _ in range(4)]
    device_steps.lamb_(*lists, LambRule(0.1, 0.9, 0.99, 1e-6, 0.01, 3, TrustRule()))
    for buffers, nesterov in ((lists[2], False), (lists[2], True), (None, False)):
        device_steps.lars_(*lists[:2], buffers, LarsRule(0.1, 0.9, nesterov, TrustRule(0.02, 0.01)))
        device_steps.outer_(*lists[:2], buffers, OuterRule(0.7, 0.9, nesterov))
names = {name for name, *_ in compiled}
assert len(names) >= 27, names
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_kernel_compiles_for_a_gpu_and_rounds_after_every_operation(tmp_path):
    """No GPU is needed for it: the compiler shows that no product is fused with a sum, no division
    approximate."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("THINWIRE_KERNELS")
    subprocess.run([sys.executable, "-c", COMPILE_ALL], env=environment, check=True)
