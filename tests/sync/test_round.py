"""One exchange of gradients between real ranks."""

import pytest
import torch
from torch import Tensor

from tests.api import HEADER_BYTES, ArrivedEntries, FoldRule, Group, Proposed, Round, propose
from tests.ranks import Pool
from tests.sync.means import launch

NUMEL, K = 1000, 10


def gradient(rank: int, key: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * rank + key))


def sparse(grad: Tensor) -> Proposed:
    return Proposed(propose(grad, torch.zeros_like(grad), None, K, FoldRule(0.0)), grad.numel(), K)


def exchange(rank: int, size: int, bits: int) -> dict[str, object]:
    one_round = Round(Group(), 3)
    first = {"0": sparse(gradient(rank, 0)), "1": sparse(gradient(rank, 1))}
    launch(one_round, 0, first, {"2": gradient(rank, 2)}, bits=bits)
    rest = {"4": gradient(rank, 4).double(), "5": gradient(rank, 5).half()}
    launch(one_round, 1, {"3": sparse(gradient(rank, 3))}, rest, bits=bits)
    one_round.finish()
    arrived = {key: one_round.arrived[str(key)] for key in range(6)}
    entries = {key: each for key, each in arrived.items() if isinstance(each, ArrivedEntries)}
    return {
        "sent": {key: each.given[str(key)] for key, each in entries.items()},
        "sparse": {key: each.sparse_mean(str(key), torch.float32) for key, each in entries.items()},
        "dense": {
            key: each.mean(
                str(key), gradient(rank, key).to(torch.float64 if key == 4 else torch.float32)
            )
            for key, each in arrived.items()
            if key not in entries
        },
        "keys": {int(name) for name in one_round.names},
    }


@pytest.mark.parametrize("bits", [1, 2, 8, 32])
@pytest.mark.parametrize("size", [0, 3])
def test_mean_equals_that_of_sent_values_on_all_ranks(ranks: Pool, bits: int, size: int) -> None:
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
            torch.testing.assert_close(
                answer["dense"][key].double(), expected, rtol=0, atol=tolerance
            )
    assert answers[0]["keys"] == {0, 1, 2, 3, 4, 5}


def dense_input_survives(rank: int, size: int) -> bool:
    grad = gradient(rank, 0)
    before = grad.clone()
    one_round = Round(Group(), 0)
    launch(one_round, 0, {}, {"0": grad})
    one_round.finish()
    return torch.equal(grad, before)


def test_a_dense_gradient_is_copied_never_changed(ranks: Pool) -> None:
    assert ranks.run(dense_input_survives) == [True, True]


class Liar(Group):
    """A group whose rank 1 sends damaged or foreign bytes."""

    position = -1

    def all_gather(self, message: Tensor, *, action: str):  # type: ignore[no-untyped-def]
        if self.rank == 1 and self.position >= 0:
            message = message.clone()
            message[self.position] ^= 4
        return super().all_gather(message, action=action)


def receive_damage(rank: int, size: int, position: int) -> None:
    group = Liar()
    group.position = position
    one_round = Round(group, 3)
    launch(one_round, 0, {"0": sparse(gradient(rank, 0))}, {}, bits=1)
    one_round.finish()


@pytest.mark.fault("one bit flipped in a message")
@pytest.mark.parametrize("position", [0, 4, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5])
def test_a_damaged_message_is_refused_by_name_on_every_rank(ranks: Pool, position: int) -> None:
    ranks.raise_alike("PayloadCorrupt", "rank 1", receive_damage, position, size=2)


def receive_another_step(rank: int, size: int) -> None:
    one_round = Round(Group(), 3 + rank)
    launch(one_round, 0, {"0": sparse(gradient(rank, 0))}, {}, bits=1)
    one_round.finish()


@pytest.mark.fault("cut, long and forged messages; messages of another step")
def test_a_message_of_another_step_is_refused(ranks: Pool) -> None:
    first, second = ranks.run(receive_another_step, expect_errors=True)
    assert first.type_name == second.type_name == "PayloadCorrupt"
    assert "rank 1" in first.text
    assert "rank 0" in second.text
