"""An exchange begun during the backward pass gives the bits of a later one, and never hangs."""

import contextlib
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from tests.api import GradientExchange, Overlap, prepare
from tests.ranks import Pool
from tests.strategy.test_resume import TRAFFIC
from tests.strategy.training import batch, digest
from tests.toys import engine_of
from thinwire.errors import Mismatch, ThinwireError

cross_entropy = nn.functional.cross_entropy
DGC = tw.DGC(rampup_begin_step=3, rampup_step=6, sparsity=(0.5, 0.9), min_numel=64, value_bits=8)
BUCKET_BYTES = 1500


class Net(nn.Module):
    """Layers that can be shared, skipped, recomputed in torch's re-entrant way, or made to fail."""

    def __init__(
        self,
        *,
        shared: bool = False,
        reentrant: bool = False,
        blocks: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(blocks)
        )
        if shared:
            self.blocks[2][0].weight = self.blocks[0][0].weight
        self.last = nn.Linear(16, 4)
        self.reentrant = reentrant
        self.skipped: int | None = None
        """Block that this forward pass leaves out."""
        self.at_half: Callable[[Tensor], Tensor] | None = None
        """Called with the gradient in the middle of the backward pass."""
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if i == self.skipped:
                continue
            # the first block twice: with re-entrant checkpoints its gradient then comes in two
            # parts
            for _ in range(2 if self.reentrant and i == 0 else 1):
                x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
            if i == 1 and self.at_half is not None and x.requires_grad:
                x.register_hook(self.at_half)
        return self.last(x)


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9, nesterov=True)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def nothing(model: Net, step: int, rank: int) -> None:
    pass


def overflow(model: Net, step: int, rank: int) -> None:
    """In the middle of the backward pass, after the first buckets have left."""
    model.at_half = (lambda g: g * float("inf")) if (step, rank) in {(7, 1), (12, 0)} else None


def skip_together(model: Net, step: int, rank: int) -> None:
    model.skipped = 2 if step in (6, 13) else None


def freeze_later(model: Net, step: int, rank: int) -> None:
    model.blocks[1][0].bias.requires_grad_(step < 9)


@dataclass(frozen=True)
class Case:
    """What is trained."""

    strategy: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = plain
    model: dict[str, Any] = field(default_factory=dict)
    before_step: Callable[[Net, int, int], None] = nothing
    frozen: tuple[str, ...] = ()
    early: int = 18
    """Steps of 20 of which all buckets were sent early and counted: ranks agree for two steps
    first."""


AMP = tw.AMP("float16", tw.DynamicLossScale(init_loss_scale=2.0**12, scale_window=5))
MERGE = tw.GradientMerge(2)
LOW_RANK = tw.LowRank(2, begin_step=4, min_numel=32)
CASES = {
    "dense": Case(),
    "dgc": Case({"dgc": DGC}),
    "dgc nesterov": Case({"dgc": DGC}, nesterov),
    "dgc adam": Case({"dgc": DGC}, adam),
    # of two ranks one node, of four ranks two
    "dgc nodes": Case({"dgc": dataclasses.replace(DGC, node_size=2)}, nesterov),
    "dgc nodes adam": Case({"dgc": dataclasses.replace(DGC, node_size=2)}, adam),
    "dgc split": Case({"dgc": dataclasses.replace(DGC, exchange="split")}),
    "dgc bfloat16": Case({"dgc": dataclasses.replace(DGC, state_dtype="bfloat16")}),
    "low rank": Case({"low_rank": LOW_RANK}),
    "low rank adam": Case({"low_rank": LOW_RANK}, adam),
    "low rank merge overflow": Case(
        {"amp": AMP, "low_rank": LOW_RANK, "gradient_merge": MERGE}, before_step=overflow, early=8
    ),
    "merge": Case({"gradient_merge": tw.GradientMerge(2, avg=False)}, early=8),
    "dgc merge": Case({"dgc": DGC, "gradient_merge": MERGE}, early=8),
    "amp overflow": Case({"amp": AMP}, before_step=overflow, early=18),
    "amp dgc overflow": Case({"amp": AMP, "dgc": DGC}, before_step=overflow, early=18),
    "amp dgc merge overflow": Case(
        {"amp": AMP, "dgc": DGC, "gradient_merge": MERGE}, adam, before_step=overflow, early=8
    ),
    "recompute": Case({"recompute": tw.Recompute(("blocks.*",)), "dgc": DGC}),
    "shared": Case({"dgc": DGC}, model={"shared": True}),
    # re-entrant checkpoints bring one gradient in parts: sent too early, it is sent again, ever
    # more rarely tried
    "re-entrant": Case({"dgc": DGC}, model={"reentrant": True}, early=0),
    "frozen": Case({"dgc": DGC}, frozen=("blocks.1.0.weight", "last.bias")),
    # steps 6 and 13 are not what was expected; before the next early one ranks look at four, then
    # eight equal ones
    "skipped together": Case({"dgc": DGC}, before_step=skip_together, early=4 + 2),
    "skipped together, dense": Case(before_step=skip_together, early=4 + 2),
    "frozen later": Case({"dgc": DGC}, before_step=freeze_later, early=7 + 6),
}


