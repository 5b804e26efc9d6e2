"""Render a Jinja template in a sandbox with limits.

A chat template comes with its checkpoint and is not trusted. It sees only its arguments and cannot change
them. Loops, sizes asked for in one step, and time are limited. Memory and single operations are not: a text
doubled thirty times by `~` takes gigabytes, and comparing two such lists holds Python's lock, and so stops
the server, until it is done. A sandbox cannot prevent this: a hostile template can stop its own server.
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from qrt.errors import ConfigError

MAX_ITERATIONS = 1_000_000  # in all ranges of a rendering together
MAX_REPEATED = 1_000_000  # characters or items that an operator or an integer argument may ask for


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses what jinja's sandbox refuses, and single steps that make a large result."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse large powers, repetitions of more than MAX_REPEATED items, and wide formats."""
        if operator == "**" and abs(right) > 64:
            raise SecurityError(f"** {right}")
        for sized, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(sized, Sequence) and isinstance(times, int):
                if len(sized) * times > MAX_REPEATED:
                    raise SecurityError(f"a sequence of {len(sized) * times} items")
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
        """Refuse a call with a large number as argument."""
        _check_numbers(*args, *named.values())
        return super().call(context, function, *args, **named)

    def wrap_str_format(self, value: Any) -> Any:
        """Refuse wide formats of a text's method `format` too."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_widths(value.__self__)
        return wrapped


def _check_numbers(*arguments: Any) -> None:
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_REPEATED:
            raise SecurityError(f"an argument of {argument}")


def _check_widths(format: str) -> None:
    if re.search(r"\d{6}|[{*]\s*[:}].*\{", format):
        raise SecurityError("a format with a large or computed width")


class _Generation(Extension):
    """Renders only the body of `{% generation %}`, which marks an assistant's text for training."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """See jinja2.ext.Extension."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _sized(filter: Callable[..., Any]) -> Callable[..., Any]:
    """Make a filter refuse large numbers as arguments."""

    @wraps(filter)  # keeps the attribute that tells jinja what to pass
    def checked(*args: Any, **named: Any) -> Any:
        _check_numbers(*args, *named.values())
        return filter(*args, **named)

    return checked


@lru_cache(maxsize=16)
def compile_template(text: str) -> jinja2.Template:
    """Compile a template, once for all its renderings; jinja2.TemplateError where it is not valid Jinja."""
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    for name in ("center", "indent", "wordwrap", "truncate", "batch", "slice", "round"):
        sandbox.filters[name] = _sized(sandbox.filters[name])
    del sandbox.filters["format"], sandbox.globals["lipsum"]
    sandbox.filters["tojson"] = _tojson
    sandbox.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return sandbox.from_string(text)


def limited_range() -> Callable[..., Iterator[int] | range]:
    """Return a `range` for one rendering, with at most MAX_ITERATIONS in all its ranges together."""
    left = MAX_ITERATIONS

    def limited(*bounds: int) -> range:
        nonlocal left
        numbers = range(*bounds)
        left -= len(numbers)
        if left < 0:
            raise SecurityError(f"more than {MAX_ITERATIONS} iterations")
        return numbers

    return limited


class _OutOfTime(BaseException):
    """Ends a rendering that takes too long; jinja and the template do not catch it."""


def within(seconds: float, render: Callable[[], str]) -> str:
    """Run `render` in a thread; after `seconds` raise ConfigError and end the thread.

    An exception set in the thread ends it between two steps of Python.
    """
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(render())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, name="chat template", daemon=True)
    thread.start()
    thread.join(seconds)
    if not result and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_OutOfTime))
        thread.join(seconds)
        raise ConfigError(f"chat: the template did not end within {seconds:g} s")
    if isinstance(result[0], BaseException):
        raise result[0]
    return str(result[0])
