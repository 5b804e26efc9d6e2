"""Take a seeded sample of data rows in bounded memory: data are read once, and only the sample is kept."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

from qrt.text.data.rows import DataRow


@dataclass(frozen=True)
class Sample:
    """Rows in the order of the data.

    seen    rows that were read
    whole   whether the sample is all of the data
    """

    rows: list[DataRow]
    seen: int
    whole: bool


def take(rows: Iterable[DataRow], budget: int, seed: int, limit: int | None = None) -> Sample:
    """Take a random sample of rows with at least `budget` characters in all, or all rows if they have less.

    Every row gets a random number from `seed`, and the rows with the smallest numbers are kept. So a larger
    budget keeps all rows of a smaller one. Reading ends after `limit` characters.
    """
    numbers = random.Random(seed)
    kept: list[tuple[float, int, int, DataRow]] = []  # a heap, the largest number first
    seen = held = passed = 0
    whole = True
    for row in rows:
        if limit is not None and passed >= limit:
            whole = False
            break
        size = size_of(row.value)
        heappush(kept, (-numbers.random(), seen, size, row))
        seen, held, passed = seen + 1, held + size, passed + size
        while held - kept[0][2] >= budget:
            held -= heappop(kept)[2]
    taken = {index: row for _, index, _, row in kept}
    found = [
        row if row.ends or index + 1 in taken or index + 1 == seen else replace(row, ends=True)
        for index, row in sorted(taken.items())
    ]
    return Sample(found, seen, whole and len(found) == seen)


def size_of(value: Any) -> int:
    """Return roughly how many characters a row has."""
    if isinstance(value, str):
        return len(value) + 1
    if isinstance(value, Mapping):
        return 1 + sum(map(size_of, value.values()))
    return 1 + sum(map(size_of, value)) if isinstance(value, list) else 1
