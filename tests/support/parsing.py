"""Let one thread parse Python at a time.

Python before 3.11.8 counts the depth of all threads' syntax trees together, so one of two that parse at once
may fail with a SystemError (github.com/python/cpython/issues/106905). pytest parses what it imports, and
Triton's interpreter parses each kernel before its first launch, in the thread of a server.
"""

import ast
import threading
from functools import wraps


def take_turns():
    """Replace `ast.parse` by one that waits until no other thread is in it."""
    parse, lock = ast.parse, threading.RLock()

    @wraps(parse)
    def one_at_a_time(*args, **kwargs):
        with lock:
            return parse(*args, **kwargs)

    ast.parse = one_at_a_time
