"""When exchanges are over: event by event as by the formulas, and what goes wrong is said."""

import time
from dataclasses import replace

import numpy as np
import pytest

from tests.api import (
    Broadcast,
    Deal,
    Entries,
    Gather,
    Jitter,
    Lines,
    Method,
    Reduce,
    Trouble,
    Vote,
    Whole,
    finished,
    homes,
    simulate,
    sites,
    switch,
)
from tests.api import network_Network as Network
from tests.drawn_orders import seconds_of_drawn_orders

QUIET = Jitter(0.0, np.random.default_rng(0))
NUMELS = (4096,) * 40


def over(collective: object, lines: Lines, *, idle_s: float = 0.0, events: bool = True) -> float:
    """Of all ranks that come at once; the last one."""
    members = np.arange(lines.ranks)[None, :]
    found = finished(
        collective,  # type: ignore[arg-type]
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
def test_events_and_formulas_agree_where_all_are_alike(
    ranks: int, latency_s: float, nbytes: int
) -> None:
    """1e-9: thousands of additions in another order."""
    lines, network = switch(ranks, 1e8, latency_s), Network(1e8, latency_s, ranks)
    each = nbytes // (ranks - 1)
    for collective, closed_s in [
        (Gather(nbytes), network.all_gather_s(nbytes)),
        (Reduce(nbytes), network.all_reduce_s(nbytes)),
        (Deal((each,) * ranks), network.all_to_all_s(each * (ranks - 1))),
        (Vote(each), network.all_to_all_s(each * (ranks - 1))),
    ]:
        assert over(collective, lines, events=False) == closed_s
        assert over(collective, lines) == pytest.approx(closed_s, rel=1e-9)


def event_queue(edges: list[tuple[float, float]], begin: list[float], nbytes: int) -> list[float]:
    """A gather round a ring, half by half of each message, in plain Python: (bytes a second,
    latency) from each rank to the next."""
    size = len(begin)
    over = [[at, at] for at in begin]
    free = list(begin)
    for _ in range(1, size):
        for half in range(2):
            before, there = [each[half] for each in over], [0.0] * size
            for rank, (rate, latency_s) in enumerate(edges):
                to = (rank + 1) % size
                ready = before[to] + latency_s
                free[rank] = max(before[rank], free[rank], ready) + nbytes / 2 / rate
                there[to] = free[rank] + latency_s
            for rank, each in enumerate(over):
                each[half] = max(there[rank], free[rank])
    return [max(each) for each in over]


def test_ring_of_unlike_lines_equals_a_queue_of_its_messages() -> None:
    lines = sites(7, 3, bit_s=1e9, near_s=1e-4, site_bit_s=2e7, far_s=0.03).slowed(4, 30.0)
    begin = np.linspace(0.0, 0.5, 7)[None, :]
    edges = lines.edges(np.arange(7)[None, :])
    kinds = [edges.kinds[i] for i in edges.which[0]]
    assert len({kind.latency_s for kind in kinds}) == 2
    found = finished(Gather(50_000), lines, np.arange(7)[None, :], begin, jitter=QUIET)
    expected = event_queue(
        [(kind.bytes_s, kind.latency_s) for kind in kinds],
        (begin[0] + lines.call_s).tolist(),
        50_000,
    )
    np.testing.assert_allclose(found[0], expected, rtol=1e-12)


@pytest.mark.parametrize("ranks", [4, 8, 16])
@pytest.mark.parametrize("speed", [0.5, 0.8, 1.0, 1.25, 2.0, 5.0])
def test_lines_that_receive_faster_or_slower_than_they_send(ranks: int, speed: float) -> None:
    rate = 1e6 / Network(8e6, 0.0, 2).bytes_s
    lines = homes(ranks, 8e6 * rate, 0.0)
    lines = replace(lines, down_bit_s=lines.up_bit_s * speed, call_s=0.0)
    took = over(Deal((1_000_000,) * ranks), lines)
    assert took == pytest.approx(seconds_of_drawn_orders(ranks, speed), rel=0.06)


def test_one_slow_line_between_fast_ones_has_no_pause() -> None:
    lines = switch(8, 1e8, 0.0).slowed(3, 10.0)
    slow = Network(1e7, 0.0, 2)
    assert over(Deal((1_000_000,) * 8), lines) == pytest.approx(slow.transfer_s(7e6), rel=0.03)


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("nbytes", [24, 3_000_000])
def test_events_and_the_formula_of_a_broadcast_agree_where_a_tree_is_full(
    ranks: int, nbytes: int
) -> None:
    network = Network(1e8, 0.01, ranks)
    found_s = over(Broadcast(nbytes), switch(ranks, 1e8, 0.01))
    assert found_s == pytest.approx(network.broadcast_s(nbytes), rel=1e-9)


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
    assert slow.given.tolist() == calm.given.tolist()


def test_delay_hides_results_in_time() -> None:
    hidden = Method(NUMELS, Whole(4, "gather"), k_steps=8, delay=4)
    plain = Method(NUMELS, Whole(4, "gather"), k_steps=8)
    lines = switch(8, 4e6, 1e-3)
    wire_s = Network(4e6, 1e-3, 8).all_gather_s(plain.rounds(NUMELS, 8)[0][0].nbytes)  # type: ignore[union-attr]
    assert 1 < wire_s < 4
    seconds = [simulate(m, lines, step_s=1.0, steps=40).seconds for m in (hidden, plain)]
    exposed_s = max(0.0, wire_s - 2)
    assert seconds[0] == pytest.approx(40 + 4 + 5 * exposed_s, rel=1e-3), "a last delay"
    assert seconds[1] == pytest.approx(40 + 5 * wire_s, rel=0.05)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "nodes"])
def test_ten_thousand_ranks_take_less_than_a_minute(name: str) -> None:
    lines = sites(10_000, 100, bit_s=1e9, near_s=2e-4, site_bit_s=1e9, far_s=0.02)
    begin_s = time.process_time()
    outcome = simulate(METHODS[name], lines, step_s=1.0, steps=1)
    assert time.process_time() - begin_s < 60
    assert outcome.error is None
    assert outcome.seconds > 2 * 9999 * 2 * 0.02, "two agreements go round a ring"
