"""Of a test of many parameters, some runs in which each two values come together."""

from itertools import combinations


def covering(runs):
    """Return the numbers of few runs that have every pair of values that any run has.

    Each run is a set of values, {(name, value), ..}. The one with the most pairs that are still missing comes
    next, the first of several.
    """
    pairs = [set(combinations(sorted(run), 2)) or {tuple(run)} for run in runs]
    missing, taken = set().union(*pairs), []
    while missing:
        best = max(range(len(pairs)), key=lambda number: len(pairs[number] & missing))
        taken.append(best)
        missing -= pairs[best]
    return taken


def numbered(runs):
    """Return runs {name: value} as sets {(name, number of the value)}, for `covering`."""
    seen = {}
    return [
        {(name, seen.setdefault((name, repr(value)), len(seen))) for name, value in run.items()}
        for run in runs
    ]
