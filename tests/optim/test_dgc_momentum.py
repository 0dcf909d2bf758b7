"""DGCMomentum as a torch optimizer: arguments, manners, refusals, and failed exchanges."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.ranks import Pool
from thinwire.optim import DGCMomentum


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"sparsity": ()}, ValueError, "sparsity"),
        ({"sparsity": (1.0,)}, ValueError, r"sparsity\[0\]"),
        ({"sparsity": (0.9, 1)}, ValueError, r"sparsity\[1\]"),
        ({"sparsity": (-0.1,)}, ValueError, "-0.1"),
        ({"sparsity": 0.9}, TypeError, "sparsity"),
        ({"rampup_step": 0}, ValueError, "rampup_step"),
        ({"rampup_begin_step": -1}, ValueError, "rampup_begin_step"),
        ({"value_bits": 3}, ValueError, "value_bits"),
        ({"momentum": -0.1}, ValueError, "momentum"),
        ({"momentum": 0.0, "nesterov": True}, ValueError, "nesterov"),
        ({"local_grad_clip_norm": 0.0}, ValueError, "local_grad_clip_norm"),
        ({"num_trainers": 0}, ValueError, "num_trainers"),
        ({"node_size": 0}, ValueError, "node_size"),
        ({"exchange": "gahter"}, ValueError, "did you mean 'gather'"),
        ({"min_numel": 0}, ValueError, "min_numel"),
        ({"lr": -1.0}, ValueError, "lr"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay"),
        ({"grad_clip": tw.ClipByGlobalNorm(1.0)}, TypeError, "ClipByNorm"),
        ({"grad_clip": tw.optim.ClipByValue(1.0)}, TypeError, "ClipByNorm"),
        ({"grad_clip": 1.0}, TypeError, "grad_clip"),
        (
            {"grad_clip": tw.optim.ClipByNorm(1.0), "local_grad_clip_norm": 1.0},
            ValueError,
            "give only one",
        ),
        ({"regularizer": 0.1}, TypeError, "regularizer"),
        *(
            ({"process_group": group}, TypeError, "process_group must be .*ProcessGroup or None")
            for group in (3, "x", 0)
        ),
    ],
)
def test_a_wrong_argument_is_named_at_construction(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        DGCMomentum([nn.Parameter(torch.zeros(3))], **{"lr": 0.1, **options})


def test_a_process_group_needs_an_initialized_torch_distributed() -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer = DGCMomentum([p], lr=0.1, process_group=dist.ProcessGroup(0, 1))
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match="init_process_group"):
        optimizer.step()


def one_param(
    numel: int = 600, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Parameter, DGCMomentum]:
    p = nn.Parameter(torch.linspace(-1, 1, numel).to(dtype))
    return p, DGCMomentum(
        [("weight", p)], **{"lr": 0.1, "sparsity": (0.9,), "min_numel": 1, **options}
    )


def test_a_group_may_stay_dense_and_have_its_own_ramp() -> None:
    a, b, c = (nn.Parameter(torch.zeros(100)) for _ in range(3))
    groups = [
        {"params": [a]},
        {"params": [b], "min_numel": 1000},
        {"params": [c], "sparsity": (0.5,), "lr": 0.2},
    ]
    optimizer = DGCMomentum(groups, lr=0.1, sparsity=(0.9,), min_numel=10, value_bits=32)
    for p in (a, b, c):
        p.grad = torch.randn(100)
    optimizer.step()
    assert [int((p != 0).sum()) for p in (a, b, c)] == [10, 100, 50]
    for p, rate in ((a, 0.1), (b, 0.1), (c, 0.2)):
        assert p.grad is not None
        torch.testing.assert_close(p.detach(), -rate * p.grad * (p != 0))
    assert "residual" not in optimizer.state[b]


@pytest.mark.fault("zero gradients, none, empty and scalar parameters")
def test_zeros_are_not_sent_and_nothing_moves() -> None:
    p, optimizer = one_param()
    before = p.detach().clone()
    p.grad = torch.zeros(600)
    optimizer.step()
    assert torch.equal(p, before)
    p.grad[5] = 3.0
    optimizer.step()
    assert [int(i) for i in (p != before).nonzero()] == [5]


def no_gradient_anywhere(rank: int, size: int) -> bool:
    p, optimizer = one_param()
    before = p.detach().clone()
    optimizer.step()
    return torch.equal(p, before) and optimizer.stats()["step"] == 1


@pytest.mark.fault("zero gradients, none, empty and scalar parameters")
def test_no_gradient_on_any_rank_is_a_step_that_changes_nothing(ranks: Pool) -> None:
    assert ranks.run(no_gradient_anywhere) == [True, True]


def disagreeing(rank: int, size: int, what: str) -> None:
    names, params = ["a", "b"], [nn.Parameter(torch.zeros(40)) for _ in range(2)]
    if rank == 1:
        if what == "order":
            names.reverse()
        elif what == "shape":
            params[1] = nn.Parameter(torch.zeros(41))
        elif what == "dtype":
            params[1] = nn.Parameter(torch.zeros(40, dtype=torch.float64))
        elif what == "requires_grad":
            params[1].requires_grad_(False)
        elif what == "count":
            params.append(nn.Parameter(torch.zeros(3)))
            names.append("c")
        elif what == "initial values":
            params[1] = nn.Parameter(torch.ones(40))
    optimizer = DGCMomentum(list(zip(names, params, strict=True)), 0.1, min_numel=10)
    for p in params:
        p.grad = torch.ones_like(p)
    with contextlib.suppress(tw.errors.Mismatch):
        optimizer.step()
    optimizer.step()  # what was refused stays so


@pytest.mark.fault("another order of the parameters")
@pytest.mark.fault("another shape, dtype, number of parameters, or requires_grad")
@pytest.mark.fault("other initial values")
@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "order",
            "parameter.0 differs: rank 0 has 'a float32 [40] requires_grad=True', rank 1 has 'b",
        ),
        ("shape", "'b float32 [41] requires_grad=True'"),
        ("dtype", "'b float64 [40] requires_grad=True'"),
        ("requires_grad", "'b float32 [40] requires_grad=False'"),
        ("count", "parameter.2 differs: rank 0 has nothing, rank 1 has 'c"),
        ("initial values", "initial value (CRC-32) of.b differs"),
    ],
)
def test_disagreement_is_reported_before_anything_moves(ranks: Pool, what: str, text: str) -> None:
    answers = ranks.run(disagreeing, what, size=2, expect_errors=True)
    assert {(a.type_name, a.text) for a in answers} == {("Mismatch", answers[0].text)}
    assert "RuntimeError" in answers[0].bases
    assert text in answers[0].text


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(20, 30), nn.Linear(30, 30)
        self.uses_b = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        return self.b(hidden) if self.uses_b else hidden


def data(rank: int, step: int) -> Tensor:
    return torch.randn(6, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def dgc(model: nn.Module, **options: Any) -> DGCMomentum:
    return DGCMomentum(
        model.named_parameters(), **{"lr": 0.05, "sparsity": (0.9,), "min_numel": 100, **options}
    )


def forget_step(rank: int, size: int) -> None:
    model = Two()
    optimizer = dgc(model)
    ddp = DistributedDataParallel(model)
    optimizer.attach(ddp)
    for step in range(2):
        ddp(data(rank, step)).square().mean().backward()


@pytest.mark.fault
def test_a_second_exchange_without_a_step_points_to_no_sync(ranks: Pool) -> None:
    for answer in ranks.run(forget_step, expect_errors=True):
        assert "RuntimeError" in answer.bases
        assert "no_sync" in answer.text


def misuse(rank: int, size: int) -> list[str]:
    model, other = Two(), Two()
    optimizer, second = dgc(model), dgc(model)
    ddp = DistributedDataParallel(model)
    texts = []

    def refused(kind: type[Exception], call: Any) -> None:
        try:
            call()
        except kind as error:
            texts.append(str(error))

    refused(TypeError, lambda: optimizer.attach(model))  # type: ignore[arg-type]
    refused(ValueError, lambda: optimizer.attach(DistributedDataParallel(other)))
    handle = optimizer.attach(ddp)
    refused(ValueError, lambda: optimizer.attach(ddp))
    refused(ValueError, lambda: second.attach(ddp))
    handle.remove()
    handle.remove()
    second.attach(ddp)
    hooked = DistributedDataParallel(other)
    hooked.register_comm_hook(None, lambda_hook)
    refused(ValueError, lambda: dgc(other).attach(hooked))
    return texts


def lambda_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.fault("a second hook, a hook on another model, DDP's own join")
def test_attaching_wrongly_is_refused(ranks: Pool) -> None:
    for texts in ranks.run(misuse):
        for text, part in zip(
            texts,
            [
                "DistributedDataParallel",
                "4 of the model's",
                "attached already",
                "attached already",
                "hook already",
            ],
            strict=True,
        ):
            assert part in text


def detach_in_the_middle(rank: int, size: int, attached_steps: list[int]) -> list[Tensor]:
    model = Two()
    optimizer = dgc(model)
    ddp = DistributedDataParallel(model)
    handle = None
    for step in range(6):
        if (step in attached_steps) != (handle is not None):
            if handle is None:
                handle = optimizer.attach(ddp)
            else:
                handle.remove()
                handle = None
        net = ddp if attached_steps else model
        net(data(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def test_removing_and_attaching_again_keeps_the_numbers(ranks: Pool) -> None:
    always, sometimes, never = (
        ranks.run(detach_in_the_middle, steps) for steps in ([*range(6)], [0, 1, 4], [])
    )
    for other in (always[1], *sometimes, *never):
        assert all(torch.equal(a, b) for a, b in zip(always[0], other, strict=True))


def scaled(
    rank: int, size: int, attach: bool, use_scaler: bool, unscales: bool = False
) -> dict[str, Any]:
    model = Two()
    optimizer = dgc(model, value_bits=32)
    ddp = DistributedDataParallel(model) if attach else model
    if attach:
        optimizer.attach(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=use_scaler)
    for step in range(8):
        loss = ddp(data(rank, step)).square().mean()
        if use_scaler and step == 4 and rank == 1:
            loss = loss * float("inf")
        if not use_scaler and step == 4:
            continue  # what the scaler drops
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {
        "params": [p.detach() for p in model.parameters()],
        "stats": optimizer.stats(),
        "scale": scaler.get_scale(),
    }


@pytest.mark.fault
@pytest.mark.parametrize("attach", [False, True])
def test_grad_scaler_drops_everywhere_or_nowhere(ranks: Pool, attach: bool) -> None:
    answers = ranks.run(scaled, attach, True)
    plain = ranks.run(scaled, False, False)
    for answer in answers:
        assert answer["stats"]["dropped_steps"] == 1
        assert answer["stats"]["step"] == 7
        for a, b, c in zip(answer["params"], answers[0]["params"], plain[0]["params"], strict=True):
            assert torch.equal(a, b)
            # scales are powers of two, the sums inside a matrix product are not
            torch.testing.assert_close(a, c)
    assert answers[1]["scale"] < answers[0]["scale"]


@pytest.mark.slow
def test_grad_scaler_may_unscale_before_the_step(ranks: Pool) -> None:
    attached, stepped = (ranks.run(scaled, attach, True, True) for attach in (True, False))
    for other in (attached[1], *stepped):
        assert all(map(torch.equal, attached[0]["params"], other["params"]))


def tampered(rank: int, size: int, how: str, begin: int) -> bool:
    model = Two()
    optimizer = dgc(model, rampup_begin_step=begin)
    ddp = DistributedDataParallel(model)
    optimizer.attach(ddp)
    ddp(data(rank, 0)).square().mean().backward()
    if how == "clip" and rank == 1:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif how == "data" and rank == 1:  # one outlier, of which torch counts no change
        assert model.a.weight.grad is not None
        at = model.a.weight.grad.abs().argmax()
        model.a.weight.grad.data.view(-1)[at] *= 0.5
    elif how == "scale":
        tw.amp.LossScaler(tw.FixedLossScale(8.0)).unscale_(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"rank [01]: the gradient of a.weight changed between backward\(\)"
    ):
        optimizer.step()
    return (
        all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        and not optimizer.state
    )


@pytest.mark.fault
@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("how", ["clip", "scale", "data"])
def test_gradient_changed_after_it_was_sent_is_an_error(ranks: Pool, how: str, begin: int) -> None:
    assert ranks.run(tampered, how, begin) == [True, True]


def test_state_dict_has_state_left_by_a_hook() -> None:
    p = nn.Parameter(torch.zeros(64))
    optimizer = DGCMomentum([("p", p)], lr=0.1, min_numel=1)
    p.grad = torch.ones(64)
    optimizer.step()
    optimizer.state["steps of mine"] = 3
    saved = optimizer.state_dict()
    assert saved["state"]["steps of mine"] == 3
    assert "provenance" in saved["state"][0]
    twin = DGCMomentum([("p", nn.Parameter(torch.zeros(64)))], lr=0.1, min_numel=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin.load_state_dict(saved)
    assert twin.state["steps of mine"] == 3


def other_calls(rank: int, size: int) -> None:
    p, optimizer = one_param()
    p.grad = torch.full((600,), 1.0 + rank)
    optimizer.step()
    if rank == 0:
        optimizer.step()
        optimizer.step()
    else:
        optimizer.step()
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(3)))]})
        optimizer.step()


@pytest.mark.fault
def test_ranks_that_make_different_calls_are_reported(ranks: Pool) -> None:
    ranks.raise_alike(
        "Mismatch", ["in another exchange", "add_param_group"], other_calls, group_timeout_s=8
    )


def subgroup(rank: int, size: int) -> Tensor | None:
    process_group = dist.new_group([0, 2])
    p, optimizer = one_param(process_group=process_group, value_bits=32)
    if rank == 1:
        return None
    p.grad = torch.linspace(0, 1 + rank, 600)
    optimizer.step()
    return p.detach()


def test_only_the_given_group_exchanges(ranks: Pool) -> None:
    first, nobody, last = ranks.run(subgroup, size=3)
    assert nobody is None
    assert torch.equal(first, last)


def joined_by_ddp(rank: int, size: int) -> list[str]:
    """Rank 1 has fewer batches, inside DDP's own context; then without `attach`."""
    model = nn.Linear(6, 3)
    ddp = DistributedDataParallel(model)
    optimizer = DGCMomentum(model.named_parameters(), lr=0.1, min_numel=4, timeout=5)
    attached = optimizer.attach(ddp)
    told = []
    for _ in range(2):
        try:
            with ddp.join():
                for _ in range(3 - rank):
                    optimizer.zero_grad()
                    ddp(torch.ones(2, 6)).sum().backward()
                    if told:
                        continue
                    optimizer.step()
            told.append("")
        except RuntimeError as error:
            told.append(f"{type(error).__name__}: {error}")
        attached.remove()
    return told


