"""Frontends times methods: what must hold for all of them is said once."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.api import Group
from tests.laws.frontends import (
    GRADIENTS,
    PARAMETERS,
    AttachedStep,
    Case,
    Followed,
    Frontend,
    LocalBlock,
    LocalEngine,
    OwnStep,
    WithEngine,
    bits_of,
    flat,
    own,
    trained,
)
from tests.one_bit import OneBit
from tests.ranks import Pool


@dataclass(frozen=True)
class Row:
    """One way to train by one method."""

    frontend: type[Frontend]
    case: Case = field(default_factory=Case)
    size: int = 2

    @property
    def rides(self) -> bool:
        """True if the facts of ranks ride on dense sums, which nobody can refuse for all."""
        fields = self.case.fields
        return fields is not None and fields.keys() <= {"amp"} and not self.case.options


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


DGC = {
    "nodes": Row(OwnStep, Case(dgc={"node_size": 2, "exchange": "gather"}), 4),
    "nodes, split": Row(OwnStep, Case(dgc={"node_size": 2, "exchange": "split"}), 4),
    "split": Row(OwnStep, Case(dgc={"node_size": 1, "exchange": "split"}), 3),
    "bfloat16": Row(OwnStep, Case(dgc={"state_dtype": "bfloat16"})),
    "schedule, limited": Row(
        OwnStep,
        Case(lr=tw.schedules.ExponentialDecay(0.1, 0.5, 4), dgc={"local_grad_clip_norm": 0.5}),
    ),
    "ramp": Row(OwnStep, Case(dgc={"sparsity": (0.5, 0.75, 0.9), "rampup_step": 6}, merge=2)),
}
COMPRESSED = tw.DGC(rampup_begin_step=2, sparsity=(0.75,), min_numel=64)
AMP = tw.AMP("bfloat16", tw.DynamicLossScale(init_loss_scale=2.0**10, scale_window=4))
ONE_BIT = {"compression": OneBit()}
ENGINES = {
    "dense": Case(fields={}),
    "dense, merged": Case(fields={}, merge=3),
    "dense, adam": Case(fields={}, optimizer=adam),
    "dense, before": Case(fields={}, options={"verify": "before"}),
    "dgc, merged": Case(merge=3),
    "dgc, adam": Case(fields={"dgc": COMPRESSED}, optimizer=adam),
    "dgc, adam, nodes": Case(
        fields={"dgc": replace(COMPRESSED, node_size=2, exchange="split")}, optimizer=adam
    ),
    "low rank": Case(fields={"low_rank": tw.LowRank(2, begin_step=2, min_numel=64)}),
    "low rank, adam": Case(
        fields={"low_rank": tw.LowRank(2, begin_step=2, min_numel=64)}, optimizer=adam
    ),
    "one bit": Case(fields=ONE_BIT),
    "quantized, adam": Case(fields={"compression": tw.Quantized(4)}, optimizer=adam),
    "sparse, split": Case(fields={"compression": tw.Sparse(0.75, exchange="split")}),
    "amp, merged": Case(fields={"amp": AMP}, merge=3),
    "amp, dgc, lamb, merged": Case(
        fields={"amp": AMP, "dgc": COMPRESSED, "lamb": tw.LAMB()}, optimizer=adam, merge=2
    ),
}
SENDING: dict[str, Row] = {
    **{way.__name__: Row(way) for way in GRADIENTS},
    **{
        f"{way.__name__}, {name}": replace(row, frontend=way)
        for name, row in DGC.items()
        for way in (OwnStep, AttachedStep, WithEngine)
    },
    "OwnStep, mesh": Row(OwnStep, Case(sharded=True), 4),
    "WithEngine, mesh": Row(WithEngine, Case(sharded=True), 4),
    "WithEngine, one bit, mesh": Row(WithEngine, Case(sharded=True, fields=ONE_BIT), 4),
    **{
        f"WithEngine, {name}": Row(WithEngine, case, 4 if "nodes" in name else 2)
        for name, case in ENGINES.items()
    },
}
"""Which exchange gradients."""
SHARDED = Case(sharded=True, local=tw.LocalSGD(5, compression=tw.Quantized(4)), steps=24)
LOW_RANK = tw.LowRank(2, begin_step=0, min_numel=64)
CONFIGS = {
    "plain": tw.LocalSGD(6),
    "outer": tw.LocalSGD(5, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True),
    "sparse": tw.LocalSGD(5, compression=tw.Sparse(0.9)),
    "sparse, split": tw.LocalSGD(5, compression=tw.Sparse(0.5, exchange="split")),
    "quantized": tw.LocalSGD(5, compression=tw.Quantized(2)),
    "quantized, split": tw.LocalSGD(5, compression=tw.Quantized(4, exchange="split")),
    "fragments and delay": tw.LocalSGD(
        8, fragments=2, delay=3, outer_momentum=0.5, compression=tw.Sparse(0.8)
    ),
    "quantized, fragments and delay": tw.LocalSGD(
        8, fragments=2, delay=3, compression=tw.Quantized(decay=0.9)
    ),
    "low rank, fragments and delay": tw.LocalSGD(8, fragments=2, delay=3, compression=LOW_RANK),
    "delay and state": tw.LocalSGD(6, delay=4, average_state=True),
    "adaptive": tw.AdaptiveLocalSGD(4, begin_step=0),
    "adaptive, sparse": tw.AdaptiveLocalSGD(3, max_k_steps=6, compression=tw.Sparse(0.5)),
    "nodes": tw.LocalSGD(5, node_size=2, compression=tw.Sparse(0.9)),
    "nodes, sparse, split": tw.LocalSGD(
        5, node_size=2, compression=tw.Sparse(0.75, 4, 1.0, "all", exchange="split")
    ),
    "nodes, quantized": tw.LocalSGD(5, node_size=2, compression=tw.Quantized(2)),
    "nodes, low rank, fragments and delay": tw.LocalSGD(
        8, fragments=2, delay=3, node_size=2, compression=LOW_RANK
    ),
}
AVERAGING: dict[str, Row] = {
    **{way.__name__: Row(way) for way in PARAMETERS},
    "LocalBlock, mesh": Row(LocalBlock, SHARDED, 4),
    "LocalEngine, mesh": Row(LocalEngine, SHARDED, 4),
    **{
        f"{way.__name__}, {name}": Row(
            way, Case(local=config, steps=24), 4 if "nodes" in name else 2
        )
        for name, config in CONFIGS.items()
        for way in (LocalBlock, LocalEngine)
    },
}
"""Which average parameters."""


def rows(names: Iterable[str]) -> list[Any]:
    """As parameters: of each method one way after the other is fast; four ranks are slow ones."""
    methods: dict[str, list[str]] = {}
    for name in names:
        methods.setdefault(name.partition(", ")[2], []).append(name)
    fast = {*methods.get("", ())}
    for at, (method, ways) in enumerate(methods.items()):
        if "nodes" in method or "mesh" in method:
            fast |= {way for way in ways if way.startswith(("OwnStep", "LocalBlock"))}
        else:
            fast.add(ways[at % len(ways)])
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in fast)) for name in names]


@pytest.mark.parametrize("at", [5, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", rows([*SENDING, *AVERAGING]))
def test_a_run_that_was_stopped_goes_on_bit_for_bit(ranks: Pool, name: str, at: int) -> None:
    """By a state that went through a file; what each rank has for itself counts too."""
    row = {**SENDING, **AVERAGING}[name]
    if row.case.steps == 24:
        at = {5: 9, 8: 16}[at]
    elif issubclass(row.frontend, OwnStep):
        at -= at % row.case.merge  # what a loop accumulates is its own
    check_resumed(ranks, row, at)


def without_nodes(case: Case) -> Case:
    """Where each rank is a source."""
    local = case.local and replace(case.local, node_size=1)
    dgc = case.dgc and {**case.dgc, "node_size": 1}
    fields = case.fields and {
        name: replace(config, node_size=1) for name, config in case.fields.items()
    }
    return replace(case, local=local, dgc=dgc, fields=fields)


@pytest.mark.parametrize(
    "name", rows([name for name in {**SENDING, **AVERAGING} if "nodes" in name])
)
def test_a_node_of_ranks_with_the_same_data_is_one_rank(ranks: Pool, name: str) -> None:
    """Bit for bit: the mean of two equal tensors is exact."""
    row = {**SENDING, **AVERAGING}[name]
    nodes = ranks.run(trained, row.frontend, replace(row.case, alike=2), size=row.size)
    single = ranks.run(trained, row.frontend, without_nodes(row.case), size=row.size // 2)
    assert {each.bits for each in nodes} == {each.bits for each in single}
    assert len({each.bits for each in nodes}) == 1


@pytest.mark.parametrize("late", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["quantized", "with state"])
def test_run_stopped_with_a_result_in_flight_is_exact(ranks: Pool, name: str, late: int) -> None:
    """Wherever the result is, up to the step that takes it."""
    told = {"compression": tw.Quantized(1)} if name == "quantized" else {"average_state": True}
    config = tw.LocalSGD(8, delay=3, outer_lr=0.7, outer_momentum=0.9, **told)
    check_resumed(ranks, Row(LocalBlock, Case(local=config, steps=24)), 8 + late)


def check_resumed(ranks: Pool, row: Row, at: int) -> None:
    # torch orders its buckets after the first backward pass, and a share of a message is a part of
    # one of them
    whole = replace(row.case, wrap_at=at)
    straight = ranks.run(trained, row.frontend, whole, size=row.size)
    resumed = ranks.run(trained, row.frontend, replace(row.case, resume_at=at), size=row.size)
    late = row.case.local is not None and row.case.local.delay
    for one, other in zip(straight, resumed, strict=True):
        assert (one.bits, one.held, one.dropped) == (other.bits, other.held, other.dropped)
        # what was on its way travels twice, an engine compares settings anew, an optimizer counts
        # what this process sends
        if not late and not issubclass(row.frontend, OwnStep):
            loose = {} if row.frontend is LocalBlock else {"rel": 0.2}
            assert one.bytes_sent == pytest.approx(other.bytes_sent, **loose)
    assert len({each.bits for each in straight}) == 1


def poisoned(rank: int, size: int, row: Row, where: str) -> tuple[list[str], list[str], str, Any]:
    """The gradient of one parameter is not a number on the last rank, in one microstep."""
    way = row.frontend(row.case)
    bad, now = row.case.merge * 4, [-1]
    if rank == size - 1:
        way.model.get_parameter(where).register_hook(
            lambda grad: grad * float("nan") if now[0] == bad else grad
        )
    way.train(rank, 0, bad)
    before, now[0] = flat(way.state()), bad
    with pytest.warns(UserWarning) as caught:
        way.train(rank, bad, bad + 1)
        now[0] = -1
        way.train(rank, bad + 1, bad + row.case.merge)
        after = flat(way.state())
        # where facts ride, ranks tell each other in the next update
        way.train(rank, bad + row.case.merge, bad + 2 * row.case.merge)
    way.train(rank, bad + 2 * row.case.merge, 2 * bad + 2 * row.case.merge)
    told = [str(each.message) for each in caught if "dropped" in str(each.message)]
    stats = way.stats()
    way.end()
    assert all(p.isfinite().all() for p in way.model.parameters())
    return told, changed(before, after), bits_of(way.model), stats["dropped_steps"]


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(at for at in {**before, **after} if before.get(at) != after.get(at))


@pytest.mark.fault("NaN in one rank's gradient")
@pytest.mark.parametrize("where", ["2.weight", pytest.param("4.bias", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", rows([name for name in SENDING if not name.endswith("mesh") and "amp" not in name])
)
def test_a_gradient_that_is_not_finite_on_one_rank_drops_the_step_on_all(
    ranks: Pool, name: str, where: str
) -> None:
    row = SENDING[name]
    answers = ranks.run(poisoned, row, where, size=row.size)
    assert len({bits for *_, bits, _ in answers}) == 1
    for told, moved, _, dropped in answers:
        assert dropped == 1
        [text] = told
        assert "step 4 was dropped on every rank: the gradient of parameter" in text
        assert f"{where} on rank {row.size - 1} is not finite" in text
        assert [at for at in moved if "drop" not in at] == []


def always_poisoned(rank: int, size: int, row: Row) -> tuple[int, str]:
    way = row.frontend(row.case)
    if rank == size - 1:
        way.model.get_parameter("2.weight").register_hook(lambda grad: grad * float("nan"))
    merge = row.case.merge
    with warnings.catch_warnings(action="ignore"):
        for done in range(12):
            try:
                way.train(rank, merge * done, merge * (done + 1))
            except tw.errors.NonFinite as error:
                way.close()
                return done, str(error)
    return -1, ""


@pytest.mark.fault
@pytest.mark.parametrize(
    "name",
    [
        *(way.__name__ for way in GRADIENTS),
        "OwnStep, nodes",
        "WithEngine, dgc, merged",
        "WithEngine, dense",
        "WithEngine, dense, before",
    ],
)
def test_ten_dropped_steps_in_a_row_are_an_error_everywhere(ranks: Pool, name: str) -> None:
    for done, text in ranks.run(always_poisoned, SENDING[name], size=SENDING[name].size):
        assert done == 9
        assert "2.weight" in text and "this was dropped step 10 in a row" in text


EVERY = 4


def parted(rank: int, size: int, row: Row, harm: str) -> tuple[int, str]:
    """One bit of what all hold alike becomes another one on rank 1: when it was found."""
    case = replace(row.case, options={"digest_every": EVERY}, frozen="0.bias", steps=24)
    way = row.frontend(case)
    begin, merge = 6 * case.merge, case.merge
    way.train(rank, 0, begin)
    if rank == 1:  # as a fault of memory does it: nobody is told
        words = own(way.model.get_parameter(harm).data).view(-1).view(torch.int32).numpy()
        words[1] ^= 8
    for step in range(4 * EVERY):
        try:
            way.train(rank, begin + merge * step, begin + merge * (step + 1))
        except tw.errors.Diverged as error:
            way.close()
            return step, str(error)
    return -1, ""


@pytest.mark.parametrize("name", rows([*SENDING, *AVERAGING]))
def test_a_bit_that_flips_on_one_rank_is_diverged_on_all(ranks: Pool, name: str) -> None:
    """Of what does not train, and of what does where no rank trains its own."""
    row = {**SENDING, **AVERAGING}[name]
    most = EVERY + (0 if name in SENDING else 8)  # an averaging comes in as many steps
    for harm in ("0.bias", "2.weight") if name in SENDING else ("0.bias",):
        answers = ranks.run(parted, row, harm, size=row.size)
        step, text = answers[0]
        assert answers == [answers[0]] * row.size
        assert 0 <= step <= most, text
        assert harm in text and "between update " in text
        assert "shard of rank " in text or not row.case.sharded


@contextmanager
def damaging(rank: int, victim: int, deals: bool) -> Iterator[None]:
    """A message arrives damaged at one rank; or, where ranks deal parts, from it at the first."""
    gather, deal = Group.all_gather, Group.all_to_all

    def gathered(self: Group, message: Tensor, *, action: str) -> Any:
        pending = gather(self, message, action=action)
        if rank != victim:
            return pending
        rows = pending.wait()
        rows[0, rows.shape[1] // 2] ^= 4
        return type(pending)(lambda: rows)

    def dealt(self: Group, parts: Tensor, lengths: Any, *, action: str) -> Any:
        if rank == victim and deals:
            parts = parts.clone()
            parts[lengths[0] - 1] ^= 4
        return deal(self, parts, lengths, action=action)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Group, "all_gather", gathered))
        stack.enter_context(patch.object(Group, "all_to_all", dealt))
        yield


KEPT = ("/anchors/", "/residuals/", "/outer_momentum/", "/factors/")
"""What an averaging changes, of a state of local updates."""


def damaged(rank: int, size: int, row: Row, deals: bool) -> tuple[str, list[str], str]:
    way, text = row.frontend(row.case), ""
    local = row.frontend in PARAMETERS
    merge = row.case.merge
    begin = {1: 6, 2: 9, 3: 8}[merge]
    way.train(rank, 0, begin)
    # where facts ride, the others learn of it in the next update
    last = begin + (row.case.steps if local else 1 + row.rides * merge)
    for step in range(begin, last):
        with damaging(rank, size // 2, deals):
            try:
                before = flat(way.state())  # waits for what is in flight, which may be damaged
                way.train(rank, step, step + 1)
            except (tw.errors.PayloadCorrupt, tw.errors.PeerLost) as error:
                text = str(error)
                break
    moved = changed(before, flat(way.state()))
    if row.rides:
        return text, moved, ""
    if local:
        way.close()
        return text, [at for at in moved if any(kind in at for kind in KEPT)], ""
    if row.frontend in (OwnStep, AttachedStep, Followed):  # its gradients are those of the loop
        way.model.zero_grad()
        begin -= begin % merge
    way.train(rank, begin, row.case.steps)
    way.end()
    return text, moved, bits_of(way.model)


@pytest.mark.fault
@pytest.mark.parametrize("name", rows([*SENDING, *AVERAGING]))
def test_a_damaged_message_is_refused_by_all_and_nothing_is_applied(ranks: Pool, name: str) -> None:
    """The call can be made again; where facts ride on the sums the ranks end instead."""
    for deals in (True, False) if "split" in name else (True,):
        check_damaged(ranks, name, deals)


def check_damaged(ranks: Pool, name: str, deals: bool) -> None:
    row = {**SENDING, **AVERAGING}[name]
    answers = ranks.run(damaged, row, deals, size=row.size, group_timeout_s=20.0)
    assert len({text for text, *_ in answers}) == 1 or row.rides
    for text, moved, _ in answers:
        assert ("refused" in text or row.rides) and "othing" in text and "was applied" in text
        assert moved == []
    if name in SENDING and not row.rides:
        straight = ranks.run(trained, row.frontend, row.case, size=row.size)
        assert [bits for *_, bits in answers] == [each.bits for each in straight]


@dataclass(frozen=True)
class Set:
    """A setting of the optimizer that becomes another one on rank 1, and a part of what is said."""

    key: str
    value: Any
    says: str


SETTINGS = {
    "rate": Set("lr", 0.3, "learning rates"),
    "sparsity": Set("sparsity", (0.5,), "sparsity"),
    "momentum": Set("momentum", 0.8, "0.8"),
    "decay": Set("weight_decay", 0.1, "0.1"),
    "betas": Set("betas", (0.9, 0.99), "(0.9, 0.99)"),
}


def set_apart(rank: int, size: int, row: Row, what: Set, good: int) -> tuple[str, bool]:
    way = row.frontend(row.case)
    way.train(rank, 0, good * row.case.merge)
    held = bits_of(way.model)
    [group] = getattr(way, "engine", way).optimizer.param_groups  # type: ignore[attr-defined]
    if rank == 1:
        group[what.key] = what.value
    with pytest.raises(tw.errors.Mismatch) as told:
        way.train(rank, good * row.case.merge, (good + 1) * row.case.merge)
    way.close()
    return str(told.value), held == bits_of(way.model)


@pytest.mark.parametrize("good", [1, 6])
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *((way.__name__, key) for way in GRADIENTS for key in ("rate", "sparsity", "momentum")),
        *((f"WithEngine, {name}", "rate") for name in ("dense, merged", "amp, dgc, lamb, merged")),
        ("WithEngine, dense", "decay"),
        ("WithEngine, dense, adam", "betas"),
    ],
)
def test_unlike_setting_changes_nothing(ranks: Pool, name: str, setting: str, good: int) -> None:
    """In mid-training, before and after buckets leave during the backward pass."""
    what = SETTINGS[setting]
    answers = ranks.run(set_apart, SENDING[name], what, good)
    assert len({text for text, _ in answers}) == 1
    for text, same in answers:
        assert what.says in text and what.key.split("_")[0] in text.replace("learning rates", "lr")
        assert same
