"""Where ranks must hold the same, a difference is soon `Diverged` on all of them."""

import itertools
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests import toys
from tests.api import Engine, Group, checksum, traffic
from tests.ranks import Pool
from tests.toys import arriving, descend
from thinwire.optim import DGCMomentum

EVERY = 8


def flip_(tensor: Tensor, place: int, bit: int) -> None:
    """As a fault of memory does it: nobody is told."""
    words = tensor.data.view(-1).view(torch.int32)
    words.numpy()[place] ^= -(2**31) if bit == 31 else 1 << bit


def model_of(seed: int = 3, width: int = 64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 96), nn.Tanh(), nn.Linear(96, 5))


def data(rank: int, step: int, width: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, width, generator=generator), torch.randint(5, (6,), generator=generator)


cross_entropy = nn.functional.cross_entropy
DGC = tw.DGC(sparsity=(0.9,), min_numel=64)
NODES = tw.DGC(sparsity=(0.9,), min_numel=64, node_size=2)


def engine_of(kind: str, model: nn.Module, **given: Any) -> Engine:
    fields = {"nodes": {"dgc": NODES}, "dgc": {"dgc": DGC}, "dgc adamw": {"dgc": DGC}}
    adam = torch.optim.AdamW(model.parameters(), 1e-3) if kind.endswith("adamw") else None
    told = {"digest_every": EVERY, "verify": "before" if kind == "dense, before" else "after"}
    given = {"optimizer": adam, "options": {**told, **given}, **fields.get(kind, {})}
    return toys.engine_of(model, cross_entropy, lr=0.01, momentum=0.9, **given)


def hurt_parameter(engine: Engine) -> None:
    flip_(engine.model[2].weight, 7, 3)


def hurt_moment(engine: Engine) -> None:
    state, layer = engine.optimizer.state, engine.model[2]
    # beside a residual, momentum is this rank's own
    entries = state[layer.bias if "residual" in state[layer.weight] else layer.weight]
    flip_(entries["exp_avg_sq" if "exp_avg_sq" in entries else "momentum_buffer"], 3, 3)


def train_whole(rank: int, size: int, kind: str) -> str:
    engine = engine_of(kind, model_of())
    ema = [p.detach().clone() for p in engine.model.parameters()]
    for step in range(3 * EVERY):
        engine.train_step(*data(rank, step))
        if step == 5:  # on all ranks alike
            with torch.no_grad():
                for p, average in zip(engine.model.parameters(), ema, strict=True):
                    p.copy_(average)
        if step == 9:
            engine.load_state_dict(engine.state_dict())
        if step == 11:
            for entries in engine.optimizer.state.values():
                if "residual" in entries:  # what every rank has for itself may be changed by each
                    with torch.no_grad():
                        entries["residual"].mul_(rank)
                        entries["momentum_buffer"].mul_(rank)
        if step == 12:
            engine.optimizer.param_groups[0]["weight_decay"] = 0.1
        if step == 14:
            for p in engine.model.parameters():
                p.data = p.data.t().contiguous().t() if rank == 1 and p.dim() == 2 else p.data
    return str(engine.step)


@pytest.mark.parametrize("kind", ["adamw", "dgc"])
def test_change_on_purpose_or_of_the_memory_layout_is_no_error(kind: str, ranks: Pool) -> None:
    assert ranks.run(train_whole, kind) == ["24", "24"]


def step_in_another_order(rank: int, size: int, kind: str, steps: int) -> None:
    if kind == "optimizer":
        models = [model_of(), model_of()]
        optimizers = [
            DGCMomentum(m.parameters(), 0.01, min_numel=64, sparsity=(0.9,)) for m in models
        ]
        for step in range(steps + 1):
            for i in (1, 0) if rank == 1 and step == steps else (0, 1):
                descend(optimizers[i], loss_of(models[i], rank, step))
        return
    engines = [engine_of(kind, model_of()) for _ in range(2)]
    for step in range(steps + 1):
        for i in (1, 0) if rank == 1 and step == steps else (0, 1):
            engines[i].train_step(*data(rank, step))


@pytest.mark.parametrize("kind", ["dense", "dgc", "dgc adamw", "optimizer"])
@pytest.mark.parametrize("steps", [0, 5])
def test_engines_stepped_in_other_order_are_a_mismatch(kind: str, steps: int, ranks: Pool) -> None:
    ranks.raise_alike("Mismatch", "order", step_in_another_order, kind, steps)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = data(rank, step)
    return cross_entropy(model(x), y)