def make(case: Case, *, early: bool = True, events: "Events | None" = None) -> Any:
    """An engine with small buckets; not `early` sends the same buckets after the backward pass."""
    model = Net(**case.model)
    for name in case.frozen:
        model.get_parameter(name).requires_grad_(False)

    def small(params: Any, gradients: Any, **_: Any) -> Any:
        if events is not None:
            events.follow(gradients)
        made = Overlap(params, gradients, bucket_bytes=BUCKET_BYTES, first_bytes=200)
        if not early:
            made.during = lambda *_: contextlib.nullcontext()
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "Overlap", small)
        return engine_of(model, cross_entropy, optimizer=case.optimizer(model), **case.strategy)


class Events(list[str]):
    """What an exchange does, in order."""

    def follow(self, gradients: Any) -> None:
        launch, exchange = gradients.launch, gradients.exchange

        def launched(step: int, bucket: int, grads: Any) -> None:
            self.append(f"bucket {bucket}")
            launch(step, bucket, grads)

        def exchanged(*args: Any, **kwargs: Any) -> Any:
            early, steady = kwargs.get("at_once"), gradients.steady
            outcome = exchange(*args, **kwargs)
            if early:
                again = steady is not None and gradients.steady is None
                self.append("again" if again else outcome.verdict.value)
            return outcome

        gradients.launch, gradients.exchange = launched, exchanged


def side_by_side(rank: int, size: int, name: str) -> tuple[list[bool], int, str]:
    case, events = CASES[name], Events()
    early, late = make(case, events=events), make(case, early=False)
    same = []
    for step in range(20):
        x, y = batch(step, rank)
        for engine in (early, late):
            case.before_step(engine.model, step, rank)
            engine.train_step(x, y)
        pairs = zip(early.model.parameters(), late.model.parameters(), strict=True)
        same.append(all(torch.equal(a, b) for a, b in pairs))
        stats = [{**engine.stats(), **dict.fromkeys(TRAFFIC, 0)} for engine in (early, late)]
        same.append(repr(stats[0]) == repr(stats[1]))  # a norm that overflowed is NaN
    states = [engine.state_dict() for engine in (early, late)]
    for state in states:
        state["counters"] = state["exchange"]["traffic"] = None
    same.append(pickle.dumps(_plain(states[0])) == pickle.dumps(_plain(states[1])))
    return (
        same,
        events.count("apply") + events.count("drop") + events.count("overflow"),
        digest(early),
    )


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(key): _plain(value) for key, value in tree.items() if key != "random"}
    if isinstance(tree, list | tuple):
        return [_plain(value) for value in tree]
    return tree.detach().double().reshape(-1).tolist() if isinstance(tree, Tensor) else repr(tree)


# what is another computation or another exchange on more ranks than two; what one rank sends, and
# when, does not ask how many there are
ON_FOUR = (
    "dense",
    "dgc nodes",
    "dgc nodes adam",
    "dgc split",
    "low rank",
    "amp dgc merge overflow",
    "skipped together",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "size"), [(name, 2) for name in CASES] + [(name, 4) for name in ON_FOUR]
)
def test_sent_early_or_late_the_bits_are_the_same(name: str, size: int, ranks: Pool) -> None:
    answers = ranks.run(side_by_side, name, size=size)
    for same, counted, bits in answers:
        assert all(same), same
        assert counted == CASES[name].early
        assert bits == answers[0][2]


@contextlib.contextmanager
def noted(events: list[str], model: Net) -> Iterator[None]:
    handle = model.first.weight.register_post_accumulate_grad_hook(
        lambda _: events.append("the last gradient")
    )
    yield
    handle.remove()


def when(rank: int, size: int) -> tuple[list[str], list[str], list[str], list[str]]:
    events, found = Events(), []
    engine = make(CASES["dgc merge"], events=events)
    for step in range(4):
        engine.train_step(*batch(step, rank))
    events.clear()
    with noted(events, engine.model):
        for step in (4, 5):
            engine.train_step(*batch(step, rank))
            found.append(list(events))
            events.clear()
        x, y = batch(6, rank)
        # of the user's own: nobody else has to call it
        cross_entropy(engine.model(x), y).backward()
        engine.model.zero_grad()  # or a warning says that the engine does not take them
        found.append(list(events))
        events.clear()
        engine.train_step(x, y)
        engine.minimize(cross_entropy(engine.model(x), y))
        found.append(list(events))
    return found[0], found[1], found[2], found[3]


