"""State of local updates in host memory: the same bits, and little else on the device."""

import itertools
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.api import bucket
from tests.device import stand_in
from tests.members.places import met
from tests.members.training import TIMEOUT_S, wait_for
from tests.ranks import Pool
from tests.toys import bits, engine_of
from tests.waiting import until

COMPRESSIONS = {
    "dense": None,
    "1 bit": tw.Quantized(1),
    "4 bits": tw.Quantized(4, decay=0.9),
    "8 bits": tw.Quantized(8),
    "shares": tw.Quantized(1, exchange="split"),
    "largest": tw.Sparse(0.9),
    "largest, owners": tw.Sparse(0.9, mean_over="all", exchange="split"),
    "factors": tw.LowRank(2, begin_step=1, min_numel=10),
}
OUTER: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "at once": {},
    "delayed": {"delay": 1},
    "in parts": {"fragments": 2, "average_state": True},
    "by time": {"round_seconds": 1e9},
    "nodes": {"node_size": 2, "average_state": True},
}
SHAPES = ((60, 40), (7,), (3, 5, 11))
ELSEWHERE = ("anchors", "outer_momentum", "residuals")
"""Kinds of state that `state_device` moves."""


class Trained:
    """A model on a device, with gradients of its own for every step."""

    def __init__(
        self,
        device: str,
        config: Any,
        rank: int = 0,
        shapes: Any = SHAPES,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        source = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=source).to(dtype) for shape in shapes]
        self.params = [nn.Parameter(tensor.to(device)) for tensor in tensors]
        self.model = nn.ParameterList(self.params)
        self.model.register_buffer("mean", torch.full((3,), float(rank), device=device))
        self.optimizer = torch.optim.SGD(self.params, 0.1, momentum=0.5, foreach=False)
        self.sync = tw.local_sgd(self.model, self.optimizer, config, **options)
        self.device, self._steps = device, itertools.count(1000 * rank)

    def step(self) -> None:
        for param in self.params:
            source = torch.Generator().manual_seed(next(self._steps))
            grad = torch.randn(param.shape, generator=source).to(param.dtype)
            param.grad = grad.to(self.device)
        self.optimizer.step()

    def bits(self) -> str:
        return bits([param.detach().cpu() for param in self.params])


def on_one_rank(rank: int, size: int, name: str, options: Any, dtype: Any) -> list[Any]:
    """Bits on the second device, with its state there and on the host."""
    found = []
    for state_device in (None, "cpu"):
        config = tw.LocalSGD(
            4, compression=COMPRESSIONS[name], state_device=state_device, **OUTER, **options
        )
        trained = Trained(stand_in.first(), config, dtype=dtype)
        with trained.sync as sync:
            for _ in range(13):
                trained.step()
            state = sync.state_dict()
        found.append(
            (trained.bits(), {str(t.device) for kind in ELSEWHERE for t in state[kind].values()})
        )
    return found


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        *((name, "delayed", torch.float32) for name in COMPRESSIONS),
        *(("1 bit", options, torch.bfloat16) for options in OPTIONS if options != "nodes"),
    ],
)
def test_state_on_the_host_gives_the_bits_of_state_on_the_device(
    ranks: Pool, name: str, options: str, dtype: torch.dtype
) -> None:
    [[there, here]] = ranks.run(on_one_rank, name, OPTIONS[options], dtype, size=0)
    assert there[0] == here[0]
    assert there[1] == {stand_in.FIRST} and here[1] == {"cpu"}


def trained_alike(rank: int, size: int, name: str, options: Any) -> list[str]:
    """Bits on the second device with state on the host, and on the CPU, where ranks differ."""
    found = []
    for device, state_device in ((stand_in.first(), "cpu"), ("cpu", "cpu" if rank else None)):
        config = tw.LocalSGD(
            4, compression=COMPRESSIONS[name], state_device=state_device, **OUTER, **options
        )
        trained = Trained(device, config, rank)
        with trained.sync:
            for _ in range(13):
                trained.step()
        found.append(f"{trained.bits()} {trained.model.mean.tolist()}")
    return found


EXACT = ("dense", "largest, owners", "8 bits")
"""Methods whose messages are the same on all processors; other scales differ in a last bit."""


@pytest.mark.parametrize("options", ["at once", "in parts", "nodes"])
@pytest.mark.parametrize("name", EXACT)
def test_ranks_with_state_on_a_host_get_bits_of_cpu(ranks: Pool, name: str, options: str) -> None:
    found = ranks.run(trained_alike, name, OPTIONS[options], size=4 if options == "nodes" else 2)
    assert len({text for both in found for text in both}) == 1


