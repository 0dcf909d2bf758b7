"""The command-line application and its number parser."""

from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter, Token

from thinwire._version import __version__
from thinwire.tools.network.netns import seconds_of

app = App(
    name="thinwire",
    version=__version__,
    help="Train neural networks over ordinary networks.",
    help_epilogue="Example: thinwire compare --workers 2 --link 100mbit --steps 200",
    help_format="markdown",
    suppress_keyboard_interrupt=False,  # the command ends its workers and says so
    # a flag that is off by default needs no word, and no option that turns it off
    default_parameter=Parameter(
        negative="", show_default=lambda value: str(value) if value else None
    ),
)


def _whole_number(_type: object, tokens: Sequence[Token]) -> int:
    """Convert a token to an integer; cyclopts by itself would round 1.5."""
    typed = tokens[0].value
    try:
        return int(typed)
    except ValueError:
        raise ValueError(f"{typed!r} is not a whole number") from None


def _seconds(_type: object, tokens: Sequence[Token]) -> float:
    """Convert a token to seconds."""
    typed = tokens[0].value
    try:
        return float(typed)
    except ValueError:
        known = seconds_of(typed)
        meant = "" if known is None else f"; did you mean {known:g}?"
        raise ValueError(f"{typed!r} is not a number of seconds{meant}") from None


Names = Annotated[tuple[str, ...], Parameter(consume_multiple=True)]
Seconds = Annotated[float, Parameter(converter=_seconds)]
"""A number of seconds, without a unit."""
Count = Annotated[int, Parameter(converter=_whole_number)]
"""An integer argument; fractions are refused."""
