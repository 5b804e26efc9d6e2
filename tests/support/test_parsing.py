"""Threads that parse Python at the same time."""

import ast
import gc
import inspect
import time
from concurrent.futures import ThreadPoolExecutor

SOURCE = inspect.getsource(ast)


def test_threads_parse_while_garbage_is_collected():
    """A collector that lets other threads run in the middle of a tree."""

    def yield_turn(*args):
        time.sleep(1e-5)

    gc.callbacks.append(yield_turn)
    try:
        with ThreadPoolExecutor(3) as threads:
            trees = [threads.submit(ast.parse, SOURCE) for _ in range(12)]
            assert {len(tree.result().body) for tree in trees} == {len(ast.parse(SOURCE).body)}
    finally:
        gc.callbacks.remove(yield_turn)