def members(
    rank: int, size: int, address: str, name: str, flag: str, device: str, engine: bool
) -> dict[int, str]:
    """Bits after averagings of a member, and of one that joins it with state on the host."""
    wait_for(flag if rank else "")
    kind = tw.AdaptiveLocalSGD if engine else tw.LocalSGD
    own = "cpu" if rank or device == stand_in.FIRST else None
    config = kind(4, 0, compression=COMPRESSIONS[name], state_device=own, **OUTER)
    found: dict[int, str] = {}
    stand_in.library()
    with tw.join(address, run="test", timeout=TIMEOUT_S) as joined, ExitStack() as stack:
        told: Any = {"members": joined}
        trained = Trained(device, config, rank, **({} if engine else told))
        if engine:
            fields: Any = {"optimizer": trained.optimizer, "adaptive_localsgd": config}
            made = stack.enter_context(
                closing(engine_of(trained.model, None, options=told, **fields))
            )
            made.follow_steps(lambda: torch.ones(()))
            sync: Any = made.sync
        else:
            sync = stack.enter_context(trained.sync)
        while sync.step < 24:
            trained.step()
            if sync.synced:
                found[sync.step] = trained.bits()
            if not rank and sync.step == 4:
                Path(flag).touch()
                until(joined._member._membership.waiting_joiners, "the joiner")
            if not rank and sync.step == 14:
                until(joined._member._membership.ready_joiners, "the joiner")
    return found


@pytest.mark.parametrize(
    ("name", "device", "engine"),
    [
        *((name, stand_in.FIRST, False) for name in COMPRESSIONS),
        ("1 bit", "cpu", False),
        ("1 bit", "cpu", True),
    ],
)
def test_joiner_with_state_on_the_host_gets_bits(
    ranks: Pool, name: str, device: str, engine: bool, tmp_path: Path
) -> None:
    member, joiner = met(ranks, members, name, str(tmp_path / "go"), device, engine, size=2)
    assert len(joiner) > 1
    assert joiner.items() <= member.items()


LARGE = ((100, 500), *((100, 200),) * 10)
NUMEL = 250_000


def peaks_of_averagings(rank: int, size: int, name: str) -> list[tuple[int, int]]:
    """Bytes that averagings, and state after them, hold on the device beside training."""
    found = []
    for delay in (0, 2):
        config = tw.LocalSGD(
            3, 0, compression=COMPRESSIONS[name], state_device="cpu", delay=delay, **OUTER
        )
        # parts are as small against these tensors as they are against those of a large model
        with patch.object(bucket, "_PART", 1 << 12):
            trained = Trained(stand_in.first(), config, rank, LARGE)
            with trained.sync:
                for _ in range(3):  # the optimizer's state, positions for sketches
                    trained.step()
                before = stand_in.held_bytes(forget=True)[0]
                for _ in range(3):
                    trained.step()
                after, peak = stand_in.held_bytes()
                found.append((peak - before, after - before))
    return found


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_averaging_holds_a_byte_a_parameter_and_a_tensor_on_device(ranks: Pool, name: str) -> None:
    """The selection of the largest entries holds magnitudes of a tensor and its mask, too."""
    tensors = 2 if name.startswith("largest") else 1
    for peak, after in itertools.chain(*ranks.run(peaks_of_averagings, name, size=2)):
        assert peak <= NUMEL + 4 * 100 * 500 * tensors
        assert after <= NUMEL // 10


@pytest.mark.parametrize("kind", [tw.LocalSGD, tw.AdaptiveLocalSGD])
def test_another_state_device_is_refused_by_name(kind: Any) -> None:
    for wrong in ("cuda", "cpu:0", 0, torch.device("cpu")):
        with pytest.raises(ValueError, match=r"state_device must be one of .'cpu'., got"):
            kind(4, state_device=wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_state_on_the_host_gives_the_same_bits_on_a_gpu(ranks: Pool, name: str) -> None:
    there, here = ranks.run(on_a_gpu, name, size=2)[0]
    assert there[0] == here[0] and here[1]
    assert here[2] <= there[2]


def on_a_gpu(rank: int, size: int, name: str) -> list[Any]:
    """Bits, whether state is pinned, and bytes at the peak, for state on the GPU and the host."""
    found = []
    for state_device in (None, "cpu"):
        config = tw.LocalSGD(
            4, compression=COMPRESSIONS[name], state_device=state_device, delay=2, **OUTER
        )
        trained = Trained("cuda", config, rank, LARGE)
        with trained.sync as sync:
            torch.cuda.reset_peak_memory_stats()
            for _ in range(13):
                trained.step()
            peak = torch.cuda.max_memory_allocated()
            anchors = sync._averager.averaging.anchors.values()
            found.append((trained.bits(), all(a.is_pinned() for a in anchors), peak))
        del trained, sync
    return found
