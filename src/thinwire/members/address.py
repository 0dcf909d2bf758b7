"""Addresses as users write them: 10.0.0.1:29400, [fd00::1]:29400, tcp://host:29400."""

import re
from typing import NamedTuple

__all__ = ["Address", "parse_address"]

_SCHEME = "tcp://"
_FORM = re.compile(r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<plain>[^:\[\]]+)):(?P<port>[0-9]{1,5})")


class Address(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(name: str, text: str, *, scheme: bool) -> Address:
    """The address that a text names.

    Args:
        name: What errors call it.
        text: HOST:PORT, an IPv6 address in brackets.
        scheme: Whether tcp:// must come before it.

    Raises:
        ValueError: It is no such text, or the port is beyond 65535, or 0 where one is to be
            reached.
    """
    example = f"{_SCHEME if scheme else ''}10.0.0.1:29400"
    rest = text.removeprefix(_SCHEME) if scheme else text
    found = _FORM.fullmatch(rest)
    lowest = 1 if scheme else 0  # who listens may take any port that is free
    if found is None or (scheme and rest == text) or not lowest <= int(found["port"]) <= 0xFFFF:
        raise ValueError(
            f"{name}={text!r} is no address such as {example}; IPv6 addresses are in brackets: "
            f"{_SCHEME if scheme else ''}[fd00::1]:29400"
        )
    return Address(found["bracketed"] or found["plain"], int(found["port"]))