def test_buckets_leave_during_the_backward_pass_that_updates_and_in_no_other(ranks: Pool) -> None:
    for quiet, updating, own, minimized in ranks.run(when, size=2):
        assert quiet == own == ["the last gradient"]
        for events in (updating, minimized[1:]):
            assert [e for e in events if e.startswith("bucket")] == [
                f"bucket {i}" for i in range(4)
            ]
            at = events.index("the last gradient")
            assert events.index("bucket 0") < events.index("bucket 2") < at
            assert events[-1] == "apply"
        assert minimized[0] == "the last gradient"


def alone(rank: int, size: int) -> bool:
    model = Net()
    engine_of(model, cross_entropy, optimizer=plain(model), dgc=DGC)
    return not model.first.weight._post_accumulate_grad_hooks


def test_one_rank_has_nobody_to_send_to(ranks: Pool) -> None:
    assert ranks.run(alone, size=0) == [True]
    assert ranks.run(alone, size=1) == [True]


def left_behind(rank: int, size: int) -> tuple[int, int, bool, bool]:
    def hooks(model: nn.Module) -> int:
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())

    engine = make(CASES["dense"])
    for step in range(3):
        engine.train_step(*batch(step, rank))
    model, gone, before = engine.model, weakref.ref(engine), hooks(engine.model)
    copied = pickle.loads(pickle.dumps(model))
    del engine
    gc.collect()
    return before, hooks(model), gone() is None, hooks(copied) == 0


def test_hooks_go_with_the_engine_and_do_not_go_with_a_copy(ranks: Pool) -> None:
    for before, after, gone, clean in ranks.run(left_behind, size=2):
        assert before == len(list(Net().parameters()))
        assert after == 0
        assert gone
        assert clean


def lopsided(rank: int, size: int, fields: dict[str, Any], recovered: bool) -> tuple[str, str, int]:
    """One rank leaves a block out in step 4; what it says, and whether all can go on after it."""
    engine = make(Case(fields))
    text = ""
    for step in range(8):
        engine.model.skipped = 1 if (step, rank) == (4, 1) else None
        if recovered:  # such a rank adds nothing, but does it with every parameter
            x, y = batch(step, rank)
            idle = sum(p.sum() for p in engine.model.parameters()) * 0
            engine.minimize(cross_entropy(engine.model(x), y) + idle)
            continue
        try:
            engine.train_step(*batch(step, rank))
        except Mismatch as error:
            text = str(error)
    return text, digest(engine), engine.stats()["step"]


@pytest.mark.fault("a parameter that one rank does not use")
@pytest.mark.parametrize("fields", [{}, {"dgc": DGC}], ids=["dense", "dgc"])
def test_parameter_unused_on_one_rank_is_a_mismatch(fields: dict[str, Any], ranks: Pool) -> None:
    answers = ranks.run(lopsided, fields, False, size=3)
    assert all(answer == answers[0] for answer in answers)
    text, _, steps = answers[0]
    assert "blocks.1.0.weight has a gradient on ranks [0, 2] but none on ranks [1]" in text
    assert "find_unused_parameters=True" in text
    assert steps == 7


def test_ranks_that_become_ready_in_different_orders_agree(ranks: Pool) -> None:
    answers = ranks.run(lopsided, {"dgc": DGC}, True, size=3)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0] == "" and answers[0][2] == 8


def raising(rank: int, size: int, where: str) -> tuple[str, str, int, list[str]]:
    events, text = Events(), ""
    engine = make(CASES["dgc"], events=events)
    for step in range(7):
        wrong = (step, rank) == (4, 1)
        engine.model.at_half = _fail if wrong and where == "middle" else None
        handle = engine.model.first.bias.register_hook(_fail) if wrong and where == "end" else None
        top = engine.model.last.bias.register_hook(_fail) if wrong and where == "begin" else None
        try:
            engine.train_step(*batch(step, rank))
        except (ZeroDivisionError, ThinwireError) as error:
            text = f"{type(error).__name__}: {error}"
        for each in (handle, top):
            if each is not None:
                each.remove()
    assert events.count("apply") == 4
    return text, digest(engine), engine.stats()["step"], events


