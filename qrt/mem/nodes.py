"""Node and Match: what the tree of the prefix cache consists of, and what a lookup finds in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from qrt.mem.slots import Ints

# The first token of a key; directly below the root, together with the salt if there is one.
Edge = int | tuple[str, int]


@dataclass(eq=False, slots=True)
class Node:
    """An edge and its end: the tokens `key` [n] after the parent's, and their `slots` [n].

    `windows` has their slots [n] in each window group, NONE for those without one.
    """

    key: Ints
    slots: Ints
    windows: list[Ints] = field(default_factory=list)
    parent: Node | None = None
    edge: Edge = 0  # its key among the parent's children
    children: dict[Edge, Node] = field(default_factory=dict)
    ref: int = 0  # locks whose path contains this node
    last_use: int = 0  # never earlier than a child's
    queued: bool = False  # whether the eviction queue has an entry for it


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a lookup; valid until the tree changes.

    node       the node in which it ends
    within     how many tokens of `node` belong to it
    length     number of its tokens
    unlocked   how many of them are evictable now
    salt       the salt of the lookup
    """

    node: Node
    within: int
    length: int
    unlocked: int
    salt: str | None = None


def path_of(node: Node) -> Iterator[Node]:
    """Yield the nodes from `node` up to the root, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent
