"""Errors keep one form, `NAME: expected A, got B; remedy`, and names of tests are short."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONGEST_NAME = 60  # characters of a test's name
SOURCES = [path for top in ("qrt", "calibrate", "eval") for path in sorted((ROOT / top).rglob("*.py"))]


def strings(node: ast.AST) -> Iterator[str]:
    """Yield the literal text under a node, in the order of the source; "{}" stands for a value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.FormattedValue):
        yield "{}"
    else:
        for child in ast.iter_child_nodes(node):
            yield from strings(child)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each exception that is made, raised here or returned to who raises it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name.endswith(("Error", "Exception")):
                yield node.lineno, "".join(strings(node))


def wrong_order(message: str) -> bool:
    """Return whether a message says what came before it says what was expected, or never says that."""
    first = re.search(r"\b(expected|got|wanted)\b", message)
    late = re.search(r"\b(is|of|has|to|with|:) \{\}[^;{}]*[,;] expected", message)
    return bool(first is not None and first[1] != "expected" or "wanted" in message or late)


def test_errors_say_what_was_expected_first():
    found = [(path, *message) for path in SOURCES for message in messages(path.read_text())]
    assert len(found) > 300
    wrong = [f"{path}:{line}: {text}" for path, line, text in found if wrong_order(text)]
    assert not wrong, "write `NAME: expected A, got B; remedy`:\n" + "\n".join(wrong)


def test_the_other_order_is_found():
    source = 'raise ConfigError(f"n: got {n}, " "wanted 1")\nraise E.ConfigError(f"n: expected 1, got {n}")'
    assert [(line, wrong_order(text)) for line, text in messages(source)] == [(1, True), (2, False)]
    assert wrong_order("n: got 5") and wrong_order("expected 1, wanted 2") and not wrong_order("no file x")
    assert wrong_order("n is {}, expected 1") and not wrong_order("file {}: n: expected 1, got {}")


def test_names_of_tests_are_short():
    found = [
        (path.relative_to(ROOT), node.name)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert len(found) > 1000
    assert not [f"{path}: {name}" for path, name in found if len(name) > LONGEST_NAME]