@pytest.mark.fault("an exception on one rank: in its backward pass, forward pass, or update")
@pytest.mark.parametrize("where", ["begin", "middle", "end"])
def test_error_in_backward_of_a_rank_is_reported_to_all(where: str, ranks: Pool) -> None:
    answers = ranks.run(raising, where, size=3)
    assert len({(bits, steps) for _, bits, steps, _ in answers}) == 1
    assert answers[0][2] == 6
    assert answers[1][0] == "ZeroDivisionError: a hook of the user"
    for text in (answers[0][0], answers[2][0]):
        assert text.startswith(
            "ThinwireError: rank 1: its forward or backward pass ended with ZeroDivisionError: a"
        )
        assert "Nothing was applied on any rank" in text


def narrow(rank: int, size: int, where: str) -> tuple[str, str, str, int]:
    """bfloat16 whose merged gradients are float32; rank 1 lacks some, or has an error."""
    torch.manual_seed(7)
    engine = make(
        Case({"gradient_merge": tw.GradientMerge(2)}, model={"dtype": torch.bfloat16}), early=True
    )
    text = pending = ""
    for step in range(14):
        engine.model.skipped = 1 if where == "unused" and (step, rank) in {(8, 1), (9, 1)} else None
        engine.model.at_half = _fail if where == "error" and (step, rank) == (9, 1) else None
        x, y = batch(step, rank)
        try:
            engine.train_step(x.bfloat16(), y)
        except (ZeroDivisionError, ThinwireError) as error:
            text = f"{type(error).__name__}: {error}"
            pending = engine.pending
    return text, pending, digest(engine), engine.stats()["step"]


def _fail(_: Tensor) -> Tensor:
    raise ZeroDivisionError("a hook of the user")


@pytest.mark.parametrize("where", ["unused", "error"])
def test_zeros_for_a_missing_gradient_travel_as_the_gradient_would(where: str, ranks: Pool) -> None:
    """Another type would be another collective on one rank; a merge stays as it was on all."""
    answers = ranks.run(narrow, where, size=3)
    assert len({(bits, steps) for _, _, bits, steps in answers}) == 1
    assert all(pending == "1 merged microsteps" for _, pending, _, _ in answers)
    text = (
        "Mismatch"
        if where == "unused"
        else "ThinwireError: rank 1: its forward or backward pass ended with ZeroDivisionError"
    )
    assert answers[0][0].startswith(text)
    assert answers[0][3] == 6


def interrupted(rank: int, size: int, how: str) -> list[str]:
    """Rank 1 is asked to end, or fails to send: it sends no more, and others notice it."""
    engine = make(CASES["dense"])
    for step in range(3):
        engine.train_step(*batch(step, rank))

    def stop(_: Tensor) -> Tensor:
        raise KeyboardInterrupt

    patch = pytest.MonkeyPatch()

    def refuse(*_: Any) -> None:
        patch.undo()
        raise MemoryError("no room for a bucket")

    if rank == 1:
        if how == "interrupt":
            engine.model.at_half = stop
        else:
            patch.setattr(GradientExchange, "launch", refuse)
    texts = []
    for step in (3, 4)[: 1 + rank]:
        try:
            engine.train_step(*batch(step, rank))
        except (KeyboardInterrupt, MemoryError, ThinwireError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    if rank == 1:  # what is still on its way would meet this
        try:
            engine.mean_loss(torch.tensor(1.0))
        except ThinwireError as error:
            texts.append(str(error))
    return texts


@pytest.mark.fault
@pytest.mark.parametrize("how", ["interrupt", "sending"])
def test_an_exchange_left_half_way_is_refused_from_then_on(how: str, ranks: Pool) -> None:
    first, second = ranks.run(interrupted, how, size=2, group_timeout_s=6.0)
    assert second[0].startswith(
        "KeyboardInterrupt" if how == "interrupt" else "MemoryError: no room for a bucket"
    )
    assert "was aborted" in second[1]
    assert "was aborted" in second[2]
    assert first[0].startswith(("PeerStalled", "PeerLost"))


def changed_by_a_hook(rank: int, size: int) -> tuple[bool, list[str]]:
    events = Events()
    early, late = make(CASES["dgc"], events=events), make(CASES["dgc"], early=False)

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    for engine in (early, late):  # registered after the engine's own hook, so it comes after it
        engine.model.last.weight.register_post_accumulate_grad_hook(halve)
    for step in range(5):
        for engine in (early, late):
            engine.train_step(*batch(step, rank))
    return digest(early) == digest(late), [e for e in events if not e.startswith("bucket")]


def test_a_gradient_that_changes_after_it_was_sent_is_sent_again(ranks: Pool) -> None:
    for same, verdicts in ranks.run(changed_by_a_hook, size=2):
        assert same
        assert verdicts == ["again"]
