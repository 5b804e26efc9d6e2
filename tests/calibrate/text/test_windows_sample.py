"""A sample is large enough, the same for a seed, and spread over the data; windows are cut from it."""

import json

import pytest
import torch

from qrt.errors import ConfigError
from qrt.text.data.rows import DataRow
from qrt.text.tokenizer import Tokenizer
from qrt_calibrate import cli
from qrt_calibrate.text import text, windows
from qrt_calibrate.text.sample import take
from qrt_calibrate.text.windows import choose_windows


def rows(count, size=9):
    return [DataRow(f"{number:0{size}d}", "a", number) for number in range(count)]


def numbers(sample):
    return [row.number for row in sample.rows]


def test_small_data_are_taken_whole():
    sample = take(rows(20), budget=10_000, seed=0)
    assert numbers(sample) == list(range(20)) and sample.whole and sample.seen == 20
    assert take([], budget=10, seed=0).whole


def test_of_large_data_a_sample_is_taken():
    """The rows have 10 characters each; the sample keeps their order and covers all of the data."""
    sample = take(iter(rows(10_000)), budget=5_000, seed=0)
    found = numbers(sample)
    assert len(found) == 500 and found == sorted(found) and not sample.whole and sample.seen == 10_000
    tenths = [sum(1 for number in found if number // 1000 == tenth) for tenth in range(10)]
    assert all(20 < count < 85 for count in tenths)  # 50 on average
    assert numbers(take(rows(10_000), 5_000, seed=0)) == found != numbers(take(rows(10_000), 5_000, seed=1))
    assert set(found) < set(numbers(take(rows(10_000), 9_000, seed=0)))


def test_reading_ends_at_a_limit():
    read = []
    data = (read.append(row) or row for row in rows(10_000))
    sample = take(data, budget=1_000, seed=0, limit=4_000)
    assert len(sample.rows) == 100 and sample.seen == 400 and len(read) <= 401 and not sample.whole
    assert take(rows(10), 1_000, seed=0, limit=4_000).whole


def test_no_more_than_the_sample_is_held():
    held = 0

    class Counted(str):
        def __new__(cls, value):
            nonlocal held
            held += 1
            return super().__new__(cls, value)

        def __del__(self):
            nonlocal held
            held -= 1

    def data():
        for number in range(5000):
            assert held <= 120, number
            yield DataRow(Counted("x" * 9), "a", number)

    assert len(take(data(), budget=1_000, seed=0).rows) == 100


def test_a_text_ends_where_its_next_piece_is_not_taken():
    pieces = [DataRow("x" * 9, "a", number, ends=False) for number in range(1000)]
    sample = take(pieces, budget=2_000, seed=0)
    followed = [
        after.number == row.number + 1 for row, after in zip(sample.rows, sample.rows[1:], strict=False)
    ]
    assert True in followed and [not row.ends for row in sample.rows[:-1]] == followed


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer("tiny")


def choose(data, tokenizer, count=4, seqlen=16, seed=0, **options):
    return choose_windows(lambda: iter(data), None, tokenizer, count, seqlen, seed, **options)


def words(count):
    return [
        DataRow(f"The row of number {number} says {number * 7919 % 1000}.", "a", number)
        for number in range(count)
    ]


def test_windows_are_of_the_whole_text_tokenized_at_once(tiny):
    """The windows come in the order that `randperm` gives to all of them."""
    data = words(300)
    ids = tiny.hf("\n\n".join(row.value for row in data), add_special_tokens=False)["input_ids"]
    slots = torch.tensor(ids[: len(ids) // 15 * 15]).view(-1, 15)
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(5))
    found = choose(data, tiny, count=40, seed=5)
    assert torch.equal(found.ids[:, 1:], slots[order[:40]]) and (found.ids[:, 0] == tiny.bos_token_id).all()
    assert torch.equal(choose(data, tiny, count=30, seed=5).ids, found.ids[:30])


def test_a_window_that_begins_with_a_chat_has_one_bos(tiny):
    """The template wrote the BOS already; the window is as long as all others."""
    data = [DataRow(f"{tiny.hf.bos_token}{row.value}", "a", number) for number, row in enumerate(words(300))]
    ids = tiny.hf("\n\n".join(row.value for row in data), add_special_tokens=False)["input_ids"]
    found = choose(data, tiny, count=len(ids) // 15 - 1)
    assert (found.ids[:, 0] == tiny.bos_token_id).all() and not (found.ids[:, 1] == tiny.bos_token_id).any()
    assert found.ids[:, 2:].eq(tiny.bos_token_id).any(), "chats begin inside windows, too"
    assert ids[:16] in found.ids.tolist(), "the first chat is the first window, and a token more"


def test_large_data_are_sampled(tiny, monkeypatch):
    monkeypatch.setattr(windows, "SMALL", 3000)
    found = choose(words(5000), tiny)
    assert found.rows == 5000 and 60 < found.sampled < 120
    again, longer, other = (
        choose(words(5000), tiny, count, seed=seed) for count, seed in ((4, 0), (9, 0), (4, 1))
    )
    assert torch.equal(again.ids, found.ids) and again.sha256 == found.sha256
    assert torch.equal(longer.ids[:4], found.ids) and not torch.equal(other.ids, found.ids)


def test_a_sample_grows_until_it_is_enough(tiny, monkeypatch):
    """More rows are sampled where rows are left out or tokens have many characters."""
    monkeypatch.setattr(windows, "SMALL", 100)
    data = [
        DataRow({"text": row.value if row.number % 10 == 0 else None, "id": "x" * 40}, "a", row.number)
        for row in words(3000)
    ]
    found = choose(data, tiny, count=20)
    assert found.ids.shape == (20, 16) and found.sampled < 3000
    assert found.texts.left_out["'text' is null, not text"] == found.sampled - found.texts.used
    with pytest.raises(
        ConfigError, match=r"expected 15000 .* for 1000 samples of 16, .* \(rows left out: 2,700: 'text' is"
    ):
        choose(data, tiny, count=1000)


def test_remote_data_are_read_only_as_far_as_needed(tiny, monkeypatch):
    monkeypatch.setattr(windows, "SMALL", 1000)
    read = []

    def data():
        for row in words(100_000):
            read.append(row)
            yield row

    found = choose_windows(data, None, tiny, 2, 16, 0, remote=True)
    assert len(read) < 150 and found.rows == len(read) - 1


def test_unusable_data_end_early(tiny, monkeypatch):
    monkeypatch.setattr(windows, "SMALL", 1000)
    data = [DataRow({"txt": "x" * 50}, "a", number) for number in range(5000)]
    with pytest.raises(
        ConfigError, match=r"none of the \d\d rows read can be used .*no key .*\(txt\).*give rows"
    ):
        choose(data, tiny)
    with pytest.raises(ConfigError, match="hold no rows"):
        choose([], tiny)


def test_what_is_left_out_is_in_the_report(llama, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    texts = [{"text": row.value * 5} for row in words(100)]
    (data / "a.jsonl").write_text("\n".join(map(json.dumps, [*texts, {"text": None}, {"text": "<b>"}, 5])))
    (data / "b.png").write_bytes(b"\0")
    flags = "--bits 4 --method rtn --n-samples 2 --seqlen 64 --eval-samples 1 --device cpu".split()
    assert (
        cli.main(["--model", str(llama), "--calib", str(data), "--out", str(tmp_path / "out"), *flags]) == 0
    )
    report = json.loads((tmp_path / "out/qrt_report.json").read_text())["calibration"]
    assert report["rows"] == report["rows_looked_at"] == 103 and report["files_left_out"] == {".png": 1}
    reasons = {"'text' is null, not text": 1, "a row that is a number, not an object or text": 1}
    assert report["rows_left_out"] == reasons
    page = (tmp_path / "out/qrt_report.html").read_text()
    assert "a row that is a number" in page and "files: .png" in page


def test_a_dataset_of_the_hub_is_streamed_by_seed(monkeypatch):
    """The library shuffles the dataset's files by the seed."""
    import datasets

    def rows(files):
        for file in files:
            yield from ({"text": f"{file} {number}"} for number in range(3))

    files = [f"file{number}" for number in range(8)]
    stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"files": files})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: stream)
    orders = [[row.value["text"] for row in text.open_source("org/name", seed).rows()] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and set(orders[0]) == set(orders[2])
    assert text.open_source("org/name", 0).remote
