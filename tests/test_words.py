"""Errors keep one form, `NAME: expected A, got B; remedy`; names and the first texts are short."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONGEST_NAME = 60  # characters of a test's name
MOST_WORDS = 25  # of a sentence or a cell in what a stranger reads first
FIRST_TEXTS = ["README.md", *(f"docs/{name}.md" for name in (
    "index", "quickstart", "calibrate", "serve", "kv-cache", "architecture",
))]  # fmt: skip
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


def sentences(page: str) -> Iterator[str]:
    """Yield the sentences and table cells of a Markdown text; code is one word, a link its text."""
    page = re.sub(r"```.*?```|<!--.*?-->", "", page, flags=re.S)
    page = re.sub(r"`[^`]*`", "code", page)
    page = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)
    page = re.sub(r"^\s*([-*]|\d+\.) |^#+ .*$", "\n\n", page, flags=re.M)  # items and headings stand alone
    for block in page.split("\n\n"):
        for row in re.findall(r"^\s*\|.*$", block, flags=re.M):
            yield from row.strip().strip("|").split("|")
        yield from re.split(r"(?<=[.!?:])\s+", re.sub(r"^\s*\|.*$", "", block, flags=re.M))


def too_long(page: str) -> list[str]:
    """Return the sentences and cells of more than MOST_WORDS words."""
    return [" ".join(one.split()) for one in sentences(page) if len(one.split()) > MOST_WORDS]


@pytest.mark.parametrize("name", FIRST_TEXTS)
def test_what_is_read_first_has_short_sentences(name):
    assert not too_long((ROOT / name).read_text())


def test_a_long_sentence_is_found():
    long = "word " * 26
    assert too_long(f"Short. {long}. Short.") and too_long(f"| a | {long} |") and too_long(f"- {long}")
    assert not too_long(f"{'word ' * 20}. {'word ' * 20}.\n\n```\n{long}\n```\n`{long}`")
