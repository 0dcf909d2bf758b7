"""Lines between sites, from a table of round trips and rates."""

import csv
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from thinwire.tools.planning.network import Network

_COLUMNS = ("from", "to", "ms", "mbit")
_AT_HOME_S, _AT_HOME_BIT_S = 1e-4, 1e10
"""Latency and rate inside a site, where the table has none."""


@dataclass(frozen=True)
class Matrix:
    """Lines between the sites of a file of `_COLUMNS`: round trips in ms, rates in Mbit/s."""

    sites: tuple[str, ...]
    lines: Mapping[frozenset[str], Network]

    @classmethod
    def read(cls, path: Path) -> "Matrix":
        """Read a file; raise ValueError if it is not one, or lacks a pair."""
        named = f"matrix={str(path)!r}"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{named} cannot be read: {error}") from error
        rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
        if tuple(rows.fieldnames or ()) != _COLUMNS:
            raise ValueError(
                f"{named} must begin with {','.join(_COLUMNS)} (two sites, their round trip in ms, "
                f"their rate in Mbit/s), got {rows.fieldnames}"
            )
        lines = dict[frozenset[str], Network]()
        for row in rows:
            try:
                ms, mbit = float(row["ms"]), float(row["mbit"])
            except (TypeError, ValueError):
                ms = mbit = -1.0
            if not (row["from"] and row["to"] and 0 <= ms < inf and 0 < mbit < inf):
                raise ValueError(f"{named}, line {rows.line_num}: no line between two sites: {row}")
            lines[frozenset((row["from"], row["to"]))] = Network(1e6 * mbit, ms / 2000, 2)
        sites = tuple(dict.fromkeys(site for pair in lines for site in sorted(pair)))
        for site in sites:
            lines.setdefault(frozenset((site,)), Network(_AT_HOME_BIT_S, _AT_HOME_S, 2))
        for pair in itertools.combinations(sites, 2):
            if frozenset(pair) not in lines:
                raise ValueError(f"{named} has no line between {' and '.join(sorted(pair))}")
        if len(sites) < 2:
            raise ValueError(f"{named} has {len(sites)} sites; two are needed")
        return cls(sites, lines)

    def network(self, workers: int) -> Network:
        """Return the network of all ranks, as many on each site."""
        alike, over = divmod(workers, len(self.sites))
        if over or not alike:
            few = max(1, alike) * len(self.sites)
            raise ValueError(
                f"workers={workers} of {len(self.sites)} sites: give as many to each, as {few} does"
            )
        choose = itertools.combinations if alike == 1 else itertools.combinations_with_replacement
        return self._slowest(choose(self.sites, 2), workers)

    def groups(self, workers: int) -> Iterator[tuple[tuple[str, ...], Network]]:
        """Yield sites in an order, and the network whose nodes are equal groups of near ones."""
        alike = workers // len(self.sites)
        for sites in range(1, len(self.sites)):
            found = self._near(sites)
            if sites * alike == 1 or any(len(group) != sites for group in found):
                continue
            first = [group[0] for group in found]
            pairs = itertools.chain(*(itertools.product(group, group) for group in found))
            node = self._slowest(pairs, sites * alike)
            between = self._slowest(itertools.combinations(first, 2), workers, node)
            yield tuple(itertools.chain(*found)), between

    def _near(self, most: int) -> list[list[str]]:
        """Return groups of at most so many sites, the nearest ones first together."""
        groups = [[site] for site in self.sites]
        for pair in sorted(self.lines, key=lambda pair: self.lines[pair].latency_s):
            ends = [group for group in groups if pair & {*group}]
            if len(ends) > 1 and len(ends[0] + ends[1]) <= most:
                ends[0] += ends[1]
                groups.remove(ends[1])
        return groups

    def _slowest(
        self, pairs: Iterable[tuple[str, str]], ranks: int, node: Network | None = None
    ) -> Network:
        lines = [self.lines[frozenset(pair)] for pair in pairs]
        bit_s = min(line.bit_s for line in lines)
        return Network(bit_s, max(line.latency_s for line in lines), ranks, node=node)
