"""One exchange of gradients between real ranks."""

import pytest
import torch
from torch import Tensor

from tests.ranks import Pool
from thinwire.comm import Group
from thinwire.core.feedback import FoldRule, propose
from thinwire.core.message import HEADER_BYTES
from thinwire.sync.round import Round, SparseGradient

NUMEL, K = 1000, 10


def gradient(rank: int, key: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * rank + key))


def sparse(grad: Tensor) -> SparseGradient:
    return SparseGradient(propose(grad, torch.zeros_like(grad), None, K, FoldRule(0.0)), grad.numel(), K)


def exchange(rank: int, size: int, bits: int) -> dict[str, object]:
    group = Group()
    one_round = Round(group, step=3, value_bits=bits)
    one_round.launch(0, {0: sparse(gradient(rank, 0)), 1: sparse(gradient(rank, 1))}, {2: gradient(rank, 2)})
    one_round.launch(1, {3: sparse(gradient(rank, 3))}, {4: gradient(rank, 4).double(), 5: gradient(rank, 5).half()})
    one_round.finish()
    return {
        "sent": {key: one_round.sent(key) for key in (0, 1, 3)},
        "sparse": {key: one_round.sparse_mean(key, torch.float32) for key in (0, 1, 3)},
        "dense": {key: one_round.dense_mean(key) for key in (2, 4, 5)},
        "keys": one_round.keys,
    }


@pytest.mark.parametrize("bits", [1, 2, 8, 32])
@pytest.mark.parametrize("size", [0, 3])
def test_the_mean_is_that_of_what_was_sent_and_equal_on_all_ranks(ranks: Pool, bits: int, size: int) -> None:
    answers = ranks.run(exchange, bits, size=size)
    world = len(answers)
    for key in (0, 1, 3):
        expected = torch.zeros(NUMEL)
        for answer in answers:  # in rank order, as the specification says
            indices, values = answer["sent"][key]
            expected[indices] += values
        expected /= world
        for answer in answers:
            indices, mean = answer["sparse"][key]
            assert torch.equal(torch.zeros(NUMEL).index_put_((indices,), mean), expected)
    for key in (2, 4, 5):
        expected = sum(gradient(rank, key) for rank in range(world)).double() / world
        tolerance = 1e-6 if key != 5 else 1e-3  # key 5 travels from float16 gradients
        for answer in answers:
            assert torch.equal(answer["dense"][key], answers[0]["dense"][key])
            torch.testing.assert_close(answer["dense"][key].double(), expected, rtol=0, atol=tolerance)
    assert answers[0]["keys"] == {0, 1, 2, 3, 4, 5}


def dense_input_survives(rank: int, size: int) -> bool:
    grad = gradient(rank, 0)
    before = grad.clone()
    one_round = Round(Group(), step=0, value_bits=32)
    one_round.launch(0, {}, {0: grad})
    one_round.finish()
    return torch.equal(grad, before)


def test_a_dense_gradient_is_copied_never_changed(ranks: Pool) -> None:
    assert ranks.run(dense_input_survives) == [True, True]


class Liar(Group):
    """A group whose rank 1 sends damaged or foreign bytes."""

    position = -1

    def gather(self, message: Tensor, *, what: str):  # type: ignore[no-untyped-def]
        if self.rank == 1 and self.position >= 0:
            message = message.clone()
            message[self.position] ^= 4
        return super().gather(message, what=what)


def receive_damage(rank: int, size: int, position: int) -> None:
    group = Liar()
    group.position = position
    one_round = Round(group, step=3, value_bits=1)
    one_round.launch(0, {0: sparse(gradient(rank, 0))}, {})
    one_round.finish()


@pytest.mark.fault
@pytest.mark.parametrize("position", [0, 4, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5])
def test_a_damaged_message_is_refused_by_name_on_every_rank(ranks: Pool, position: int) -> None:
    for answer in ranks.run(receive_damage, position, size=2, expect_errors=True):
        assert answer.type_name == "PayloadCorrupt"
        assert "rank 1" in answer.text


def receive_another_step(rank: int, size: int) -> None:
    one_round = Round(Group(), step=3 + rank, value_bits=1)
    one_round.launch(0, {0: sparse(gradient(rank, 0))}, {})
    one_round.finish()


@pytest.mark.fault
def test_a_message_of_another_step_is_refused(ranks: Pool) -> None:
    first, second = ranks.run(receive_another_step, expect_errors=True)
    assert first.type_name == second.type_name == "PayloadCorrupt"
    assert "rank 1" in first.text
    assert "rank 0" in second.text
