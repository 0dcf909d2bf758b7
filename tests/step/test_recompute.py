"""Recompute against the same model without: equal bits, while forward passes are repeated."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.api import autocast_forward, recompute
from tests.api import recompute_matches as matches


class Counting(nn.Module):
    """A linear layer that counts its forward passes."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


class Block(nn.Module):
    """All whose repetition could differ: dropout, running statistics, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.mix = Counting()
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.drop = nn.Dropout(0.4)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("late", None)

    def forward(
        self, x: Tensor, bias: Tensor | None = None, *, scale: float = 1.0
    ) -> dict[str, Tensor]:
        h = self.drop(torch.tanh(self.mix(self.norm(x)))) * scale
        self.count += 1
        # reassigned, and the result depends on it
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.late = (
            h.detach().amax() if self.late is None else torch.maximum(self.late, h.detach().amax())
        )
        h = self.spectral(h + self.mean / self.count) * self.late
        return {"x": x + h if bias is None else x + h + bias, "h": h}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, scale=0.5 + i, bias=self.bias)["x"]
        return self.head(x)


class Plain(nn.Module):
    """Can be pickled, which parametrized modules cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Sequential(Counting(), nn.BatchNorm1d(6), nn.Dropout(0.3)), Counting()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def twins(make=Net) -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make()
    return net, copy.deepcopy(net)


def inputs(seed: int = 1) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def backward(net: nn.Module, x: Tensor, seed: int = 2) -> Tensor:
    """One training pass; returns the loss and leaves gradients."""
    torch.manual_seed(seed)
    loss = net(x).float().square().sum()
    loss.backward()
    return loss.detach()


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    """Gradients and buffers, bit for bit."""
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    for (name, p), (_, q) in zip(a.named_buffers(), b.named_buffers(), strict=True):
        assert torch.equal(p, q), name


def calls(net: nn.Module) -> list[int]:
    return [module.calls for module in net.modules() if isinstance(module, Counting)]


@pytest.mark.parametrize(
    ("patterns", "amp"),
    [
        (("blocks.*",), None),
        (("blocks.*",), torch.bfloat16),
        (("blocks.*",), torch.float16),
        (["blocks.?", "head"], None),
        (("",), torch.bfloat16),
        (("*.norm", "*.spectral"), None),
    ],
)
def test_gradients_and_buffers_equal_without_recompute(patterns, amp):
    plain, net = twins()
    recompute(net, patterns)
    for each in (plain, net):
        if amp is not None:
            autocast_forward(each, amp)
    for step in range(2):
        assert torch.equal(backward(plain, inputs(step), step), backward(net, inputs(step), step))
        assert_equal(plain, net)


def test_forward_pass_of_matching_modules_is_repeated_once():
    _, net = twins()
    recompute(net, ("blocks.1",))
    backward(net, inputs())
    assert calls(net) == [1, 2, 1]


def test_less_is_kept_for_the_backward_pass():
    def kept(net):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel()) or t, lambda t: t
        ):
            net(inputs())
        return sum(sizes)

    plain, net = twins()
    recompute(net, ("blocks.*",))
    assert kept(net) < kept(plain) / 3


def draws_afterwards(net):
    backward(net, inputs())
    return torch.rand(3)


def passes_in_flight(net, order):
    """As micro-batches of a pipeline are: every repeat finds the buffers of its own first pass."""
    torch.manual_seed(0)
    losses = [net(inputs(seed)).square().sum() for seed in range(3)]
    for i in order:
        losses[i].backward()


