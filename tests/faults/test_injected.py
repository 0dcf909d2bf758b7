"""What the others see of a rank that fails at a named point of a step, and what they hold then."""

import warnings
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.api import Group, Pending
from tests.faults.injector import PHASES, Fault, injected
from tests.faults.lines import alike
from tests.faults.training import Seen, Trainer, digest, make, meet_again
from tests.launched import free_port
from tests.ranks import Lost, Pool, Raised
from tests.waiting import PATIENCE_S, time_out

TIMEOUT_S = time_out(6.0)
WAYS = ("dense", "dgc", "local")
LAST = 8
AT = {"dense": 5, "dgc": 5, "local": 4}
"""The call of a step in which something happens to a rank; that of local updates averages."""
NEVER = {
    ("dense", "second sending"),
    ("dense", "before the last agreement"),
    ("local", "second sending"),
}
"""They have one message a step; a dense step has no agreement."""


def train(
    rank: int, size: int, way: str, fault: Fault | None, port: int = 0, timeout: float = TIMEOUT_S
) -> Seen:
    """Train to step `LAST` or to the first error; `port`: over a store that rank 0 hosts there."""
    if port:
        meet_again(rank, size, port)
    trainer, seen = make(way, timeout=timeout), Seen()
    none = Fault("raise", -1, -1, "")
    with warnings.catch_warnings(), injected(fault or none, trainer, rank) as done:
        warnings.simplefilter("ignore", UserWarning)
        for number in range(LAST):
            seen.before = held(trainer)
            try:
                trainer.step(number)
            except Exception as error:
                seen.raised(error)
                break
            seen.updates = number + 1
    seen.after, seen.common = held(trainer), alike(trainer)
    seen.more["done"] = done
    return seen


def held(trainer: Trainer) -> str:
    """What a failed exchange must not change: under local updates not the local step itself."""
    if trainer.sync is None:
        return trainer.digest()
    own = ("parameter ", "buffer ", "exp_avg")
    return digest({n: t for n, t in trainer.tensors().items() if not n.startswith(own)})


def survivors(answers: list[Any], victim: int) -> list[Seen]:
    """The others, which have all raised, as the step before had left them."""
    found = []
    for rank, answer in enumerate(answers):
        if rank == victim:
            continue
        assert isinstance(answer, Seen), answer
        assert answer.error in ("PeerLost", "PeerStalled"), f"{answer.error}: {answer.text}"
        stands = "This rank has made the update before this error" in answer.text
        assert (answer.before == answer.after) != stands, answer.text
        found.append(answer)
    assert len({one.common for one in found}) == 1
    return found


@pytest.mark.fault("SIGKILL in the middle of an exchange")
@pytest.mark.fault("SIGKILL between two buckets of a backward pass")
@pytest.mark.fault("SIGKILL once all is sent, before it is applied")
@pytest.mark.fault("a rank dies between two averagings; a joiner; a stage of a pipeline dies")
@pytest.mark.parametrize(
    ("way", "phase"), [(w, p) for w in WAYS for p in PHASES if (w, p) not in NEVER]
)
def test_a_rank_is_killed_at_every_point_of_a_step(ranks: Pool, way: str, phase: str) -> None:
    """The end of a connection is heard of, and whatever was not agreed on is not applied."""
    fault = Fault("kill", 1, AT[way], phase)
    answers = ranks.run(train, way, fault, size=3, expect_errors=True)
    if isinstance(answers[1], Seen):
        pytest.fail(f"{phase} does not come in a step of {way}: {answers[1]}")
    assert isinstance(answers[1], Lost)
    seen = survivors(answers, 1)
    assert "PeerLost" in {one.error for one in seen}


@pytest.mark.slow
@pytest.mark.fault("SIGKILL in the middle of an exchange")
@pytest.mark.parametrize(
    ("way", "phase", "victim"),
    [
        ("dgc, nodes", "before sending", 3),  # the sum of a node, by one that leads none
        ("dgc, nodes", "second sending", 2),
        ("dgc, split", "before sending", 1),
        ("dgc, split", "second sending", 1),
    ],
)
def test_a_rank_of_nodes_or_with_a_share_is_killed(
    ranks: Pool, way: str, phase: str, victim: int
) -> None:
    fault = Fault("kill", victim, 5, phase)
    answers = ranks.run(train, way, fault, size=4, expect_errors=True)
    assert isinstance(answers[victim], Lost)
    survivors(answers, victim)


