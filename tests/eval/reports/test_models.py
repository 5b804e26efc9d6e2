"""The table of architectures is that of the registry, in the documents too."""

from qrt.arch import ARCHS
from qrt_eval.cli import main
from qrt_eval.reports import models
from qrt_eval.reports.models import PAGE, README, page_with_table, readme_with_count, rows, table

REMEDY = "is not of this registry; run qrt-eval models --write"


def test_every_architecture_has_a_row(capsys):
    assert [row.name for row in rows()] == list(ARCHS)
    assert main(["models"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ARCHS)


def test_the_page_shows_the_table():
    page = PAGE.read_text()
    assert page == page_with_table(page) and table() in page, f"docs/models.md {REMEDY}"


def test_the_readme_counts_them():
    page = README.read_text()
    assert page == readme_with_count(page) and "architectures]" in page, f"README.md {REMEDY}"


def test_writing_leaves_the_rest_of_the_pages(tmp_path, monkeypatch, capsys):
    """Rows of another registry go, those of this one come."""
    page, readme = tmp_path / "models.md", tmp_path / "README.md"
    monkeypatch.setattr(models, "PAGE", page)
    monkeypatch.setattr(models, "README", readme)
    assert main(["models", "--write"]) == 1 and "checkout" in capsys.readouterr().err
    shown = table()
    page.write_text("# M\n\n" + "\n".join(shown.split("\n")[:4]) + "\n| Old | fused | no |\n\nEnd.\n")
    readme.write_text("Runs [7 architectures](m), 3 ranks.\n")
    assert main(["models", "--write"]) == 0
    assert page.read_text() == f"# M\n\n{shown}\n\nEnd.\n"
    assert readme.read_text() == f"Runs [{len(list(ARCHS))} architectures](m), 3 ranks.\n"