def graph_that_is_kept(net):
    torch.manual_seed(0)
    loss = net(inputs()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    x = inputs().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


def other_mode_in_between(net):
    torch.manual_seed(0)
    loss = net(inputs()).square().sum()
    net.eval()
    loss.backward()
    assert not any(module.training for module in net.modules())


def error_before(net):
    with pytest.raises(RuntimeError, match="7 elements"):
        net(torch.ones(5, 7))
    backward(net, inputs())
    assert set(calls(net)[1:]) <= {1, 2}


def frozen(net):
    net.requires_grad_(False)
    x = inputs().requires_grad_()
    backward(net, x)
    return x.grad


@pytest.mark.parametrize(
    "program",
    [
        draws_afterwards,
        partial(passes_in_flight, order=[0, 1, 2]),
        partial(passes_in_flight, order=[1, 2, 0]),
        graph_that_is_kept,
        other_mode_in_between,
        error_before,
        frozen,
    ],
)
def test_program_has_the_bits_of_one_without_recompute(program):
    plain, net = twins()
    recompute(net, ("blocks.*",))
    results = [program(each) for each in (plain, net)]
    assert results[0] is None or torch.equal(*results)
    assert_equal(plain, net)


def test_where_one_match_contains_another_the_outer_one_counts():
    _, net = twins()
    assert recompute(net, ("blocks.*", "*.linear")).names == ("blocks.0", "blocks.1", "blocks.2")
    backward(net, inputs())
    assert calls(net) == [2, 2, 2]


class Shared(nn.Module):
    """One module under two names, called three times, once inside another match."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Counting()
        self.outer = nn.Sequential(nn.Dropout(0.3), self.one, nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.one(self.outer(self.one(x)))


def test_shared_modules():
    plain, net = twins(Shared)
    handle = recompute(net, ("outer", "one"))
    assert handle.names == ("one", "outer")
    for seed in range(2):
        backward(plain, inputs(), seed)
        backward(net, inputs(), seed)
    assert_equal(plain, net)
    assert calls(net) == [2 * 3 * 2]
    assert matches(net, ("outer.1",)) == ("outer.1",), (
        "a name that named_modules leaves out as repeated"
    )


def test_without_gradients_nothing_is_repeated_or_kept():
    plain, net = twins()
    recompute(net, ("blocks.*",))
    for each in (plain, net):
        backward(each, inputs())
        each.eval()
    before = calls(net)
    with torch.no_grad():
        assert torch.equal(plain(inputs()), net(inputs()))
    with torch.inference_mode():
        assert torch.equal(plain(inputs()), net(inputs()))
    assert calls(net) == [count + 2 for count in before]
    for each in (plain, net):
        each.zero_grad()
        backward(each, inputs())
    assert_equal(plain, net)


def test_names_types_and_state_stay_and_removal_leaves_nothing():
    plain, net = twins()
    handle = recompute(net, ("blocks.*",))
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in net.named_modules()] == [n for n, _ in plain.named_modules()]
    assert [type(m) for m in net.modules()] == [type(m) for m in plain.modules()]
    handle.remove()
    handle.remove()
    assert not any("forward" in vars(module) for module in net.modules())
    backward(net, inputs())
    assert calls(net) == [1, 1, 1]


def saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_a_copy_recomputes_its_own_weights(copied):
    plain, net = twins(Plain)
    autocast_forward(net, torch.bfloat16)
    handle = recompute(net, ("blocks.*",))
    other = copied(net)
    for each in (plain, other):
        with torch.no_grad():
            for i, p in enumerate(each.parameters()):
                p.add_(0.01 * i)
    autocast_forward(plain, torch.bfloat16)
    backward(plain, inputs())
    handle.remove()  # from the original only
    backward(other, inputs())
    assert_equal(plain, other)
    assert calls(other) == [2, 2]
    assert calls(net) == [0, 0]
    assert all(p.grad is None for p in net.parameters())


def test_a_forward_that_somebody_else_has_put_there_is_kept():
    plain, net = twins()
    for each in (plain, net):
        inner = each.head.forward
        each.head.forward = lambda x, inner=inner: 2 * inner(x)
    mine = net.head.forward
    handle = recompute(net, ("head",))
    backward(plain, inputs())
    backward(net, inputs())
    assert_equal(plain, net)
    handle.remove()
    assert net.head.forward is mine

    handle = recompute(net, ("head", "blocks.0"))
    below = net.head.forward
    net.head.forward = above = lambda x: below(x) * 1
    handle.remove()
    assert net.head.forward is above, "not ours to take off"
    for each in (plain, net):
        backward(each, inputs())
    assert_equal(plain, net)
    assert calls(net)[0] == 2, "and it does nothing any more"


class Odd(nn.Module):
    """Tuples, lists and plain values, in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair, times: int, name: str = "", *, options=None):
        x, y = pair
        h = self.linear(x) * times + y
        return (h, [h * 2, None], {"name": name, "flag": options["flag"]})