def train_locally(rank: int, size: int, harm: str) -> tuple[int, str]:
    model = model_of()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    config = tw.LocalSGD(2, outer_momentum=0.5, compression=tw.Sparse(0.9))
    with tw.local_sgd(model, optimizer, config, digest_every=EVERY) as sync:
        for step in range(6 + EVERY):
            if step == 6 and rank == 1:
                assert sync._averager is not None
                averaging = sync._averager.averaging
                held = {
                    "anchor": averaging.anchors["2.weight"],
                    "outer": averaging.momentum["2.weight"],
                }
                flip_(held[harm], 7, 3)
            try:
                descend(optimizer, loss_of(model, rank, step))
            except tw.errors.Diverged as error:
                sync.close()
                return step, str(error)
    return -1, ""


@pytest.mark.parametrize("harm", ["anchor", "outer"])
def test_bit_flipped_under_local_updates_is_found_at_an_averaging(harm: str, ranks: Pool) -> None:
    first, second = ranks.run(train_locally, harm)
    assert first == second
    assert 6 <= first[0] <= 6 + EVERY, first
    assert "2.weight" in first[1]


def train_with_intervals_that_grow(rank: int, size: int) -> tuple[int, int]:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    config = tw.AdaptiveLocalSGD(init_k_steps=1, max_k_steps=16)
    with tw.local_sgd(model, optimizer, config, digest_every=64) as sync:
        for step in range(200):
            if step == 60:
                optimizer.param_groups[0]["lr"] = 1e-6  # the interval grows as the rate falls
            if step == 70 and rank == 1:
                assert sync._averager is not None
                flip_(sync._averager.averaging.anchors["2.weight"], 7, 3)
            loss = loss_of(model, rank, step)
            sync.observe(loss)
            try:
                descend(optimizer, loss)
            except tw.errors.Diverged:
                sync.close()
                return step, sync.k_steps
    return -1, sync.k_steps


def test_a_long_interval_does_not_put_the_comparison_off(ranks: Pool) -> None:
    first, second = ranks.run(train_with_intervals_that_grow)
    assert first == second
    step, k_steps = first
    assert k_steps == 16
    assert 70 <= step <= 70 + 64 + 16


def save_harmed(rank: int, size: int, harm: str, folder: str) -> tuple[str, int]:
    engine = engine_of("adamw", model_of(), digest_every=64)
    for step in range(4):
        engine.train_step(*data(rank, step))
    engine.save(folder)
    if rank == 1:
        {"parameter": hurt_parameter, "moment": hurt_moment}[harm](engine)
    with pytest.raises(tw.errors.Diverged) as caught:
        engine.save(folder)
    written = len(list(Path(folder).iterdir()))
    engine.load(folder)
    engine.train_step(*data(rank, 4))
    engine.save(folder)
    return str(caught.value), written


@pytest.mark.parametrize("harm", ["parameter", "moment"])
def test_no_checkpoint_is_written_of_unlike_ranks(harm: str, ranks: Pool, tmp_path: Path) -> None:
    """The one before can be loaded, and gone on from, in the same process."""
    for text, written in ranks.run(save_harmed, harm, str(tmp_path)):
        assert "2.weight" in text
        assert written == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_any_bit_counts_and_the_layout_in_memory_does_not() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 5), (70_000,), (1,), (4, 8, 3, 3), (9, 20_001)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    whole = checksum(tensors)
    for tensor in tensors:
        for _ in range(20):
            place = int(torch.randint(tensor.numel(), (), generator=generator))
            bit = int(torch.randint(32, (), generator=generator))
            flip_(tensor, place, bit)
            assert checksum(tensors) != whole
            flip_(tensor, place, bit)
    tensors[3] = tensors[3].to(memory_format=torch.channels_last)
    tensors[4] = tensors[4].t().contiguous().t()
    assert checksum(tensors) == whole
    assert checksum(list(reversed(tensors))) != whole


def test_any_type_and_any_size_has_a_checksum() -> None:
    odd = [
        torch.zeros(0),
        torch.tensor(2.0),
        torch.ones(5, dtype=torch.complex64),
        torch.ones(7).bfloat16(),
    ]
    odd += [
        torch.tensor([True] * 9),
        torch.arange(300_001)[1:].bfloat16(),
        torch.tensor([float("nan")]),
    ]
    assert checksum(odd) == checksum([each.clone() for each in odd])
    assert checksum([]) == 0


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_digest_every_is_a_number_of_updates(value: Any) -> None:
    model = model_of()
    with pytest.raises((TypeError, ValueError), match="digest_every"):
        DGCMomentum(model.parameters(), 0.1, digest_every=value)
    with pytest.raises((TypeError, ValueError), match="digest_every"):
        engine_of("dense", model, digest_every=value)


