"""Many tensors in one call give the bits that one call for each of them gives."""

import inspect

import pytest
import torch

from tests import api
from tests.precision import same_bits

CPU = torch.device("cpu")
SIZES = [1, 2, 63, 64, 65, 129, 1000, 8193, 29_000, 70_000]


@pytest.fixture(params=[1, 3])
def few_threads(request, monkeypatch):
    """Small parts, so that small tensors are cut and shared out as large ones are."""
    monkeypatch.setattr(api.threads, "SMALLEST", 64)
    monkeypatch.setattr(api.numba_body, "_SMALLEST_ROOM", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


def folds_of(state_dtype, grad_dtype, *, momentum, nesterov, seed=0):
    generator = torch.Generator().manual_seed(seed)
    folds, ks = [], []
    for place, numel in enumerate(SIZES * 2):
        residual, buffer = (
            torch.randn(numel, generator=generator).to(state_dtype) for _ in range(2)
        )
        grad = torch.randn(numel, generator=generator).to(grad_dtype)
        if place % 5 == 1:
            residual, buffer, grad = (
                torch.full_like(residual, -0.7),
                torch.zeros_like(buffer),
                torch.zeros_like(grad),
            )
        if place % 7 == 3:
            grad[numel // 2] = float("nan") if place % 2 else float("inf")
        folds.append(
            api.Fold(
                grad, residual, buffer if momentum is not None else None, momentum or 0.0, nesterov
            )
        )
        ks.append(max(1, numel // (1000, 100, 4, 1)[place % 4]))
    return folds, ks


def copies(folds):
    return [
        f._replace(
            residual=f.residual.clone(), momentum_buffer=None if f[2] is None else f[2].clone()
        )
        for f in folds
    ]


def rule(fold):
    return api.FoldRule(fold.momentum, fold.nesterov)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (None, False)])
@pytest.mark.parametrize(
    ("state_dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.usefixtures("few_threads")
def test_list_is_proposed_and_committed_as_its_tensors(state_dtype, grad_dtype, momentum, nesterov):
    folds, ks = folds_of(state_dtype, grad_dtype, momentum=momentum, nesterov=nesterov)
    many = api.propose_list(folds, ks)
    one_by_one = [api.propose(*fold[:3], k, rule(fold)) for fold, k in zip(folds, ks, strict=True)]
    for mine, other in zip(many, one_by_one, strict=True):
        assert mine.finite == other.finite
        assert same_bits(mine.indices, other.indices)
        assert same_bits(mine.values, other.values)
    places = [place for place, proposal in enumerate(many) if proposal.finite]
    assert 0 < len(places) < len(folds)
    folds = [folds[place] for place in places]
    sent = [(many[place].indices, many[place].values.float() * 1.01) for place in places]
    twins = copies(folds)
    api.commit_list_(folds, sent, [77 * place for place in places])
    for twin, part, place in zip(twins, sent, places, strict=True):
        api.commit_(*twin[:3], *part, rule(twin), seed=77 * place)
    for fold, twin in zip(folds, twins, strict=True):
        assert same_bits(fold.residual, twin.residual)
        assert fold[2] is None or same_bits(fold[2], twin[2])


def test_tensors_of_all_kinds_may_stand_in_one_list():
    kinds = [
        (torch.float32, torch.float32, 0.9),
        (torch.float64, torch.float32, 0.5),
        (torch.bfloat16, torch.float16, 0),
    ]
    lists = [
        folds_of(a, b, momentum=m, nesterov=False, seed=i) for i, (a, b, m) in enumerate(kinds)
    ]
    mixed = [
        (fold, k)
        for pair in zip(*(zip(*one, strict=True) for one in lists), strict=True)
        for fold, k in pair
    ]
    folds, ks = map(list, zip(*mixed, strict=True))
    for proposal, fold, k in zip(api.propose_list(folds, ks), folds, ks, strict=True):
        other = api.propose(*fold[:3], k, rule(fold))
        assert (proposal.finite, proposal.indices.tolist()) == (
            other.finite,
            other.indices.tolist(),
        )
        assert same_bits(proposal.values, other.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sources", [1, 2, 3, 5])
def test_steps_along_the_mean_equal_the_sparse_sum(dtype, sources):
    generator = torch.Generator().manual_seed(sources)

    def part(numel):
        count = int(torch.randint(0, min(numel, 300) + 1, (), generator=generator))
        return torch.randperm(numel, generator=generator)[:count].sort().values, torch.randn(
            count, generator=generator
        )

    params = [torch.randn(numel, generator=generator).to(dtype) for numel in SIZES]
    parts = [[part(param.numel()) for _ in range(sources)] for param in params]
    rates = [0.1 * (place + 1) for place in range(len(params))]
    expected = [param.clone() for param in params]
    for param, own, rate in zip(expected, parts, rates, strict=True):
        touched, total = api.sum_sparse(own, dtype)
        param[touched] -= total.div_(sources).mul_(rate)
    api.step_along_list_(params, parts, rates, sources, [dtype] * len(params))
    for param, other in zip(params, expected, strict=True):
        assert same_bits(param, other)


@pytest.mark.parametrize("name", [name for name in vars(api.Kernels) if not name.startswith("_")])
def test_bodies_have_one_signature(name):
    wanted = list(inspect.signature(getattr(api.Kernels, name)).parameters)[1:]
    for body in (api.numba_body, api.reference):
        assert list(inspect.signature(getattr(body, name)).parameters) == wanted


def parts_of(layout, generator, *, zeros):
    parts = []
    for place, slot in enumerate(layout.slots):
        count = max(0, slot.k - place % 3)
        values = torch.randn(count, generator=generator)
        values[:: 3 if zeros else count + 1] = 0
        if not zeros and count:
            values[0] = 1.5
        parts.append(
            (torch.randperm(slot.numel, generator=generator)[:count].sort().values, values)
        )
    return parts


@pytest.mark.parametrize("part", ["", "a share"])
@pytest.mark.parametrize("bits", api.VALUE_BITS)
def test_a_message_of_many_tensors_joins_their_codes(bits, part):
    slots = tuple(
        api.Slot(numel, max(1, numel // divisor)) for numel in SIZES for divisor in (1, 3, 100)
    )
    layout = api.Layout(slots, bits, part)
    for zeros in (False, True):
        parts = parts_of(layout, torch.Generator().manual_seed(bits), zeros=zeros)
        message, sent = api.message_pack(layout, 3, 1, parts)
        read = api.message_unpack(layout, message, step=3, bucket=1, source=0).parts
        whole, at = [(*one, its) for one, its in zip(read, sent, strict=True)], api.HEADER_BYTES
        for slot, its, decoded in zip(slots, parts, whole, strict=True):
            single = api.Layout((slot,), bits, part)
            own, (own_sent,) = api.message_pack(single, 3, 1, [its])
            (own_read,) = api.message_unpack(single, own, step=3, bucket=1, source=0).parts
            code = own[api.HEADER_BYTES :]
            expected = code, *own_read, own_sent
            found = message[at : at + code.numel()], *decoded
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
            at += code.numel()


def test_parts_longer_than_their_slots_are_refused():
    layout = api.Layout((api.Slot(9, 1),), 1)
    with pytest.raises(ValueError, match="more entries than its slot"):
        api.message_pack(layout, 0, 0, [(torch.tensor([1, 2]), torch.ones(2))])


def test_autograd_is_informed_of_hidden_changes():
    folds, ks = folds_of(torch.float32, torch.float32, momentum=0.9, nesterov=False)
    chosen = [(fold, k) for fold, k in zip(folds, ks, strict=True) if fold.grad.isfinite().all()]
    folds, ks = map(list, zip(*chosen, strict=True))
    before = [fold.residual._version for fold in folds]
    proposals = api.propose_list(folds, ks)
    api.commit_list_(folds, [(p.indices, p.values) for p in proposals], [0] * len(folds))
    assert all(
        fold.residual._version > version for fold, version in zip(folds, before, strict=True)
    )
    assert all(fold.grad._version == 0 for fold in folds)


def test_tensors_without_memory_or_in_the_memory_of_others_are_distinguished():
    whole = torch.zeros(10)
    assert api.share_memory([whole[:6], whole[5:]])
    assert not api.share_memory([whole[:5], whole[5:], torch.zeros(0)])
    freed = torch.zeros(10)
    freed.untyped_storage().resize_(0)
    assert api.has_address(whole, torch.float32)
    assert not api.has_address(freed, torch.float32)
