import pytest

from tests.api import Link, parse_latency, parse_rate, tbf_settings


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100mbit", 1e8),
        ("1.5 gbit", 1.5e9),
        (" 500KBIT ", 5e5),
        (".5mbit", 5e5),
        ("10kbit", 1e4),
        ("30gbit", 3e10),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "seconds"), [("10ms", 0.01), ("0", 0.0), ("0ms", 0.0), ("250us", 2.5e-4), ("1s", 1.0)]
)
def test_latencies(text: str, seconds: float) -> None:
    assert parse_latency(text) == pytest.approx(seconds, rel=1e-12)


def test_links_without_a_rate() -> None:
    assert Link.parse("none") == Link(None)
    assert Link.parse("loopback") == Link(None, emulated=False)
    assert Link.parse("none").seconds(1e9) == 0


def test_a_link_prints_as_it_was_typed() -> None:
    typed = ["100mbit", "1gbit", "64kbit", "none", "loopback"]
    assert [str(Link.parse(text)) for text in typed] == typed
    assert str(Link.parse("20mbit", "10ms")) == "20mbit + 10ms"


def test_a_link_of_two_rates_is_as_fast_as_the_slower_one() -> None:
    line = Link.parse(None, "20ms", up="10mbit", down="100mbit")
    assert (line.rate_bit_s, line.receiving.rate_bit_s, line.latency_s) == (1e7, 1e8, 0.02)
    assert str(line) == "10mbit up and 100mbit down + 20ms"
    for up, down in (("10mbit", "100mbit"), ("100mbit", "10mbit")):
        assert Link.parse(up=up, down=down).seconds(1_250_000) == 1.0
    assert Link.parse() == Link.parse("100mbit")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((None, "10mbit", None), "up='10mbit' is given without down"),
        ((None, None, "10mbit"), "down='10mbit' is given without up"),
        (("1mbit", "1mbit", "2mbit"), "omit it"),
        ((None, "1mbit", "fast"), "down='fast' is not a rate"),
        ((None, "none", "1mbit"), "up='none' is not a rate"),
    ],
)
def test_directions_that_cannot_be(given: tuple[str | None, ...], says: str) -> None:
    link, up, down = given
    with pytest.raises(ValueError, match=says):
        Link.parse(link, up=up, down=down)


def test_bursts_are_large_enough_for_the_timer_and_small_against_a_message() -> None:
    assert tbf_settings(1e9)["burst"] >= 256_000
    assert tbf_settings(1e9)["rate"] == 125_000_000
    assert tbf_settings(1e6)["burst"] <= 4_000
    for rate in (1e4, 1e6, 1e8, 3e10):
        settings = tbf_settings(rate)
        assert settings["limit"] >= settings["burst"] + 30_000