def overflow_in_the_sum(rank: int, size: int, way: str, early: int) -> tuple[int, float]:
    torch.manual_seed(1)
    model = nn.Linear(40, 30)
    given: dict[str, Any] = {"node_size": 2} if way == "nodes" else {"exchange": way}
    dgc = None if way == "dense" else tw.DGC(sparsity=(0.9,), min_numel=64, value_bits=32, **given)
    engine = toys.engine_of(model, lr=0.01, momentum=0.9, dgc=dgc)
    for step in range(early + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.minimize(
                (model.weight * (3e38 if step == early else 1.0)).sum() + model.bias.sum()
            )
    return int(engine.stats()["dropped_steps"]), float(model.weight.detach().abs().max())


@pytest.mark.fault("values beyond what the wire's numbers hold")
@pytest.mark.parametrize("early", [0, 5])
@pytest.mark.parametrize("way", ["dense", "gather", "split", "nodes"])
def test_finite_gradients_of_infinite_sum_drop_a_step(way: str, early: int, ranks: Pool) -> None:
    first, *others = ranks.run(overflow_in_the_sum, way, early, size=4 if way == "nodes" else 2)
    assert others == [first] * len(others)
    assert first[0] == 1
    assert first[1] < 10


def hurting(rank: int, where: str) -> Any:
    """`Group` whose dense sum of step 3 has a flipped bit on rank 1, or from it."""
    plain = Group.all_gather

    def hurt(content: Tensor, action: str) -> Tensor:
        if rank == 1 and "averaging dense" in action and "step 3," in action:
            flip_(content.view(-1)[: content.numel() // 4 * 4], content.numel() // 8, 5)
        return content

    def leaving(self: Group, content: Tensor, *, action: str) -> Any:
        return plain(self, hurt(content, action), action=action)

    if where == "part":
        return patch.object(Group, "all_gather", leaving)
    return arriving(Group, "all_reduce_" if where == "sum" else "all_gather", hurt)


def flip_in_a_sum(rank: int, size: int, kind: str, where: str) -> None:
    whole = patch.object(
        traffic,
        "_MOST_CHECKSUMMED_BYTES",
        -1 if where == "sum" else traffic._MOST_CHECKSUMMED_BYTES,
    )
    with whole, hurting(rank, where):
        if kind == "local":
            model = model_of()
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            with tw.local_sgd(model, optimizer, tw.LocalSGD(2)):
                for step in range(6):
                    descend(optimizer, loss_of(model, rank, step))
            return
        model = model_of()
        engine = engine_of(kind, model)
        before: Any = None
        try:
            for step in range(6):
                before = [p.detach().clone() for p in model.parameters()]
                engine.train_step(*data(rank, step))
        except tw.errors.PayloadCorrupt:
            # sums ride in the next update, and only one rank sees damage in what it received
            assert engine.step in ((3, 4) if kind == "dense" else (3,))
            assert all(map(torch.equal, before, model.parameters()))
            raise


@pytest.mark.fault("one bit flipped in a message")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *itertools.product(("dense", "dense, before", "dgc", "local"), ("sum", "arriving", "part")),
        ("nodes", "part"),
        ("nodes", "arriving"),
    ],
)
def test_bit_that_flips_in_a_dense_sum_is_found(kind: str, where: str, ranks: Pool) -> None:
    size = 4 if kind == "nodes" else 2
    says = "" if kind == "dense" else "Nothing was applied"
    ranks.raise_alike("PayloadCorrupt", says, flip_in_a_sum, kind, where, size=size)


def flip_at_random(rank: int, size: int, count: int) -> list[tuple[str, int, float]]:
    """Of every flip where it was, after how many updates it was found, -1 if never, and what a
    model holds that was not found."""
    chance = torch.Generator().manual_seed(11)
    places = [
        *itertools.product(("dense", "dgc"), ("parameter", "momentum_buffer")),
        *itertools.product(("adamw", "dgc adamw"), ("parameter", "exp_avg_sq")),
        ("adamw", "exp_avg"),
    ]
    found = []
    for turn in range(count):
        kind, where = places[turn % len(places)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # steps that are dropped
            engine = engine_of(kind, model_of(turn))
            begin = 3 + draw(chance, 6)
            for step in range(begin):
                engine.train_step(*data(rank, step))
            # what is compressed has momentum of its own on each rank
            names = [
                name
                for name, p in engine.model.named_parameters()
                if (kind, where) != ("dgc", "momentum_buffer") or p.numel() < 64
            ]
            name, bit = names[draw(chance, len(names))], draw(chance, 32)
            p = engine.model.get_parameter(name)
            place = draw(chance, p.numel())
            if rank == 1:
                entries = {"parameter": p, **engine.optimizer.state[p]}
                flip_(entries[where], place, bit)
            updates = updates_until_found(engine, rank, begin)
            held = torch.cat([p.detach().double().view(-1) for p in engine.model.parameters()])
            left = float(held.norm()) if updates < 0 else 0.0
            found.append((f"{kind}, {where} {name}[{place}] bit {bit}", updates, left))
    return found


def draw(chance: torch.Generator, below: int) -> int:
    return int(torch.randint(below, (), generator=chance))


def updates_until_found(engine: Engine, rank: int, begin: int) -> int:
    for step in range(begin, begin + EVERY + 2):
        try:
            engine.train_step(*data(rank, step))
        except tw.errors.Diverged:
            return step - begin + 1
    return -1


@pytest.mark.slow
def test_every_bit_that_flips_is_found_within_the_promised_number_of_updates(ranks: Pool) -> None:
    first, second = ranks.run(flip_at_random, 60)  # ten of each place
    assert first == second  # a flip that was not found has faded: models are equal
    late = [each for each in first if not 0 < each[1] <= EVERY]
    assert all("momentum" in each[0] and each[1] == -1 for each in late)
    assert len(late) <= 2


def limited(rank: int, size: int, own_loop: bool) -> str:
    """The error of a model whose forward pass writes into its parameters."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Linear(4, 3))
    if own_loop:
        update = DGCMomentum(model.named_parameters(), 0.1).step
    else:
        update = engine_of("dense", model).apply_gradients
    with pytest.raises(tw.errors.ThinwireError, match=r"0\.weight") as caught:
        for step in range(EVERY):
            model(torch.tensor([rank + step])).square().mean().backward()
            update()
    return str(caught.value)


@pytest.mark.parametrize("own_loop", [False, True])
def test_forward_pass_that_writes_to_parameters_is_the_reason(own_loop: bool, ranks: Pool) -> None:
    first, second = ranks.run(limited, own_loop)
    assert first == second
    assert "Embedding(max_norm=" in first


def raise_after_the_exchange(rank: int, size: int, kind: str) -> tuple[str, str]:
    engine = engine_of(kind, model_of())
    raised = ""
    for step in range(6):
        if step == 4 and rank == 1:

            def fail(*_: object) -> None:
                raise KeyError("a hook of the user's")

            handle = engine.optimizer.register_step_post_hook(fail)
        try:
            engine.train_step(*data(rank, step))
        except KeyError as error:
            raised = error.__notes__[0]
            handle.remove()
        except tw.errors.ThinwireError as error:
            return raised, str(error)
    return raised, ""


@pytest.mark.parametrize("kind", ["dense", "dgc", "dgc adamw"])
def test_optimizer_that_raises_after_the_exchange_is_known_next(kind: str, ranks: Pool) -> None:
    (nothing, first), (told, second) = ranks.run(raise_after_the_exchange, kind)
    assert nothing == ""
    assert "came after the exchange" in told
    assert first == second
    assert "rank 1: the optimizer, or a hook of it, failed after the exchange of update 5" in first


@pytest.mark.parametrize("kind", ["dense", "dgc", "dgc adamw"])
def test_an_optimizer_that_raises_on_one_rank_alone_names_no_other_rank(kind: str) -> None:
    engine = engine_of(kind, model_of())
    engine.optimizer.register_step_post_hook(lambda *_: {}["a hook of the user's"])
    with pytest.raises(KeyError) as first:
        engine.train_step(*data(0, 0))
    with pytest.raises(
        tw.errors.ThinwireError, match="failed after the exchange of update 1"
    ) as second:
        engine.train_step(*data(0, 1))
    for text in (*first.value.__notes__, str(second.value)):
        assert "in part" in text
        assert not any(word in text for word in ("ther ranks", "all ranks", "any rank"))
