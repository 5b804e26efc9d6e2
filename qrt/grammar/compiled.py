"""Grammars: compiled grammars, made in threads and kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from qrt.grammar.matcher import Matcher, Root
from qrt.grammar.parser import STACK, parser_of
from qrt.grammar.spec import Grammar
from qrt.grammar.vocabulary import Vocabulary

KEPT = 128
LANES = 4
THREADS = 2
_starting = threading.Lock()  # the size of stacks is a setting of the whole process


class Grammars:
    """The grammars of an engine. Many threads may use it; its own end with it.

    Copies of a root share its lexer behind a lock: two masks of one root are never made at once, and each may
    wait for the other (measured: up to 15 ms beside an ambiguous grammar, 0.1 ms beside another root). So a
    grammar that is asked for again gets up to `LANES` roots, which its matchers take turns with.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._threads = deep_threads(THREADS, "grammar")
        self._lanes: OrderedDict[Grammar, _Lanes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, grammar: Grammar) -> Future[Matcher]:
        """Return a matcher at its beginning, at once if the grammar is kept; or what `parser_of` raises."""
        made: Future[Matcher] = Future()
        self._root(grammar).add_done_callback(lambda root: _hand_over(root, made))
        return made

    def _root(self, grammar: Grammar) -> Future[Root]:
        with self._lock:
            lanes = self._lanes.setdefault(grammar, _Lanes())
            self._lanes.move_to_end(grammar)
            if len(self._lanes) > KEPT:
                self._lanes.popitem(last=False)
            lanes.roots = [root for root in lanes.roots if not _is_spoiled(root)]
            if len(lanes.roots) < min(LANES, 1 + lanes.given // 2):
                lanes.roots.append(self._threads.submit(self._compiled, grammar))
            lanes.given += 1
            ready = [root for root in lanes.roots if root.done()] or lanes.roots
            return ready[lanes.given % len(ready)]

    def _compiled(self, grammar: Grammar) -> Root:
        return Root(parser_of(grammar, self._vocabulary), self._vocabulary)


@dataclass
class _Lanes:
    """The roots of a grammar, and how many matchers they have given."""

    roots: list[Future[Root]] = field(default_factory=list)
    given: int = 0


def _is_spoiled(root: Future[Root]) -> bool:
    return root.done() and (root.cancelled() or root.exception() is not None or root.result().spoiled)


def _hand_over(root: Future[Root], made: Future[Matcher]) -> None:
    if root.cancelled():
        made.cancel()
    elif error := root.exception():
        made.set_exception(error)
    else:
        made.set_result(root.result().matcher())


def deep_threads(count: int, name: str, stack: int = STACK) -> ThreadPoolExecutor:
    """Return running threads whose stacks are deep enough for the library's recursion."""
    pool, together = ThreadPoolExecutor(count, name), threading.Barrier(count + 1)
    with _starting:
        before = threading.stack_size(stack)
        try:
            for _ in range(count):
                pool.submit(together.wait)  # each waits for the others, so that each has a thread of its own
            together.wait()
        finally:
            threading.stack_size(before)
    return pool
