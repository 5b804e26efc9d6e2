"""Compare the lengths of requests with their definitions."""

import json
import math
from statistics import NormalDist

import numpy as np
import pytest

from errors import assert_error, assert_names
from qrt.errors import ConfigError
from qrt_eval.cli import main
from qrt_eval.inputs.lengths import Fixed, Long, ShareGPT, parse


def clipped_mean(mu, sigma, low, high):
    """Return the mean of a clipped lognormal, by its integral: both ends, and what lies between them."""
    cdf = NormalDist(mu, sigma).cdf
    shifted = NormalDist(mu + sigma**2, sigma).cdf  # a lognormal's density times its value is lognormal
    a, b = math.log(low), math.log(high)
    return low * cdf(a) + high * (1 - cdf(b)) + math.exp(mu + sigma**2 / 2) * (shifted(b) - shifted(a))


def test_sharegpt_has_the_means_it_names():
    facts = ShareGPT().facts()
    ends = facts["shortest"], facts["longest"]
    assert ends == (8, 1024)
    drawn = ShareGPT().draw(400_000, np.random.default_rng(5))
    assert (drawn.min(), drawn.max()) == ends
    for column, mu, mean in ((0, facts["input_mu"], 207), (1, facts["output_mu"], 201)):
        assert clipped_mean(mu, facts["sigma"], *ends) == pytest.approx(mean, abs=0.1)
        assert drawn[:, column].mean() == pytest.approx(mean, rel=0.01)
        # the median of a lognormal is exp(mu), and clipping does not move it
        assert np.median(drawn[:, column]) == pytest.approx(math.exp(mu), rel=0.02)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.01


def test_long_prompts_are_uniform():
    drawn = Long().draw(100_000, np.random.default_rng(5))
    inputs = drawn[:, 0]
    assert (inputs.min(), inputs.max()) == (8000, 24000) and set(drawn[:, 1]) == {256}
    assert inputs.mean() == pytest.approx(16000, rel=0.01)
    assert np.quantile(inputs, (0.25, 0.75)) == pytest.approx((12000, 20000), rel=0.01)


@pytest.mark.parametrize(
    "word, count, longest", [("sharegpt", 1000, 2048), ("long", 64, 24256), ("7/3", None, 10)]
)
def test_parse_named_lengths(word, count, longest):
    lengths = parse(word)
    assert (lengths.name, lengths.count, lengths.longest) == (word, count, longest)
    assert lengths.draw(50, np.random.default_rng(0)).sum(1).max() <= longest


def test_a_seed_gives_every_model_the_same_lengths():
    def lengths(seed, vocab):
        requests = ShareGPT().requests(30, seed, vocab)
        allowed = set(range(vocab) if isinstance(vocab, int) else vocab)
        assert all(set(request.ids) <= allowed for request in requests)
        return [(len(request.ids), request.output_len) for request in requests]

    assert lengths(3, 50) == lengths(3, [7, 9, 200_000]) != lengths(4, 50)
    first, second = Fixed(5, 2).requests(2, 0, 1000)
    assert len(first.ids) == len(second.ids) == 5 and first.ids != second.ids


def test_file_rows_come_in_order_and_repeat(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"input_len": 3, "output_len": 9}\n{"input_len": 5, "output_len": 1}\n'
    )
    (tmp_path / "b.csv").write_text("input_len,output_len\n3,9\n5,1\n")
    for name in ("a.jsonl", "b.csv"):
        lengths = parse(str(tmp_path / name))
        assert (lengths.count, lengths.longest) == (2, 12)
        assert lengths.draw(3, np.random.default_rng(0)).tolist() == [[3, 9], [5, 1], [3, 9]]


@pytest.mark.parametrize(
    "row, key, came",
    [
        ({"input_len": 3}, "output_len", "None"),
        ({"input_len": 0, "output_len": 1}, "input_len", "0"),
        ({"input_len": 3, "output_len": 1.5}, "output_len", "1.5"),
        ({"input_len": True, "output_len": 1}, "input_len", "True"),
        ({"input_len": "many", "output_len": 1}, "input_len", "'many'"),
        ({"prompt": "text"}, "input_len", "None"),
        (["text"], "input_len", "None"),
    ],
)
def test_a_row_without_lengths_is_named(row, key, came, tmp_path):
    rows = [{"input_len": 3, "output_len": 9}, row]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError) as error:
        parse(str(tmp_path / "a.jsonl"))
    assert_names(str(error.value), "--lengths", "row 2 of a.jsonl", key, f"got {came}")


@pytest.mark.parametrize(
    "word", ["sharegtp", "0/5", "5/0", "5x5", "5/", "", "-1/5", "1e3/5", "no/such.jsonl"]
)
@pytest.mark.parametrize("command", ["throughput --shape llama-3-8b", "serve"])
def test_unknown_lengths_are_refused(command, word, capsys):
    assert main([*command.split(), f"--lengths={word}"]) == 1
    assert_error(capsys.readouterr().err, "--lengths", repr(word), "sharegpt", "long", "1000/1000", "file")


@pytest.mark.parametrize("command", ["throughput --shape llama-3-8b", "serve"])
@pytest.mark.parametrize("flag", ["--input-len", "--prompts"])
def test_conflicting_flags_are_refused(command, flag, capsys):
    assert main([*command.split(), "--lengths", "sharegpt", flag, "5"]) == 1
    assert_error(capsys.readouterr().err, "--lengths", flag, "leave one out")
