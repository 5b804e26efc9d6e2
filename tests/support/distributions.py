"""What a requirement brings: distributions and the packages that they hold, as installed here."""

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def extras(*names: str) -> list[str]:
    """The requirements of qrt and these extras."""
    optional = PROJECT["optional-dependencies"]
    return [*PROJECT["dependencies"], *(line for name in names for line in optional[name])]


def needs(requirements: Iterable[str]) -> dict[str, bool]:
    """Name -> whether it is installed, of each distribution that `requirements` bring, in turn."""
    found: dict[str, bool] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(line), "") for line in requirements]
    while waiting:
        need, extra = waiting.pop()
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(need.name)
        for wanted in {(name, extra) for extra in ("", *need.extras)} - seen:
            seen.add(wanted)
            try:
                lines = requires(name) or []
                found[name] = True
            except PackageNotFoundError:
                lines, found[name] = [], False
            waiting += [(Requirement(line), wanted[1]) for line in lines]
    return found


@cache
def packages() -> dict[str, set[str]]:
    """Package -> the distributions that hold it, of all that is installed."""
    return {name: set(map(canonicalize_name, owners)) for name, owners in packages_distributions().items()}


@cache
def packages_of(*names: str) -> set[str]:
    """Packages of qrt's own requirements and those of these extras; named as their owner if not installed."""
    wanted = needs(extras(*names))
    missing = {name.replace("-", "_") for name, installed in wanted.items() if not installed}
    return {package for package, owners in packages().items() if owners & set(wanted)} | missing
