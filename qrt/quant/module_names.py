"""Under which names a module is known: to files, to qrt, to transformers and to other engines.

A body lies at the root, in a model with a head, or in one that reads images, and each tool and version has
saved it under another beginning. Everything that writes, reads or matches names of modules asks here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache

REGEX = "re:"  # how targets begin that are regular expressions
HEAD = "lm_head"  # what transformers calls most heads of a vocabulary
# Beginnings of the names of a body's modules.
TOPS = (
    "model.", "", "model.language_model.", "language_model.model.", "language_model.",
    "transformer.", "gpt_neox.",
)  # fmt: skip
TOP = r"((language_)?model\.|transformer\.|gpt_neox\.)*"  # matches each of them
HEADS = (HEAD, "language_model.lm_head", "embed_out")  # the last in files of GPT-NeoX
# How files of mixtures call modules, and how transformers 5 does; the router of Phi 3.5 MoE is the first.
RENAMED = ((".block_sparse_moe.gate", ".mlp.router"), (".block_sparse_moe.", ".mlp."))


def below(module: str) -> str:
    """Return a module's name without the beginning of its body: "layers.0.mlp.up_proj", "lm_head"."""
    found = re.match(TOP, module)
    return module if found is None else module[found.end() :]


def is_head(module: str) -> bool:
    """Return whether a module is the head of a vocabulary, under a name that several models share."""
    return module in HEADS


@lru_cache(maxsize=1 << 16)
def names_of(module: str, *tops: str) -> tuple[str, ...]:
    """Return all names of a module, given one of them, which comes first.

    With `tops` they are those in models whose bodies' names begin so.
    """
    above = ("",) if is_head(module) else tops or TOPS
    return tuple(dict.fromkeys((module, *(top + name for top in above for name in inner_names(module)))))


def inner_names(module: str) -> tuple[str, ...]:
    """Return the names that a module has below the beginning of its body, or as a head."""
    if is_head(module):
        return HEADS
    name = below(module)
    return tuple(dict.fromkeys((name, *(name.replace(old, new) for old, new in RENAMED))))


def patterns_of(modules: Iterable[str]) -> list[str]:
    r"""Return a few regular expressions that mean `modules` and no others, under all their names.

    Names that differ in one part become one: `layers\.(0|1)\.mlp\.(down_proj|up_proj)$`.
    """
    found = {
        tuple(frozenset((part,)) for part in below(name).split("."))
        for module in modules
        for name in inner_names(module)
    }
    for place in range(max(map(len, found), default=0)):
        alike: dict[tuple[object, ...], list[tuple[frozenset[str], ...]]] = defaultdict(list)
        for parts in found:
            alike[len(parts), parts[:place], parts[place + 1 :]].append(parts)
        found = {_merged(names, place) for names in alike.values()}
    inside = (r"\.".join(map(_any_of, parts)) for parts in found)
    return sorted(f"{TOP}{names}$" for names in inside)


def _merged(names: list[tuple[frozenset[str], ...]], place: int) -> tuple[frozenset[str], ...]:
    """Return names that differ in one place alone, as one."""
    first = names[0]
    if place >= len(first):
        return first
    return (*first[:place], frozenset[str]().union(*(parts[place] for parts in names)), *first[place + 1 :])


def _any_of(parts: frozenset[str]) -> str:
    """Return a regular expression of one part of a name."""
    ordered = sorted(parts, key=lambda part: part.zfill(9) if part.isdigit() else part)
    words = "|".join(map(re.escape, ordered))
    return words if len(ordered) == 1 else f"({words})"


def inside_pattern(part: str) -> str:
    """Return a regular expression of a part of a model ("visual", "score") and of all modules in it.

    Engines know what reads images by other names than files do, of which they share one part.
    """
    return rf"(.*\.)?{re.escape(part)}(\.|$)"
