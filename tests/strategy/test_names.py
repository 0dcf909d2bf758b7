"""Messages call parameters as the model does, also where the optimizer was given no names."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.ranks import Pool
from tests.strategy.training import FIELDS

NAME = "blocks.0.weight"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch's AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "torch's SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "our AdamW": lambda params: tw.optim.AdamW(params, lr=0.01),
    "our Lamb": lambda params: tw.optim.Lamb(params, lr=0.01),
    "our Lars": lambda params: tw.optim.Lars(params, lr=0.01),
}


class Model(nn.Module):
    """Blocks, the first of which can go wrong."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.embed(x)
        for block in self.blocks:
            y = block(y)
        return y


def prepared(kind: str, strategy: tw.DistributedStrategy | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    return (strategy or tw.DistributedStrategy()).prepare(model, optimizer, mean, **options)


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


DATA = (torch.arange(4), torch.ones(4, 8))


def said(act: Callable[[], object]) -> str:
    """The message of what is raised, and of what is warned."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            act()
        except (RuntimeError, ValueError, TypeError) as error:
            told_too = str(error)
        else:
            told_too = ""
    return "\n".join([*(str(warning.message) for warning in told), told_too])


def require_names(message: str) -> None:
    assert NAME in message, message
    assert not re.search(r"parameter \d", message), message


def not_finite(engine: Any) -> None:
    engine.model.blocks[0].weight.register_hook(lambda grad: grad * float("nan"))
    for _ in range(10):
        engine.train_step(*DATA)


def state_of_another_shape(engine: Any) -> None:
    engine.train_step(*DATA)
    state = engine.optimizer.state[engine.model.blocks[0].weight]
    state.update({key: value[:2].clone() for key, value in state.items() if value.dim()})
    engine.train_step(*DATA)


def state_that_does_not_fit(engine: Any) -> None:
    engine.train_step(*DATA)
    state = copy.deepcopy(engine.optimizer.state_dict())
    entries = state["state"][1]
    entries.update({key: value[:2].clone() for key, value in entries.items() if value.dim() == 2})
    engine.optimizer.load_state_dict(state)


def gradient_of_two_phases(engine: Any) -> None:
    engine.close()  # the names stay
    loss = mean(engine.model(DATA[0]), DATA[1])
    [(param, _)] = engine.optimizer.backward(loss, parameters=[NAME])
    assert param is engine.model.blocks[0].weight
    engine.optimizer.apply_gradients([(param, torch.ones(2))])


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        *((not_finite, kind) for kind in OPTIMIZERS),
        *((state_of_another_shape, kind) for kind in ("our Lamb", "our Lars")),
        *((state_that_does_not_fit, kind) for kind in ("our Lamb", "our Lars", "our AdamW")),
        *((gradient_of_two_phases, kind) for kind in ("our Lamb", "our AdamW")),
    ],
)
def test_messages_of_an_engine_name_parameters(act: Callable[[Any], None], kind: str) -> None:
    engine = prepared(kind)
    require_names(said(lambda: act(engine)))


def test_trust_ratios_have_names() -> None:
    engine = prepared("our Lamb")
    engine.train_step(*DATA)
    assert set(engine.trust_ratios()) == {name for name, _ in engine.model.named_parameters()}


def test_local_updates_name_them_too(ranks: Pool) -> None:
    for message in ranks.run(_local):
        require_names(message)


def _local(rank: int, size: int) -> str:
    model = Model()
    optimizer = tw.optim.Lamb(model.parameters(), lr=0.01)
    with tw.local_sgd(model, optimizer, tw.LocalSGD(2)):
        pairs = [(model.blocks[0].weight, torch.ones(2))]
        return said(lambda: optimizer.apply_gradients(pairs))


def test_an_attached_optimizer_names_them_as_the_model_inside(ranks: Pool) -> None:
    for message in ranks.run(_attached):
        require_names(message)


def _attached(rank: int, size: int) -> str:
    torch.manual_seed(0)
    model = Model()
    ddp = DistributedDataParallel(model)
    optimizer = tw.optim.DGCMomentum(model.parameters(), lr=0.01, min_numel=8)
    optimizer.attach(ddp)
    model.blocks[0].weight.register_hook(lambda grad: grad * float("nan"))

    def act() -> None:
        for _ in range(10):
            mean(ddp(DATA[0]), DATA[1]).backward()
            optimizer.step()
            optimizer.zero_grad()

    return said(act)


@pytest.mark.parametrize("name", ["dgc", "lamb", "lars", "low_rank", "localsgd"])
def test_fields_that_replace_the_method_go_by_the_model(name: str, ranks: Pool) -> None:
    for message in ranks.run(_with_field, name):
        require_names(message)


def _with_field(rank: int, size: int, name: str) -> str:
    kind = "torch's AdamW" if name == "lamb" else "torch's SGD"
    config = {"lamb": tw.LAMB(), "lars": tw.LARS()}.get(name, FIELDS[name])  # patterns want names
    engine = prepared(kind, tw.DistributedStrategy(**{name: config}))
    if rank == 1:
        engine.model.blocks[0].weight.register_hook(lambda grad: grad * float("nan"))

    def act() -> None:
        for _ in range(10):
            engine.train_step(*DATA)
        engine.flush()

    return said(act)
