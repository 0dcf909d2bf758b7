"""On a better line no strategy takes longer."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api import candidates, cost_of, matrices
from tests.api import network_Network as Network
from tests.api import work_Work as Work

RATES = (1e4, 1e6, 2e7, 1e8, 3e8, 1e9, 1e10, 4e11)
LATENCIES_S = (0.0, 1e-6, 5e-4, 0.02, 0.1, 1.0)
SETTINGS = 9


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_better_line_never_takes_longer(data: st.DataObject) -> None:
    workers = data.draw(st.sampled_from((2, 3, 4, 8, 17, 64, 1000)), "workers")
    step_s = data.draw(st.sampled_from((1e-4, 0.01, 0.35, 5.0)), "step_s")
    offered = st.sampled_from(list(candidates(workers)))
    chosen = data.draw(st.lists(offered, min_size=SETTINGS, max_size=SETTINGS), "chosen")
    params = data.draw(st.floats(0, 13).map(lambda digits: int(10**digits)), "params")
    slow, fast = sorted(data.draw(st.sampled_from(RATES), "rate") for _ in range(2))
    short, far = sorted(data.draw(st.sampled_from(LATENCIES_S), "latency") for _ in range(2))
    lines = [
        Network(rate, late, workers) for rate, late in ((fast, short), (slow, short), (slow, far))
    ]
    work = Work(params, matrices(params), step_s)
    for name, recipe, document in chosen:
        seconds = [cost_of(document or {}, recipe.name, work, line).step_s for line in lines]
        for less_s, more_s in itertools.pairwise(seconds):
            assert less_s <= more_s * (1 + 1e-12), name
