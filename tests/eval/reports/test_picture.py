"""The pictures in docs/ show the recorded results, and are drawn the same every time."""

import json
from pathlib import Path

import pytest

from qrt_eval.reports import picture

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "benchmarks.md"


def test_a_page_shows_a_picture_of_the_recorded_results():
    """The picture carries the file's hash, since versions of matplotlib draw differently."""
    result = ROOT / picture.RESULT
    shown = result.with_name("kernels.svg")
    assert str(shown.relative_to(ROOT)) in PAGE.read_text()
    assert picture.fingerprint(result) in shown.read_text(), "run python -m qrt_eval.reports.picture"


def test_a_page_shows_the_recorded_sweeps():
    page, found = PAGE.read_text(), 0
    for result in (ROOT / "eval" / "results").rglob("sweep_*.json"):
        shown = result.with_suffix(".svg")
        assert str(shown.relative_to(ROOT)) in page
        assert picture.fingerprint(result) in shown.read_text(), f"run qrt_eval.reports.pareto {result}"
        found += 1
    assert found


def test_drawing_twice_gives_the_same_bytes(tmp_path):
    pytest.importorskip("matplotlib")
    copy = tmp_path / "some.json"
    copy.write_bytes((ROOT / picture.RESULT).read_bytes())
    picture.main([str(copy)])
    first = (tmp_path / "kernels.svg").read_text()
    picture.main([str(copy)])
    assert (tmp_path / "kernels.svg").read_text() == first
    for series in (*picture.LINEAR, *picture.DECODE):
        assert series.label in first and series.color in first


def test_unmeasured_operators_are_left_out(tmp_path):
    pytest.importorskip("matplotlib")
    few = tmp_path / "few.json"
    rows = [
        {"op": "linear", "what": "w4a16 sum", "at": f"M={m}", "us": 10.0 * m, "floor_us": m} for m in (1, 8)
    ]
    rows += [{"op": "decode", "what": "int8", "at": "1 x 4096", "us": 9.0, "floor_us": 2.0}]
    few.write_text(json.dumps({"model": "m", "environment": {"device": "d"}, "kernels": rows}))
    picture.main([str(few)])
    drawn = (tmp_path / "kernels.svg").read_text()
    assert "w4a16" in drawn and "int8 KV" in drawn and "bf16 KV" not in drawn
