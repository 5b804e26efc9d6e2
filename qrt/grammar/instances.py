"""Instances: whether a JSON schema that refers to itself has a finite one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from qrt.grammar.keywords import names_in, places_in, schemas, target, types_of

WORK = 200_000  # schemas put together, 0.3 s; of what takes more nothing is said
_CHOICES = ("anyOf", "oneOf")
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))

# Schemas that a value fits all together: each by its id, and which of `_CHOICES` have been made in it.
Node = frozenset[tuple[int, frozenset[str]]]
_NONE: frozenset[str] = frozenset()


def close_endless(root: Any) -> bool:
    """Write false, in place, for the schemas in `root` that no finite value fits; return whether it has one.

    An answer that began such a part would never end.
    """
    if not any("$ref" in each for each in schemas(root)):
        return True
    places = [place for each in schemas(root) for place in places_in(each)]
    instances = Instances(root)
    (first,) = instances.finite([root])
    inner = instances.finite([holder[key] for holder, key in places])
    for (holder, key), has_end in zip(places, inner, strict=True):
        if not has_end:
            holder[key] = False
    return first


class Instances:
    """Tells which schemas inside a schema some finite value fits.

    A value fits where its type allows one: an object needs values of what it requires, an array of its first
    items. Whether numbers and texts have a value is not asked; the compiler knows.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._named = names_in(root)
        self._by_id: dict[int, Any] = {}
        self._some: dict[tuple[int, frozenset[str] | None], Any] = {}  # what `_some_value` has made
        self._left = WORK
        self._ways: dict[
            Node, list[tuple[Node, ...]]
        ] = {}  # each way to a value needs values of all its nodes

    def finite(self, each: list[Any]) -> list[bool]:
        """Return whether some finite value fits each of these schemas; True where that is not known."""
        nodes = [self._node([schema]) for schema in each]
        fit = self._fitting([node for node in nodes if node is not None])
        return [node is not None and (fit is None or node in fit) for node in nodes]

    def _fitting(self, waiting: list[Node]) -> set[Node] | None:
        """Return which nodes fit, of these and of all that they need; None if they are too many."""
        while waiting:
            node = waiting.pop()
            if node in self._ways:
                continue
            if self._left < 0:
                return None
            self._ways[node] = [way for way in self._ways_of(node) if way is not None]
            waiting += chain.from_iterable(self._ways[node])
        if self._left < 0:
            return None
        fit: set[Node] = set()
        before = -1
        while before < len(fit):
            before = len(fit)
            for node in reversed(self._ways):  # what a node needs comes behind it, as a rule
                if any(fit.issuperset(way) for way in self._ways[node]):
                    fit.add(node)
        return fit

    def _node(self, given: list[Any], made: Node = frozenset()) -> Node | None:
        """Return schemas with those that they refer to or hold by allOf.

        None if one of them is false, or leads to itself without a value in between.
        """
        found, known = set(made), {key for key, _ in made}
        around: set[int] = set()  # schemas that lead to the present one
        waiting = [(schema, True) for schema in given]
        self._left -= len(made)
        while waiting and self._left >= 0:
            schema, begins = waiting.pop()
            self._left -= 1
            if schema is False or (begins and id(schema) in around):
                return None
            if not isinstance(schema, dict) or (begins and id(schema) in known):
                continue
            if not begins:
                around.discard(id(schema))
                continue
            self._by_id[id(schema)] = schema
            found.add((id(schema), _NONE))
            known.add(id(schema))
            around.add(id(schema))
            waiting.append((schema, False))
            inner = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
            waiting += [(each, True) for each in (self._target(schema), *inner)]
        return frozenset(found)

    def _target(self, schema: Mapping[str, Any]) -> Any:
        return target(self._root, schema.get("$ref"), self._named)

    def _ways_of(self, node: Node) -> Iterator[tuple[Node, ...] | None]:
        for key, made in node:
            schema = self._by_id[key]
            for choice in _CHOICES:
                if choice not in made and isinstance(schema.get(choice), list):
                    rest = node - {(key, made)} | {(key, made | {choice})}
                    options = (self._node([option], rest) for option in schema[choice])
                    yield from ((option,) for option in options if option is not None)
                    return
        together = [self._by_id[key] for key, _ in node]
        given = [types for each in together if (types := types_of(each)) is not None]
        allowed = _TYPES.intersection(
            *(types | {"integer"} if "number" in types else types for types in given)
        )
        if any("const" in each or "enum" in each for each in together) or allowed - {"array", "object"}:
            yield ()
            return
        if "object" in allowed:
            required = _required(together)
            needed = [self._values(together, name) for name in required]
            if _least(together, "minProperties") > len(required):
                needed.append([self._some_value(each, required) for each in together])
            yield self._needs(needed)
        if "array" in allowed:
            yield self._needs([self._items(together, place) for place in range(_first_items(together))])

    def _needs(self, needed: list[list[Any]]) -> tuple[Node, ...] | None:
        nodes = [self._node(each) for each in needed]
        return None if None in nodes else tuple(node for node in nodes if node is not None)

    def _values(self, together: list[Any], name: str) -> list[Any]:
        """Return the schemas of a property's value."""
        found = []
        for schema in together:
            named = schema.get("properties")
            if isinstance(named, dict) and name in named:
                found.append(named[name])
            elif schema.get("patternProperties"):
                found.append(self._some_value(schema, None))
            else:
                found.append(schema.get("additionalProperties", True))
        return found

    def _some_value(self, schema: dict[str, Any], required: frozenset[str] | None) -> Any:
        """Return a schema that the value of a property fits which is none of those in `required`.

        None: one that is not in `properties`. Which patterns its name fits is not asked.
        """
        key = (id(schema), required)
        if key not in self._some:
            named, patterns = (schema.get(each) for each in ("properties", "patternProperties"))
            options = [*patterns.values()] if isinstance(patterns, dict) else []
            options.append(schema.get("additionalProperties", True))
            if required is not None and isinstance(named, dict):
                options += [value for name, value in named.items() if name not in required]
            self._some[key] = True if True in options else {"anyOf": options}
        return self._some[key]

    def _items(self, together: list[Any], place: int) -> list[Any]:
        """Return the schemas of an array's item."""
        found = []
        for schema in together:
            first, rest = schema.get("prefixItems", ()), schema.get("items", True)
            if isinstance(rest, list):  # older drafts
                first, rest = rest, schema.get("additionalItems", True)
            found.append(first[place] if place < len(first) else rest)
        return found


def _required(together: list[Any]) -> frozenset[str]:
    lists = (each.get("required") for each in together)
    return frozenset(
        name for each in lists if isinstance(each, list) for name in each if isinstance(name, str)
    )


def _least(together: list[Any], keyword: str) -> int:
    given = (each.get(keyword) for each in together)
    return max((count for count in given if isinstance(count, int)), default=0)


def _first_items(together: list[Any]) -> int:
    """Return how many first items are worth a look: beyond those of `prefixItems` all are alike."""
    firsts = (each.get(key) for each in together for key in ("prefixItems", "items"))
    longest = max((len(first) for first in firsts if isinstance(first, list)), default=0)
    return int(min(_least(together, "minItems"), longest + 1))
