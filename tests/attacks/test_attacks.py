"""A few of the attacks in every test run; `python -m tests.attacks` repeats all of them at random
moments."""

import pytest

from tests.attacks import ATTACKS
from tests.attacks.outcome import Attack
from tests.ranks import Pool

QUICK = [attack for attack in ATTACKS if attack.quick]


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("attack", QUICK, ids=lambda attack: f"{attack.letter}: {attack.name}")
def test_the_attack_is_held(ranks: Pool, attack: Attack) -> None:
    outcome = attack.make(ranks, 7)
    assert outcome.verdict == "held", outcome.detail


def test_without_an_attack_nothing_is_said_and_all_hold_the_same(ranks: Pool) -> None:
    control = next(attack for attack in ATTACKS if attack.name == "control: nothing is done, dgc")
    assert control.make(ranks, 7).verdict == "held"
