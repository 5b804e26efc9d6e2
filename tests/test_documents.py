"""What documents and comments point to is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OTHERS = {"build", "demo-out", "node_modules"}  # folders of what is made, not written; dotted ones too
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:calibrate|docs|eval|examples|qrt|tests|tools)/[\w./-]+)`")
MODULE = re.compile(r"python -m (qrt(?:_calibrate|_eval)?[\w.]*\w)")
PLACEHOLDER = re.compile(r"\b(?:NAME|DEVICE)\b")
CITED = re.compile(r"(?<![\w/])(?:docs|research)/[\w./#-]*[\w/]")
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def files(suffix: str) -> Iterator[Path]:
    """Every file of the repository with this suffix."""
    for path in sorted(ROOT.rglob(f"*{suffix}")):
        folders = path.relative_to(ROOT).parts[:-1]
        if not any(folder in OTHERS or folder.startswith(".") for folder in folders):
            yield path


def anchors(page: Path) -> set[str]:
    """The names by which a page's headings are linked."""
    text = FENCE.sub("", page.read_text())
    heads = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[ -]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize("page", files(".md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_of_a_page_exist(page):
    text = FENCE.sub("", page.read_text())
    for link in LINK.findall(text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: link to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: link to {link}"
    for path in PATH.findall(text):
        assert PLACEHOLDER.search(path) or (ROOT / path).exists(), f"{page.name}: `{path}`"
    for module in MODULE.findall(page.read_text()):
        places = [ROOT / base / f"{module.replace('.', '/')}.py" for base in (".", "calibrate", "eval")]
        assert any(place.exists() for place in places), f"{page.name}: python -m {module}"


def test_what_code_cites_exists():
    own = Path(__file__)
    for path in files(".py"):
        for cited in CITED.findall(path.read_text()) if path != own else ():
            name, _, anchor = cited.partition("#")
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)}: {cited}"
            assert not anchor or anchor in anchors(ROOT / name), f"{path.relative_to(ROOT)}: {cited}"


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A head: with `code`\n\n```\n[no](none.md)\n```\n[here](#a-head-with-code)\n")
    test_links_and_paths_of_a_page_exist(page)
    for bad in ("[x](none.md)", "[x](#none)", "`qrt/none.py`", "python -m qrt.none"):
        page.write_text(f"# Head\n\n{bad}\n")
        with pytest.raises(AssertionError, match="none"):
            test_links_and_paths_of_a_page_exist(page)
