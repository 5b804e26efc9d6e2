"""The table on screen and qrt_report.html set each layer's error beside rounding to nearest's."""

import io
import json
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from qrt_calibrate.pipeline import calibrate
from qrt_calibrate.recipe.recipe_file import recipe_of
from qrt_calibrate.report.report import LayerReport

ERRORS = ((0.1, 0.2), (0.4, 0.25), (0.3, 0.3))  # of a layer, and of rounding to nearest


@pytest.fixture(scope="module")
def nearest(llama, tmp_path_factory):
    """The report of round to nearest."""
    out = tmp_path_factory.mktemp("nearest") / "out"
    return calibrate(str(llama), recipe_of({"bits": 4, "method": "rtn"}), out, torch.device("cpu"))


@pytest.fixture(scope="module")
def report(nearest):
    """The same with the errors above, and figures that no code here knows."""
    layers = [
        LayerReport(
            f"model.layers.{index}", {"output error": error, "output error, rtn": rtn, "drift": 0.5}, 1.0
        )
        for index, (error, rtn) in enumerate(ERRORS)
    ]
    layers[2].figures["massive <activations>"] = "token 0"
    return replace(nearest, layers=tuple(layers))


def printed(report):
    console = Console(file=io.StringIO(), width=110)
    report.print(console)
    return console.file.getvalue()


def bars(page):
    """(width of the error's bar, width of rounding's) by row."""
    rows = re.findall(r"<tr[^>]*><td><code>model.*?</tr>", page, re.DOTALL)
    return [[float(width) for width in re.findall(r"width: ([\d.]+)%", row)] for row in rows]


def test_layers_above_rounding_are_named_on_screen(report):
    text = printed(report)
    line = "! output error above rounding to nearest's in 1 of 3 layers: model.layers.1 (0.4, rtn 0.25)"
    assert text.count("above rounding") == 1 and line in text.splitlines()
    assert [name for name in ("0", "1", "2") if f"model.layers.{name} !" in text] == ["1"]


def test_bars_of_a_page_stand_beside_those_of_rounding(report):
    files = report.files()
    assert json.loads(files["qrt_report.json"])["above_rtn"] == ["model.layers.1"]
    page = files["qrt_report.html"]
    assert bars(page) == [[pytest.approx(100 * value / 0.4) for value in pair] for pair in ERRORS]
    assert re.findall(r'<tr class="above"><td><code>(.*?)</code>', page) == ["model.layers.1"]
    assert page.count("<small>above rounding to nearest</small>") == 1
    assert "Above it, and marked: model.layers.1." in page


def test_further_figures_are_columns_of_both(report):
    text, page = printed(report), report.files()["qrt_report.html"]
    for shown in (text, page):
        assert "drift" in shown and "0.5" in shown and "token 0" in shown
    assert "<th>massive &lt;activations&gt;</th>" in page


def test_an_error_without_rounding_beside_it_has_one_bar(nearest):
    page = nearest.files()["qrt_report.html"]
    assert [len(row) for row in bars(page)] == [1, 1]
    assert "rounding to nearest would leave" not in page.replace("\n", " ")
    assert "above" not in printed(nearest) and 'class="above"' not in page
