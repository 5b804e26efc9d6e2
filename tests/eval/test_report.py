"""README shows what eval/results hold, and the tables are computed rightly."""

from pathlib import Path

from qrt_eval import report

ROOT = Path(__file__).parents[2]


def test_readme_shows_the_recorded_results():
    assert report.report(ROOT / "eval" / "results") in (ROOT / "README.md").read_text()


def test_changes_are_against_the_unquantized_model_on_the_same_text():
    def run(dataset, weights, kv, ppl):
        return {"dataset": dataset, "model": "m", "weights": weights, "kv": kv, "ppl": ppl}

    runs = [run("a", "w4a16", "int8", 11.0), run("a", "fp16", "fp16", 10.0), run("b", "fp16", "fp16", 5.0)]
    lines = report.perplexities(runs).splitlines()[2:]
    assert [line.split(" | ")[-1] for line in lines] == ["+10.00 % |", "+0.00 % |", "+0.00 % |"]