@pytest.mark.fault("segmentation fault")
@pytest.mark.fault("a rank ends quietly, with status 0")
@pytest.mark.parametrize("how", ["segfault", "quiet exit"])
def test_a_rank_ends_otherwise(ranks: Pool, how: str) -> None:
    answers = ranks.run(train, "dgc", Fault(how, 1, 5, "once sent"), size=3, expect_errors=True)
    assert isinstance(answers[1], Lost)
    assert answers[1].exit_code == (0 if how == "quiet exit" else -11)
    survivors(answers, 1)


@pytest.mark.fault("SIGKILL of the rank that hosts the store")
def test_the_rank_that_hosts_the_store_is_killed(ranks: Pool) -> None:
    fault = Fault("kill", 0, 5, "once sent")
    answers = ranks.run(train, "dgc", fault, free_port(), size=3, expect_errors=True)
    assert isinstance(answers[0], Lost)
    seen = survivors(answers, 0)
    assert "PeerLost" in {one.error for one in seen}


@pytest.mark.fault("SIGSTOP for 2 s")
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_stops_for_less_than_the_time_out(ranks: Pool, way: str) -> None:
    """Nothing but time is lost."""
    undisturbed = ranks.run(train, way, None, size=3)
    fault = Fault("stop for 2 s", 1, AT[way], "once sent")
    answers = ranks.run(train, way, fault, size=3)
    assert answers[1].more["done"] == ["stop for 2 s"]
    assert [one.common for one in answers] == [one.common for one in undisturbed]
    assert not any(one.error for one in answers)


@pytest.mark.slow
@pytest.mark.fault("the interpreter's lock held for twice the time-out")
def test_a_rank_holds_the_lock_of_the_interpreter_for_twice_the_time_out(ranks: Pool) -> None:
    fault = Fault("hold the lock", 1, 5, "forward")
    answers = ranks.run(train, "dgc", fault, size=3)
    for rank in (0, 2):
        assert answers[rank].error == "PeerStalled"
        assert "rank 1 has sent no heartbeat" in answers[rank].text
        assert answers[rank].before == answers[rank].after
    assert answers[1].family


@pytest.mark.fault("all connections of a rank reset in mid-transfer")
def test_all_connections_of_a_rank_are_reset(ranks: Pool) -> None:
    """On whichever rank, it is an error of the library's, and nothing was applied."""
    fault = Fault("reset", 1, 5, "once sent")
    for answer in ranks.run(train, "dgc", fault, size=3, together=False):
        assert answer.family, answer
        assert answer.error in ("PeerLost", "PeerStalled")
        assert answer.before == answer.after


@pytest.mark.fault("an exception on one rank: in its backward pass, forward pass, or update")
@pytest.mark.parametrize("phase", ["forward", "before it is applied"])
def test_a_rank_raises(ranks: Pool, phase: str) -> None:
    """Its own error there; the others hear of it, or that it did not come."""
    answers = ranks.run(train, "dense", Fault("raise", 1, 5, phase), size=3, expect_errors=True)
    assert not any(isinstance(answer, Lost | Raised) for answer in answers)
    assert "told so by the test" in answers[1].text
    for rank in (0, 2):
        assert answers[rank].family


def flipped(rank: int, size: int, bit: int) -> Seen:
    """One bit of rank 0's header in the agreement of step 5 changes on its way to rank 1."""
    gather, flips = Group._gather, rank == 1

    def launch(self: Group, message: Tensor, action: str, *, control: bool) -> Pending[Tensor]:
        pending = gather(self, message, action, control=control)

        def rows() -> Tensor:
            nonlocal flips
            came = pending.wait()
            if flips and action == "agreeing on step 5":
                flips = False
                came[0, bit // 8] ^= 1 << bit % 8
            return came

        return Pending(rows)

    with patch.object(Group, "_gather", launch):
        return train(rank, size, "dgc", None, timeout=2 * PATIENCE_S)


@pytest.mark.fault("one bit flipped in a message")
@pytest.mark.parametrize("bit", [0, 31, 32, 42, 63, 100, 191])
def test_bit_that_flips_in_the_header_of_an_agreement_is_refused(ranks: Pool, bit: int) -> None:
    """Nobody waits for the time-out. Ranks that have this vote make the update before the error."""
    answers = ranks.run(flipped, bit, size=3, expect_errors=True)
    for answer in answers:
        assert isinstance(answer, Seen), answer
        assert answer.error == "PayloadCorrupt", answer.text
        assert "rank 1" in answer.text
        assert answer.updates in ((5,) if answer is answers[1] else (5, 6))
    assert "from rank 0" in answers[1].text
