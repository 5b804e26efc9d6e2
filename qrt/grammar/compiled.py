"""Grammars: compiled grammars, made in threads and kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from qrt.grammar.matcher import Matcher, Root
from qrt.grammar.parser import STACK, parser_of
from qrt.grammar.spec import Grammar
from qrt.grammar.vocabulary import Vocabulary

KEPT = 128
THREADS = 2
_starting = threading.Lock()  # the size of stacks is a setting of the whole process


class Grammars:
    """The grammars of an engine. Many threads may use it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._threads = deep_threads(THREADS, "grammar")
        self._roots: OrderedDict[Grammar, Future[Root]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, grammar: Grammar) -> Future[Matcher]:
        """Return a matcher at its beginning, at once if the grammar is kept; or what `parser_of` raises."""
        made: Future[Matcher] = Future()
        self._root(grammar).add_done_callback(lambda root: _hand_over(root, made))
        return made

    def _root(self, grammar: Grammar) -> Future[Root]:
        with self._lock:
            root = self._roots.get(grammar)
            if root is None or _is_spoiled(root):
                root = self._roots[grammar] = self._threads.submit(
                    lambda: Root(parser_of(grammar, self._vocabulary), self._vocabulary)
                )
            self._roots.move_to_end(grammar)
            if len(self._roots) > KEPT:
                self._roots.popitem(last=False)
            return root

    def close(self) -> None:
        """End the threads; what waits is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)


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
