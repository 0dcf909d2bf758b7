"""When exchanges are over: event by event as by the formulas, and what goes wrong is said."""

import numpy as np
import pytest

from benchmarks.simulation import Entries, Method, Trouble, Whole, simulate
from benchmarks.simulation_lines import (
    Collective,
    Deal,
    Gather,
    Jitter,
    Lines,
    Reduce,
    Vote,
    finished,
    switch,
)
from thinwire.tools.planning.network import Network

QUIET = Jitter(0.0, np.random.default_rng(0))
NUMELS = (4096,) * 40


def over(
    collective: Collective, lines: Lines, *, idle_s: float = 0.0, events: bool = True
) -> float:
    """Of all ranks that come at once; the last one."""
    members = np.arange(lines.ranks)[None, :]
    found = finished(
        collective,
        lines,
        members,
        np.zeros(members.shape),
        jitter=QUIET,
        idle_s=idle_s,
        event_by_event=events,
    )
    return float(found.max())


@pytest.mark.parametrize("ranks", [2, 3, 16, 200])
@pytest.mark.parametrize("latency_s", [0.0, 1e-4, 0.05])
@pytest.mark.parametrize("nbytes", [24, 20_000, 3_000_000])
def test_events_and_formulas_agree_if_all_alike(ranks: int, latency_s: float, nbytes: int) -> None:
    """1e-9: thousands of additions in another order."""
    lines, network = switch(ranks, 1e8, latency_s), Network(1e8, latency_s, ranks)
    each = nbytes // (ranks - 1)
    cases: list[tuple[Collective, float]] = [
        (Gather(nbytes), network.all_gather_s(nbytes)),
        (Reduce(nbytes), network.all_reduce_s(nbytes)),
        (Deal((each,) * ranks), network.all_to_all_s(each * (ranks - 1))),
        (Vote(each), network.all_to_all_s(each * (ranks - 1))),
    ]
    for collective, closed_s in cases:
        assert over(collective, lines, events=False) == closed_s
        assert over(collective, lines) == pytest.approx(closed_s, rel=1e-9)


METHODS = {
    "dense": Method(NUMELS),
    "gather": Method(NUMELS, Entries(0.99, 1, "gather")),
    "split": Method(NUMELS, Entries(0.99, 1, "split")),
    "nodes": Method(NUMELS, Entries(0.99, 1, "split"), node_size=4),
    "local": Method(NUMELS, Whole(4, "split"), k_steps=8, fragments=2, delay=2),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_slowest_rank_keeps_all_others_waiting(name: str) -> None:
    method, lines = METHODS[name], switch(16, 1e9, 1e-3)
    calm = simulate(method, lines, step_s=1.0, steps=8)
    slow = simulate(method, lines, step_s=1.0, steps=8, trouble=Trouble(slow={5: 1.5}))
    assert slow.steps == calm.steps == 8 + method.delay
    assert slow.seconds == pytest.approx(calm.seconds + 0.5 * slow.steps, abs=0.1)
    assert slow.waited_s[4] > slow.waited_s[5] + 3.0
    assert slow.sent.tolist() == calm.sent.tolist()


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 4])
def test_a_delay_of_three_steps_hides_the_agreements_too(delay: int) -> None:
    """An agreement takes one round trip, whatever the number of ranks."""
    rtt_s, lines = 0.5, switch(8, 1e12, 0.25)
    method = Method((8,), Whole(4, "gather"), k_steps=8, delay=delay)
    outcome = simulate(method, lines, step_s=1.0, steps=8)
    messages_s = max(0.0, 7 * rtt_s - (delay if delay < 3 else delay - 2))
    exposed_s = messages_s + (2 * rtt_s if delay < 3 else 0)
    assert outcome.seconds == pytest.approx(8 + delay + exposed_s, abs=0.01)
    assert outcome.waited_s == pytest.approx(np.full(8, exposed_s), abs=0.01)


def test_a_lost_rank_is_an_error_for_all_others_after_the_time_out() -> None:
    trouble = Trouble(lost={3: 4}, timeout_s=30.0)
    outcome = simulate(
        METHODS["gather"], switch(8, 1e9, 1e-3), step_s=1.0, steps=9, trouble=trouble
    )
    assert outcome.steps == 3
    assert outcome.error == ("step 4: after 30 s all ranks raise: rank 3 did not join the exchange")
    assert 34.0 <= outcome.seconds < 34.5
