"""Nodes as sources: dense inside, sparse between; the same as one rank for each node with the mean
of its gradients."""

import copy
import os
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.api import Group, node_size_of
from tests.ranks import Lost, Pool
from tests.reference.dgc_training import Oracle
from tests.sync.means import GradientMean
from thinwire.errors import NonFinite

SHAPES = {"embed.weight": (40, 7), "layer.weight": (16, 20), "layer.bias": (16,), "scale": ()}
MIN_NUMEL = 100


def start_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def gradient(step: int, rank: int, name: str) -> Tensor:
    seed = 10_000 * step + 100 * rank + list(SHAPES).index(name)
    return torch.randn(
        SHAPES[name], generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def train(rank: int, size: int, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    params = {name: nn.Parameter(value) for name, value in start_values().items()}
    optimizer = tw.optim.DGCMomentum(params.items(), lr=0.1, min_numel=MIN_NUMEL, **options)
    for step in range(steps):
        for name, p in params.items():
            p.grad = gradient(step, rank, name)
        optimizer.step()
        assert all(
            torch.equal(p.grad, gradient(step, rank, name))
            for name, p in params.items()
            if p.grad is not None
        )
    return {
        "params": {name: p.detach().numpy() for name, p in params.items()},
        "u": {name: optimizer.state[p]["momentum_buffer"].numpy() for name, p in params.items()},
        "v": {
            name: optimizer.state[p]["residual"].numpy()
            for name, p in params.items()
            if p.numel() >= MIN_NUMEL
        },
        "stats": optimizer.stats(),
    }


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"sparsity": (0.9,), "value_bits": 32}, {"levels": (0.9,)}),
    "one bit, Nesterov, decay": (
        {"sparsity": (0.9,), "value_bits": 1, "nesterov": True, "weight_decay": 0.02},
        {"levels": (0.9,), "bits": 1, "nesterov": True, "decay": 0.02},
    ),
    "ramp": (
        {"sparsity": (0.5, 0.9), "rampup_begin_step": 3, "rampup_step": 4, "value_bits": 32},
        {"levels": (0.5, 0.9), "begin": 3, "rampup": 4},
    ),
    "local clip": (
        {"sparsity": (0.9,), "local_grad_clip_norm": 3.0, "value_bits": 32},
        {"levels": (0.9,), "local_clip": 3.0},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("node_size", [2, 4])
def test_nodes_are_as_many_ranks_with_the_means_of_their_gradients(
    ranks: Pool, name: str, node_size: int
) -> None:
    options, oracle_options = OPTIONS[name]
    answers = ranks.run(train, 9, {"node_size": node_size, "exchange": "gather", **options}, size=4)
    nodes = 4 // node_size
    values = {n: v.numpy() for n, v in start_values().items()}
    oracle = Oracle(values, ranks=nodes, min_numel=MIN_NUMEL, **oracle_options)
    for step in range(9):
        own = [{n: gradient(step, r, n).numpy() for n in SHAPES} for r in range(4)]
        means = [
            {
                n: sum(own[node * node_size + i][n] for i in range(node_size)) / node_size
                for n in SHAPES
            }
            for node in range(nodes)
        ]
        oracle.update(means)
    for rank, answer in enumerate(answers):
        first = rank // node_size * node_size
        for n in SHAPES:
            # as in the laws of the flat exchange: float32 on the wire rounds sums of another order
            # differently
            np.testing.assert_allclose(
                answer["params"][n], oracle.params[n], rtol=1e-6, atol=1e-7, err_msg=n
            )
            np.testing.assert_array_equal(answer["params"][n], answers[0]["params"][n])
            for key in ("u", "v"):
                if n in answer[key]:
                    expected = getattr(oracle, key)[rank // node_size][n]
                    np.testing.assert_allclose(
                        answer[key][n], expected, rtol=1e-5, atol=1e-5, err_msg=n
                    )
                    np.testing.assert_array_equal(answer[key][n], answers[first][key][n])
        crossed = answer["stats"]["bytes_between_nodes"]
        assert (crossed > 0) == (rank == first)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = nn.Linear(12, 40), nn.Linear(40, 30), nn.Linear(30, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(50_000 + 100 * step + rank))
    return x, x[:, :5].sin()


OPTION_SETS: list[dict[str, Any]] = [
    {"node_size": 2, "exchange": "gather"},
    {"node_size": 2, "exchange": "split"},
    {"node_size": 1, "exchange": "split"},
]


def dgc(model: nn.Module, **options: Any) -> tw.optim.DGCMomentum:
    settings = {
        "lr": 0.05,
        "min_numel": 200,
        "sparsity": (0.9, 0.97),
        "rampup_begin_step": 2,
        "rampup_step": 4,
    }
    return tw.optim.DGCMomentum(model.named_parameters(), **{**settings, **options})


def run_net(
    rank: int, size: int, attach: bool, steps: int, options: dict[str, Any]
) -> dict[str, Any]:
    model = Net()
    optimizer = dgc(model, **options)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001) if attach else model
    handle = optimizer.attach(ddp) if attach else None
    for step in range(steps):
        x, y = batch(step, rank)
        (ddp(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return {
        "params": [p.detach() for p in model.parameters()],
        "state": [optimizer.state[p] for p in model.parameters()],
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTION_SETS, ids=str)
def test_attached_or_not_the_numbers_are_the_same(ranks: Pool, options: dict[str, Any]) -> None:
    # one tensor to a bucket and one tensor to a message cut the index space alike only where
    # nothing is cut
    options = {**options, "value_bits": 32} if options["exchange"] == "split" else options
    attached = ranks.run(run_net, True, 8, options, size=4)
    stepped = ranks.run(run_net, False, 8, options, size=4)
    for one, other in zip(attached, stepped, strict=True):
        for a, b, c in zip(one["params"], other["params"], attached[0]["params"], strict=True):
            assert torch.equal(a, c)
            if options["exchange"] == "gather":
                assert torch.equal(a, b)
        if options["exchange"] == "gather":
            for mine, theirs in zip(one["state"], other["state"], strict=True):
                assert mine.keys() == theirs.keys()
                assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def launched_by(
    rank: int, size: int, environment: dict[str, str], options: dict[str, Any]
) -> dict[str, Any]:
    os.environ.update(environment)
    try:
        return run_net(rank, size, False, 5, options)
    finally:
        for key in environment:
            del os.environ[key]


@pytest.mark.slow
def test_what_torchrun_says_is_what_is_done(ranks: Pool) -> None:
    by_itself = ranks.run(launched_by, {"LOCAL_WORLD_SIZE": "2"}, {}, size=4)
    told = ranks.run(launched_by, {}, {"node_size": 2}, size=4)
    flat = ranks.run(launched_by, {}, {}, size=4)
    for one, other, third in zip(by_itself, told, flat, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one["params"], other["params"], strict=True))
        assert not torch.equal(one["params"][0], third["params"][0])


def scaled(rank: int, size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Attached, with gradients accumulated under no_sync and a scaler that finds an overflow on the
    last rank."""
    model = Net()
    optimizer = dgc(model, rampup_begin_step=0, value_bits=32, **options)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer.attach(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(6):
        with ddp.no_sync():
            x, y = batch(2 * step, rank)
            scaler.scale((ddp(x) - y).square().mean()).backward()
        x, y = batch(2 * step + 1, rank)
        loss = (ddp(x) - y).square().mean()
        scaler.scale(loss * (float("inf") if step == 3 and rank == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {"params": [p.detach() for p in model.parameters()], "stats": optimizer.stats()}


@pytest.mark.fault
@pytest.mark.parametrize("options", OPTION_SETS[1:], ids=str)
def test_a_grad_scaler_drops_everywhere_or_nowhere(ranks: Pool, options: dict[str, Any]) -> None:
    answers = ranks.run(scaled, options, size=4)
    for answer in answers:
        assert (answer["stats"]["dropped_steps"], answer["stats"]["step"]) == (1, 5)
        assert all(
            torch.equal(a, b) for a, b in zip(answer["params"], answers[0]["params"], strict=True)
        )
        assert all(torch.isfinite(p).all() for p in answer["params"])


def resumed(rank: int, size: int, attach: bool, options: dict[str, Any]) -> bool:
    def continued(model: nn.Module, optimizer: tw.optim.DGCMomentum, start: int, stop: int) -> None:
        ddp = DistributedDataParallel(model) if attach else model
        handle = optimizer.attach(ddp) if attach else None
        for step in range(start, stop):
            x, y = batch(step, rank)
            (ddp(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.remove()

    whole = Net()
    optimizer = dgc(whole, **options)
    continued(whole, optimizer, 0, 5)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    continued(whole, optimizer, 5, 10)
    again = Net()
    second = dgc(again, **options)
    again.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    continued(again, second, 5, 10)
    states = [
        torch.equal(entry, second.state[q][key])
        for p, q in zip(whole.parameters(), again.parameters(), strict=True)
        for key, entry in optimizer.state[p].items()
    ]
    return all(states) and all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("options", OPTION_SETS, ids=str)
def test_save_load_continue_is_bit_exact(
    ranks: Pool, attach: bool, options: dict[str, Any]
) -> None:
    assert ranks.run(resumed, attach, options, size=4) == [True] * 4


def from_flat_to_nodes(rank: int, size: int) -> dict[str, Any]:
    model = Net()
    flat = dgc(model, node_size=1)
    for step in range(4):
        x, y = batch(step, rank)
        (model(x) - y).square().mean().backward()
        flat.step()
        flat.zero_grad()
    grouped = dgc(model, node_size=2)
    grouped.load_state_dict(copy.deepcopy(flat.state_dict()))
    before = [flat.state[p]["residual"].clone() for p in model.parameters() if p.numel() >= 200]
    exchange = grouped.synchronizer.joined()
    assert exchange.sources.size == 2
    after = [grouped.state[p]["residual"].clone() for p in model.parameters() if p.numel() >= 200]
    x, y = batch(9, rank)
    (model(x) - y).square().mean().backward()
    grouped.step()
    return {"before": before, "after": after, "params": [p.detach() for p in model.parameters()]}


def test_state_of_single_ranks_becomes_the_mean_of_their_node(ranks: Pool) -> None:
    answers = ranks.run(from_flat_to_nodes, size=4)
    for node in (0, 2):
        for a, b, mean, same in zip(
            *(answers[node + i][k] for k in ("before", "after") for i in (0, 1)), strict=True
        ):
            assert torch.equal(mean, same)
            torch.testing.assert_close(mean, (a + b) / 2, rtol=0, atol=1e-6)
    assert all(
        torch.equal(a, b)
        for o in answers
        for a, b in zip(o["params"], answers[0]["params"], strict=True)
    )


def poisoned(rank: int, size: int, attach: bool, options: dict[str, Any]) -> dict[str, Any]:
    model = Net()
    optimizer = dgc(model, rampup_begin_step=0, **options)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001) if attach else model
    if attach:
        optimizer.attach(ddp)
    if rank == 3:
        model.second.weight.register_hook(lambda grad: grad * float("nan") if step == 2 else grad)
    texts: list[str] = []
    for step in range(5):
        x, y = batch(step, rank)
        (ddp(x) - y).square().mean().backward()
        before = (
            copy.deepcopy(optimizer.state_dict()),
            [p.detach().clone() for p in model.parameters()],
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        if step == 2:
            texts = [str(w.message) for w in caught]
            after = optimizer.state_dict()
            for index, state in before[0]["state"].items():
                assert all(torch.equal(state[key], after["state"][index][key]) for key in state)
            assert all(
                torch.equal(a, b) for a, b in zip(before[1], model.parameters(), strict=True)
            )
        optimizer.zero_grad()
    return {
        "params": [p.detach() for p in model.parameters()],
        "texts": texts,
        "stats": optimizer.stats(),
    }


@pytest.mark.fault
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("options", OPTION_SETS, ids=str)
def test_what_is_not_finite_on_one_rank_drops_the_step_on_all(
    ranks: Pool, attach: bool, options: dict[str, Any]
) -> None:
    answers = ranks.run(poisoned, attach, options, size=4)
    for answer in answers:
        assert answer["texts"] == answers[0]["texts"]
        assert len(answer["texts"]) == 1
        assert (
            "the gradient of parameter second.weight on rank 3 is not finite" in answer["texts"][0]
        )
        assert answer["stats"]["dropped_steps"] == 1
        assert all(torch.isfinite(p).all() for p in answer["params"])
        assert all(
            torch.equal(a, b) for a, b in zip(answer["params"], answers[0]["params"], strict=True)
        )


def always_poisoned(rank: int, size: int) -> tuple[int, str]:
    p = nn.Parameter(torch.zeros(500))
    optimizer = tw.optim.DGCMomentum([("weight", p)], lr=0.1, min_numel=1, node_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(12):
            p.grad = torch.full((500,), float("nan") if rank == 1 else 1.0)
            try:
                optimizer.step()
            except NonFinite as error:
                return step, str(error)
    return 12, ""


@pytest.mark.fault
def test_the_tenth_drop_in_a_row_is_an_error_with_nodes_too(ranks: Pool) -> None:
    for step, text in ranks.run(always_poisoned, size=4):
        assert step == 9
        assert "this was dropped step 10 in a row" in text


def overflow_of_the_mean(rank: int, size: int) -> list[str]:
    p = nn.Parameter(torch.zeros(500))
    optimizer = tw.optim.DGCMomentum([("weight", p)], lr=0.1, min_numel=1, node_size=2)
    p.grad = torch.full((500,), 3e38)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert not p.detach().any()
    return [str(w.message) for w in caught]


@pytest.mark.fault
def test_finite_gradients_without_a_finite_mean_drop_the_step(ranks: Pool) -> None:
    for texts in ranks.run(overflow_of_the_mean, size=4):
        assert len(texts) == 1
        assert "weight on rank 0, added to those of other ranks, is not finite" in texts[0]


class Broken(Group):
    """A group whose leader of node 1 sends a message with one bit flipped."""

    broken_at = ""

    def all_gather(self, message: Tensor, *, what: str):  # type: ignore[no-untyped-def]
        return super().all_gather(self._damaged(message, what), what=what)

    def all_to_all(self, parts: Tensor, lengths: Any, *, what: str):  # type: ignore[no-untyped-def]
        return super().all_to_all(self._damaged(parts, what), lengths, what=what)

    def _damaged(self, message: Tensor, what: str) -> Tensor:
        if self.rank == 1 and self.broken_at and what.startswith(self.broken_at):
            message = message.clone()
            message[36] ^= 1
        return message


def damaged(rank: int, size: int, options: dict[str, Any], what: str) -> tuple[str, bool]:
    from tests.api import nodes as nodes_module
    from tests.api import ranks as ranks_module

    ranks_module.Group = nodes_module.Group = Broken  # type: ignore[misc]
    try:
        p = nn.Parameter(torch.linspace(-1, 1, 600))
        optimizer = tw.optim.DGCMomentum(
            [("weight", p)], lr=0.1, sparsity=(0.9,), min_numel=1, **options
        )
        for step in range(2):
            p.grad = torch.full((600,), 1.0 + step + rank)
            optimizer.step()
        before = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
        Broken.broken_at = what
        try:
            optimizer.step()
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        after = optimizer.state_dict()
        same = all(
            torch.equal(before[0]["state"][0][k], after["state"][0][k]) for k in after["state"][0]
        )
        return text, same and torch.equal(before[1], p)
    finally:
        Broken.broken_at = ""
        ranks_module.Group = nodes_module.Group = Group  # type: ignore[misc]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("options", "what"),
    [
        (OPTION_SETS[0], "gathering messages"),
        (OPTION_SETS[1], "dealing messages"),
        (OPTION_SETS[1], "gathering sums"),
        (OPTION_SETS[2], "dealing messages"),
        (OPTION_SETS[2], "gathering sums"),
    ],
)
def test_a_damaged_message_is_refused_everywhere_and_nothing_is_applied(
    ranks: Pool, options: dict[str, Any], what: str
) -> None:
    source = 2 if options["node_size"] == 2 else 1
    for text, unchanged in ranks.run(damaged, options, what, size=4):
        assert text.startswith("PayloadCorrupt: rank ")
        assert f"the message of rank {source} for bucket 0 of step 2 was refused" in text
        assert unchanged


def die(rank: int, size: int, options: dict[str, Any], who: int, phase: str) -> None:
    model = Net()
    optimizer = dgc(model, rampup_begin_step=0, **options)
    for step in range(2):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if step == 1 and rank == who:
            _die_at(optimizer, phase)
        before = (
            [p.detach().clone() for p in model.parameters()],
            copy.deepcopy(optimizer.state_dict()["state"]),
        )
        try:
            optimizer.step()
        except RuntimeError as error:
            state = optimizer.state_dict()["state"]
            same = all(
                torch.equal(a, b) for a, b in zip(before[0], model.parameters(), strict=True)
            ) and all(
                torch.equal(entry, state[i][k])
                for i, entries in before[1].items()
                for k, entry in entries.items()
            )
            raise RuntimeError(f"{type(error).__name__}, unchanged={same}") from error


def _die_at(optimizer: tw.optim.DGCMomentum, phase: str) -> None:
    """The process ends when it is about to launch this exchange."""
    original = Group._launched

    def launched(self: Group, launches: Any, result: Any, what: str, held: Any, **kind: Any) -> Any:
        if what.startswith(phase):
            os.kill(os.getpid(), 9)
        return original(self, launches, result, what, held, **kind)

    Group._launched = launched  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize(
    ("options", "who", "phase"),
    [
        (OPTION_SETS[0], 2, "gathering messages"),  # a leader
        (OPTION_SETS[0], 3, "averaging dense"),  # another rank of its node
        (OPTION_SETS[2], 1, "dealing messages"),
        (OPTION_SETS[2], 1, "gathering sums"),
    ],
)
def test_a_rank_that_dies_is_lost_on_all_others(
    ranks: Pool, options: dict[str, Any], who: int, phase: str
) -> None:
    answers = ranks.run(die, options, who, phase, size=4, expect_errors=True, group_timeout_s=8)
    assert isinstance(answers[who], Lost)
    for rank, answer in enumerate(answers):
        if rank != who:
            assert answer.text in {"PeerLost, unchanged=True", "PeerStalled, unchanged=True"}


def mean_with_nodes(rank: int, size: int, dgc_config: tw.DGC) -> list[dict[str, Tensor]]:
    params = {name: nn.Parameter(value) for name, value in start_values().items()}
    mean = GradientMean(Group(), params, dgc_config)
    found = []
    for step in range(4):
        got = mean.reduce(step, {n: gradient(step, rank, n) for n in SHAPES})
        assert got is not None
        found.append(got)
    return [*found, dict(mean.residuals)]


@pytest.mark.parametrize("exchange", ["gather", "split"])
def test_the_mean_for_other_optimizers_conserves_over_nodes(ranks: Pool, exchange: str) -> None:
    """Sum over nodes of the residuals + what was delivered = sum over nodes of their mean
    gradients; float64."""
    config = tw.DGC(
        sparsity=(0.9,), min_numel=MIN_NUMEL, value_bits=2, node_size=2, exchange=exchange
    )
    answers = ranks.run(mean_with_nodes, config, size=4)
    for name in ("embed.weight", "layer.weight"):
        kept = answers[0][-1][name] + answers[2][-1][name]
        assert torch.equal(answers[0][-1][name], answers[1][-1][name])
        delivered = 2 * sum(step[name] for step in answers[0][:-1])
        given = sum(gradient(step, r, name) for step in range(4) for r in range(4)) / 2
        torch.testing.assert_close(kept + delivered, given, rtol=0, atol=1e-12)


def refuse(rank: int, size: int, sizes: list[int | None]) -> None:
    p = nn.Parameter(torch.ones(30))
    optimizer = tw.optim.DGCMomentum([("a", p)], lr=0.1, node_size=sizes[rank])
    p.grad = torch.ones(30)
    optimizer.step()


@pytest.mark.fault
def test_a_size_that_does_not_divide_is_refused_by_both_numbers(ranks: Pool) -> None:
    for answer in ranks.run(refuse, [2, 2, 2], size=3, expect_errors=True):
        assert answer.type_name == "ValueError"
        assert "node_size=2 does not divide the 3 ranks" in answer.text


@pytest.mark.fault
def test_ranks_that_differ_in_the_size_are_told(ranks: Pool) -> None:
    for answer in ranks.run(refuse, [2, 2, 1, 2], size=4, expect_errors=True):
        assert answer.type_name == "Mismatch"
        assert "node_size differs: rank 0 has 2, rank 2 has 1" in answer.text


def launched(
    rank: int, size: int, environment: dict[str, str], given: int | None
) -> tuple[int, str]:
    kept = {
        key: os.environ.pop(key, None)
        for key in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE")
    }
    os.environ.update(environment)
    try:
        return node_size_of(Group().global_ranks, given)
    finally:
        for key, value in kept.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


@pytest.mark.parametrize(
    ("environment", "given", "found", "word"),
    [
        ({}, None, 1, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "2"}, None, 2, "2 machines"),
        ({"LOCAL_WORLD_SIZE": "4"}, None, 1, "do not fill two machines"),
        ({"LOCAL_WORLD_SIZE": "1"}, None, 1, "no second rank"),
        ({"LOCAL_WORLD_SIZE": "nonsense"}, None, 1, "no second rank"),
        (
            {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3", "WORLD_SIZE": "4"},
            None,
            1,
            "3 machines",
        ),
        ({"LOCAL_WORLD_SIZE": "2"}, 1, 1, "given"),
        ({}, 4, 4, "given"),
    ],
)
def test_the_launcher_says_what_a_node_is(
    ranks: Pool, environment: dict[str, str], given: int | None, found: int, word: str
) -> None:
    for size, why in ranks.run(launched, environment, given, size=4):
        assert size == found
        assert word in why


def some_ranks_of_a_machine(rank: int, size: int) -> tuple[int, str] | None:
    members = torch.distributed.new_group([0, 2, 3])
    if rank == 1:
        return None
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        return node_size_of(Group(members).global_ranks, None)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_ranks_that_are_no_whole_machines_stay_flat(ranks: Pool) -> None:
    answers = ranks.run(some_ranks_of_a_machine, size=4)
    assert answers[1] is None
    assert {answer[0] for answer in answers if answer} == {1}
