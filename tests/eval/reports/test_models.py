"""The table of architectures is that of the registry, in the documents too."""

from pathlib import Path

from qrt.arch import ARCHS
from qrt_eval.cli import main
from qrt_eval.reports.models import markdown, rows

ROOT = Path(__file__).parents[3]


def test_every_architecture_has_a_row(capsys):
    assert [row.name for row in rows()] == list(ARCHS)
    assert main(["models"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ARCHS)


def test_the_page_shows_the_table():
    assert "\n".join(markdown()) in (ROOT / "docs" / "models.md").read_text()


def test_the_readme_counts_them():
    assert f"[{len(list(ARCHS))} architectures]" in (ROOT / "README.md").read_text()
