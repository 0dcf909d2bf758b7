"""A whole step through the device path: the bits of the host's path, and where the host waits for
the device."""

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire as tw
from tests.ranks import Pool
from tests.triton_body import DEVICE, require_triton, triton_kernels

require_triton()

pytestmark = [pytest.mark.triton]
PATIENCE_S = 250
"""The interpreter is slow, most of all where several processes share a core."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 3)).to(DEVICE)


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 9, generator=generator).to(DEVICE)


def train(
    rank: int, size: int, static: bool, attached: bool, options: dict[str, Any], bad_step: int = -1
) -> Any:
    with triton_kernels(256) if static else nullcontext():
        net = model()
        wrapped = DistributedDataParallel(net) if attached else net
        optimizer = tw.optim.DGCMomentum(net.named_parameters(), lr=0.1, min_numel=20, **options)
        if attached:
            optimizer.attach(wrapped)  # type: ignore[arg-type]
        for step in range(3):
            optimizer.zero_grad()
            loss = wrapped(batch(rank, step)).square().sum()
            with (
                pytest.warns(UserWarning, match="0.weight on rank 1")
                if step == bad_step
                else nullcontext()
            ):
                (loss * (float("inf") if (step, rank) == (bad_step, 1) else 1.0)).backward()
                optimizer.step()
        found = [
            *net.parameters(),
            *(s[key] for s in optimizer.state.values() for key in sorted(s)),
        ]
        return [t.detach().cpu().numpy() for t in found], optimizer.stats()


CASES = {
    "one bit": (False, {"sparsity": (0.9,)}, -1),
    "ramp": (
        False,
        {"sparsity": (0.5, 0.9), "rampup_begin_step": 1, "rampup_step": 2, "value_bits": 4},
        -1,
    ),
    "attached": (True, {"sparsity": (0.9,), "value_bits": 8, "nesterov": True}, -1),
    "not finite": (False, {"sparsity": (0.9,), "value_bits": 32}, 1),
    "not finite, attached": (True, {"sparsity": (0.9,), "value_bits": 2}, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_parameters_and_state_have_the_bits_of_the_host_path(ranks: Pool, name: str) -> None:
    attached, options, bad_step = CASES[name]
    host = ranks.run(train, False, attached, options, bad_step)
    static = ranks.run(train, True, attached, options, bad_step, timeout_s=PATIENCE_S)
    for rank in range(2):
        for a, b in zip(static[rank][0], host[rank][0], strict=True):
            assert a.tobytes() == b.tobytes()
        times = {
            name: 0
            for name in static[rank][1]
            if name.startswith("lost_")
            or name in ("wait_s", "rate_bit_s", "waiting_share", "goodput")
        }
        assert {**static[rank][1], **times} == {**host[rank][1], **times}
        assert static[rank][1]["dropped_steps"] == (bad_step >= 0)


def average(rank: int, size: int, static: bool, compression: Any) -> Any:
    with triton_kernels(256) if static else nullcontext():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        config = tw.LocalSGD(k_steps=2, compression=compression)
        with tw.local_sgd(net, optimizer, config) as sync:
            for step in range(4):
                optimizer.zero_grad()
                loss = net(batch(rank, step)).square().sum()
                loss.backward()
                sync.observe(loss)
                optimizer.step()
        return [p.detach().cpu().numpy() for p in net.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "compression",
    [
        tw.Sparse(0.8),
        tw.Sparse(0.8, mean_over="all"),
        tw.Quantized(4),
        tw.Quantized(1),
    ],
    ids=str,
)
def test_averaged_changes_have_the_bits_of_the_host_path(ranks: Pool, compression: Any) -> None:
    answers = ranks.run(average, True, compression, timeout_s=PATIENCE_S)
    for static, host in zip(answers, ranks.run(average, False, compression), strict=True):
        for a, b in zip(static, host, strict=True):
            assert a.tobytes() == b.tobytes()


def overflow(rank: int, size: int) -> tuple[float, float]:
    with triton_kernels(256):
        param = nn.Parameter(torch.zeros(64, device=DEVICE))
        optimizer = tw.optim.DGCMomentum(
            [param], lr=0.1, min_numel=1, sparsity=(0.9,), value_bits=32
        )
        param.grad = torch.zeros(64, device=DEVICE)
        param.grad[3] = 3e38
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's in the interpreter, and that it was dropped
            optimizer.step()
        return float(param.detach().abs().max()), optimizer.stats()["dropped_steps"]


def test_finite_gradients_whose_sum_is_not_drop_the_step(ranks: Pool) -> None:
    assert ranks.run(overflow, timeout_s=PATIENCE_S) == [(0.0, 1)] * 2


def receive_damage(rank: int, size: int, position: int) -> None:
    from tests.sync.test_round import receive_damage

    with triton_kernels(256):
        receive_damage(rank, size, position)


@pytest.mark.fault
def test_a_damaged_message_is_refused_by_name_on_every_rank(ranks: Pool) -> None:
    ranks.raise_alike(
        "PayloadCorrupt",
        ["the message of rank 1 for bucket 0 of step 3 was refused", "checksum"],
        receive_damage,
        37,
        timeout_s=PATIENCE_S,
    )


class HostReads(TorchDispatchMode):
    """Counts, by function of this library, what makes the host wait for a device."""

    WAITING = frozenset(
        {
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "_unique2",
            "unique_dim",
            "unique_consecutive",
            "bincount",
        }
        | {"is_nonzero", "equal", "_assert_async"}
    )
    METHODS = ("cpu", "tolist", "numpy")

    def __init__(self) -> None:
        super().__init__()
        self.sites: Counter[str] = Counter()
        self.paused = False

    def note(self) -> None:
        if not self.paused:
            stack = [
                f for f in traceback.extract_stack() if not f.name.startswith("<")
            ]  # no comprehensions
            frames = [f for f in stack if "thinwire" in Path(f.filename).parts]
            self.sites[
                f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "elsewhere"
            ] += 1

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        masks = [
            a
            for a in args[1:2]
            if isinstance(a, (list, tuple)) and name in {"index", "index_put_", "index_put"}
        ]
        if name in self.WAITING or any(
            t is not None and t.dtype == torch.bool for mask in masks for t in mask
        ):
            self.note()
        return function(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[Counter[str]]:
        """Not inside a kernel: what its interpreter does is none of the library's."""
        from tests.api import codes, launching
        from tests.api import triton_body as select

        def uncounted(*arguments: Any, **constants: Any) -> None:
            self.paused = True
            launch(*arguments, **constants)
            self.paused = False

        def counted(method: Any) -> Any:
            def call(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
                self.note()
                return method(tensor, *arguments, **named)

            return call

        launch = launching.launch
        with ExitStack() as stack:
            for module in (codes, select):
                stack.enter_context(patch.object(module, "launch", uncounted))
            for name in self.METHODS:
                stack.enter_context(patch.object(Tensor, name, counted(getattr(Tensor, name))))
            stack.enter_context(self)
            yield self.sites


def reads_of_a_step(rank: int, size: int, attached: bool) -> Counter[str]:
    with triton_kernels(256):
        net = model()
        wrapped = DistributedDataParallel(net) if attached else net
        optimizer = tw.optim.DGCMomentum(
            net.named_parameters(),
            lr=0.1,
            min_numel=20,
            sparsity=(0.9,),
            value_bits=4,
            weight_decay=0.1,
            digest_every=0,
        )  # a digest is read on the host, too
        if attached:
            optimizer.attach(wrapped)  # type: ignore[arg-type]
        for step in range(2):  # the first one compares settings and copies tables
            optimizer.zero_grad()
            loss = wrapped(batch(rank, step)).square().sum()
            with HostReads().watching() if step else nullcontext(Counter()) as sites:
                loss.backward()
                optimizer.step()
        return sites


@pytest.mark.slow
def test_the_host_reads_once_for_the_vote_of_an_attached_step(ranks: Pool) -> None:
    for sites in ranks.run(reads_of_a_step, True, timeout_s=PATIENCE_S):
        agreement = {site: count for site, count in sites.items() if site.startswith("group.")}
        assert dict(sites) == {"round._read": 1, **agreement}


@pytest.mark.slow
def test_the_host_reads_once_for_the_vote_of_a_step_that_is_not_attached(ranks: Pool) -> None:
    for sites in ranks.run(reads_of_a_step, False, timeout_s=PATIENCE_S):
        agreement = {site: count for site, count in sites.items() if site.startswith("group.")}
        assert dict(sites) == {"round._read": 1, **agreement}


def test_the_watch_sees_what_it_is_for() -> None:
    x = torch.tensor([1.0, 0.0])
    with HostReads().watching() as sites:
        for wait in (
            "bool(x[0])",
            "x.nonzero()",
            "x[x > 0]",
            "x.tolist()",
            "x.unique()",
            "x.sum().item()",
        ):
            before = sites.total()
            eval(wait)
            assert sites.total() > before
        before = sites.total()
        _ = x[torch.tensor([1])] + x.sum().isfinite()
        assert sites.total() == before
