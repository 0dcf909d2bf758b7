"""Which tensors travel together, when they may leave, and when before an agreement."""

import random

from tests.api import GradientPattern, Readiness


def test_every_order_launches_every_bucket_once_and_in_order() -> None:
    buckets = [["h"], ["g", "f", "e"], ["d", "c"], ["b", "a"]]
    chance = random.Random(3)
    for _ in range(200):
        order = [name for bucket in buckets for name in bucket]
        chance.shuffle(order)
        order = order[: chance.randint(0, len(order))]
        readiness, launched, seen = Readiness(buckets), [], set()
        for name in order:
            # a tensor may come twice, and others do not matter
            for again in (name, "unknown", name):
                launched += list(readiness.mark(again))
            seen.add(name)
            # as many as are complete from the front on, and no more
            assert len(launched) == next(
                (i for i, b in enumerate(buckets) if not seen.issuperset(b)), len(buckets)
            )
        assert launched == list(range(len(launched)))


def test_two_equal_steps_make_it_steady_and_every_disappointment_doubles_that() -> None:
    steady = GradientPattern()
    everything = set("abc")
    steps: list[tuple[tuple[str, str, str], set[str] | None]] = [
        (("cc", "cc", "00"), None),
        (("cc", "cc", "00"), {"a", "b"}),
        (("cc", "cc", "00"), {"a", "b"}),
        (("cc", "cc", "cc"), None),  # another parameter takes part
        (("cc", "cc", "cc"), everything),
        (("cc", "cc", "Cc"), None),  # a row-sparse gradient on one rank
        (("cc", "cc", "CC"), None),
        (("cc", "cc", "CC"), None),
        (("cc", "cc", "cc"), None),
        (("cc", "cc", "cc"), everything),
    ]
    for kinds, expected in steps:
        steady.observe(dict(zip("abc", kinds, strict=True)))
        assert steady.names == expected
    for needed in (4, 8):
        steady.reset()
        assert steady.names is None
        for step in range(1, needed + 1):
            steady.observe(dict.fromkeys("abc", "cc"))
            assert (steady.names is not None) == (step >= needed)