def test_arguments_and_results_of_any_kind():
    plain, net = twins(Odd)
    recompute(net, ("",))
    for each in (plain, net):
        x = inputs().requires_grad_()
        h, (twice, nothing), values = each((x, x * 2), 3, "n", options={"flag": True})
        assert nothing is None
        assert values == {"name": "n", "flag": True}
        (h + twice).sum().backward()
        each.x = x.grad
    assert torch.equal(plain.x, net.x)
    assert_equal(plain, net)


def test_change_in_between_is_an_error_and_no_wrong_gradient():
    _, net = twins()
    recompute(net, ("blocks.1",))
    loss = net(inputs()).sum()
    with torch.no_grad():
        net.blocks[1].mix.linear.bias.add_(1)
    with pytest.raises(RuntimeError, match=r"mix\.linear\.bias was changed between"):
        loss.backward()
    backward(net, inputs())

    layer = nn.Sequential(nn.Linear(6, 6))
    recompute(layer, ("0",))
    x = inputs().requires_grad_() * 1
    y = layer(x)
    x += y
    with pytest.raises(RuntimeError, match="inplace"):
        x.sum().backward()


def test_a_lazy_module_finds_its_class():
    plain, net = twins(lambda: nn.Sequential(nn.LazyLinear(6), nn.ReLU()))
    recompute(net, ("0",))
    backward(net, inputs())
    plain(inputs())
    plain.load_state_dict(net.state_dict())
    backward(plain, inputs())
    assert type(net[0]) is nn.Linear
    assert_equal(plain, net)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "way", ["recompute, then compile", "compile, then recompute", "compiled parts"]
)
def test_compiled_models(way):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mix = nn.BatchNorm1d(6), nn.Linear(6, 6)

        def forward(self, x):
            return x + torch.tanh(self.mix(self.norm(x)))

    torch.compiler.reset()
    plain, net = twins(lambda: nn.Sequential(Part(), Part()))
    if way == "recompute, then compile":
        recompute(net, ("*",))
        run = torch.compile(net, backend="aot_eager")
    elif way == "compile, then recompute":
        run = torch.compile(net, backend="aot_eager")
        assert recompute(run, ("?",)).names == ("_orig_mod.0", "_orig_mod.1")
    else:
        for i in range(2):
            net[i] = torch.compile(net[i], backend="aot_eager")
        assert recompute(net, ("?",)).names == ("0", "1")
        run = net
    for seed in range(2):
        backward(plain, inputs(seed))
        backward(run, inputs(seed))
    assert_equal(plain, net)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (("block.*",), r"'block\.\*' matches no module name.*blocks"),
        (("blocks.*", "haed"), r"'haed'.*'head'"),
        (("blocks",), r"'blocks'.*no forward of its own.*'blocks\.\*'"),
        (("BLOCKS.*",), "matches no"),
    ],
)
def test_bad_patterns_change_nothing(patterns, text):
    _, net = twins()
    with pytest.raises(ValueError, match=text):
        recompute(net, patterns)
    assert not any("forward" in vars(module) for module in net.modules())


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_module_is_refused():
    with pytest.raises(TypeError, match="scripted"):
        recompute(nn.Sequential(torch.jit.script(nn.Linear(6, 6))), ("0",))


def test_the_whole_model_is_matched_by_the_empty_pattern_only():
    _, net = twins()
    assert matches(net, ("*",)) == ("blocks.0", "blocks.1", "blocks.2", "head")
    assert matches(net, ("", "blocks.*")) == ("",)


def test_of_a_match_that_is_cut_in_two_every_stage_recomputes_its_part():
    def make():
        return nn.Sequential(
            Counting(), nn.Sequential(Counting(), nn.Dropout(0.5), Counting()), Counting()
        )

    plain, net = twins(make)
    stages = [nn.Sequential(net[0], net[1][:1]), nn.Sequential()]
    stages[1].add_module("1", net[1][1:])
    stages[1].add_module("2", net[2])
    handles = [recompute(net, ("1", "2"), stage=stage) for stage in stages]
    assert [handle.names for handle in handles] == [("1",), ("1", "2")]
    backward(plain, inputs())
    backward(nn.Sequential(*stages), inputs())
    assert_equal(plain, net)
    assert calls(net) == [1, 2, 2, 2]
    for handle in handles:
        handle.remove()
    assert not any("forward" in vars(module) for stage in stages for module in stage.modules())
    with pytest.raises(ValueError, match="layers"):
        recompute(net, ("layers",), stage=stages[0])
