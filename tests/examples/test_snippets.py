"""Python in README and docs/ runs as it stands there, on the bundled model."""

import re
from pathlib import Path
from pydoc import locate

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CALIBRATES = re.compile(r"^qrt\.calibrate\(.*\n", re.MULTILINE)  # minutes; test_examples.py does it


@pytest.mark.model
@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/python-api.md"])
def test_first_python_of_a_page_generates(page, capsys):
    code = BLOCK.findall((ROOT / page).read_text())[0]
    exec(CALIBRATES.sub("", code).replace('"tiny-w4"', '"tiny"'), {})
    assert len(capsys.readouterr().out.split()) > 4


def test_python_of_every_page_compiles():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = [(page, code) for page in pages for code in BLOCK.findall(page.read_text())]
    assert len(blocks) > 5
    for page, code in blocks:
        compile(code, str(page), "exec")


def test_reference_names_exist():
    """`make docs` finds the same, but is not run by every developer."""
    page = (ROOT / "docs/python-api.md").read_text()
    named = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert len(named) > 7
    for name in named:
        assert locate(name) is not None, name