@pytest.mark.fault("a second hook, a hook on another model, DDP's own join")
def test_ddps_own_join_is_refused_while_attached(ranks: Pool) -> None:
    for refused, afterwards in ranks.run(joined_by_ddp, expect_errors=True):
        assert refused.startswith(
            "RuntimeError: DistributedDataParallel.join() does not work with an attached"
        )
        assert afterwards == ""


def unused(rank: int, size: int, attach: bool, bucket_mb: float) -> dict[str, Tensor]:
    model = Two()
    optimizer = dgc(model)
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=bucket_mb)
    if attach:
        optimizer.attach(ddp)
    for step in range(6):
        model.uses_b = step not in (2, 3)
        optimizer.zero_grad()
        net = ddp if attach else model
        net(data(rank, step)).square().mean().backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        for name, p in model.named_parameters():
            moves = model.uses_b or not name.startswith("b.")
            assert torch.equal(p, before[name]) != moves or "bias" in name
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("bucket_mb", [25.0, 0.0005])
def test_parameters_unused_on_all_are_left_out_of_a_step(ranks: Pool, bucket_mb: float) -> None:
    attached, stepped = (ranks.run(unused, way, bucket_mb) for way in (True, False))
    for other in (attached[1], *stepped):
        torch.testing.assert_close(other, attached[0], rtol=0, atol=0)


def taken_away(rank: int, size: int, name: str, everywhere: bool, attach: bool) -> list[str]:
    model = Two()
    optimizer = dgc(model)
    ddp = DistributedDataParallel(model) if attach else model
    if attach:
        optimizer.attach(ddp)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        ddp(data(rank, step)).square().mean().backward()
        if step == 2 and (everywhere or rank == 0):
            model.get_parameter(name).grad = None
        before = [p.detach().clone() for p in model.parameters()]
        try:
            optimizer.step()
            found.append("stepped")
        except tw.errors.Mismatch as error:
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            found.append(str(error))
    return found


@pytest.mark.fault("a parameter that one rank does not use")
@pytest.mark.parametrize("attach", [True, False])
@pytest.mark.parametrize("name", ["a.weight", "a.bias"])
def test_a_gradient_taken_away_before_a_step(ranks: Pool, name: str, attach: bool) -> None:
    for found in ranks.run(taken_away, name, True, attach):
        assert found == ["stepped"] * 4
    for found in ranks.run(taken_away, name, False, attach):
        assert [text == "stepped" for text in found] == [True, True, False, True]
        assert f"parameter {name} has a gradient on ranks [1] but none on ranks [0]" in found[2]
