"""Counting instead of timing."""

import sys

import pytest


@pytest.fixture
def count_lines():
    """`count_lines(f, *args)` -> (lines of Python run inside f, its result)."""

    def count(function, *args, **kwargs):
        lines = 0

        def trace(frame, event, arg):
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            result = function(*args, **kwargs)
        finally:
            sys.settrace(before)
        return lines, result

    return count
