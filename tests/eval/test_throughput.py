"""`qrt-eval throughput`: counts against what was asked for, prompts of files."""

import json

import pytest
import torch
from schema import checked

from qrt import LLM
from qrt.errors import ConfigError
from qrt.text.tokenizer import Tokenizer
from qrt_eval import throughput
from qrt_eval.cli import main


@pytest.mark.model
def test_rows_count_what_was_asked_for(tmp_path):
    out = tmp_path / "t.json"
    words = "throughput --model tiny --kv int8 --batch 1 3 --num-prompts 4 --input-len 9 --output-len 5"
    assert main([*words.split(), "--repeats", "2", "--json", str(out)]) == 0
    result = checked(out)
    assert [row["batch"] for row in result["batches"]] == [1, 3] and result["kv"] == "int8"
    for row in result["batches"]:
        assert row["num_requests"] == 4 and row["total_num_tokens"] == 4 * (9 + 5)
        assert row["tokens_per_second"] == pytest.approx(56 / row["elapsed_time"])
        assert row["output_tokens_per_second"] == pytest.approx(20 / row["elapsed_time"])
        assert len(row["repeats"]) == 2 and row["tokens_per_second"] in row["repeats"]
        assert row["requests_per_second"] == pytest.approx(4 / row["elapsed_time"])
        assert row["host_gap"] is None or 0 <= row["host_gap"] < 1
    # one after the other: of each prompt five steps, each reads all weights, and what it attends
    weights = (2 if torch.cuda.is_available() else 4) * (
        6 * (512 * 256 + 256 * 256 + 3 * 768 * 256) + 4096 * 256
    )
    read = 20 * weights + 4 * (9 + 10 + 11 + 12 + 13) * 6 * 2 * (2 * 64 + 8)
    one = result["batches"][0]
    assert one["achieved_GBps"] == pytest.approx(read / one["elapsed_time"] / 1e9)


@pytest.mark.model
def test_no_more_requests_than_the_batch_are_in_flight_and_reads_are_counted():
    engine = LLM("tiny", enable_prefix_caching=False).engine
    most, add = [], engine.add

    def counted(*args, **options):
        add(*args, **options)
        scheduler = engine.scheduler
        most.append(len(scheduler.running) + len(scheduler.waiting))

    engine.add = counted
    run = throughput.feed(engine, [[5, 6, 7]] * 5, 2, 4)
    assert max(most) <= 2 and len(most) == 5 and run.output_tokens == 20
    # each output token is drawn after attending the prompt and the outputs before it
    assert run.kv_tokens == 5 * (3 + 4 + 5 + 6)
    assert 3 * 4 <= run.steps <= 5 * 4


def test_prompts_of_files(tmp_path):
    tokenizer = Tokenizer("tiny")
    (tmp_path / "a.txt").write_text("one line\n\nand another\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "one line"}) + "\n")
    first, second = throughput.read_prompts(str(tmp_path / "a.txt"), tokenizer)
    assert throughput.read_prompts(str(tmp_path / "b.jsonl"), tokenizer) == [first]
    assert tokenizer.decode(second) == "and another"
    (tmp_path / "f.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "one line"}\r\n')
    assert throughput.read_prompts(str(tmp_path / "f.jsonl"), tokenizer) == [first]
    odd = "two\u2028lines\x85of\x0bone\x0cprompt"
    (tmp_path / "g.jsonl").write_text(json.dumps({"prompt": odd}, ensure_ascii=False))
    assert throughput.read_prompts(str(tmp_path / "g.jsonl"), tokenizer) == [tokenizer.encode(odd)]
    for name, content, message in (
        ("c.jsonl", b'{"text": 1}', 'holds no prompt; expected text, or rows with a "prompt" that is text'),
        ("d.jsonl", b"{", "none of its 1 lines is JSON"),
        ("e.txt", b"\n", "holds no prompt"),
        ("h.jsonl", b'\n{"prompt": 5}', "holds no prompt"),
        ("i.txt", b"caf\xe9", "not UTF-8 text .* in line 1"),
        ("j.pdf", b"words", r"expected text .*, got \.pdf"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name}.*{message}"):
            throughput.read_prompts(str(tmp_path / name), tokenizer)
    with pytest.raises(ConfigError, match="no such file"):
        throughput.read_prompts(str(tmp_path / "none"), tokenizer)


def test_prompts_of_rows_in_any_kind_of_file(tmp_path, caplog):
    """A row without a prompt is left out and counted."""
    tokenizer = Tokenizer("tiny")
    wanted = [tokenizer.encode("one line"), tokenizer.encode("and another")]
    rows = [{"prompt": "one line"}, {"prompt": None}, {"prompt": "\ud83d"}, {"prompt": "and another"}]
    (tmp_path / "a.JSONL").write_text("\n".join([*map(json.dumps, rows), "{"]))
    assert throughput.read_prompts(str(tmp_path / "a.JSONL"), tokenizer) == wanted
    (warning,) = caplog.messages
    assert '3 of 5 rows have no "prompt" that is text (row 2 of a.JSONL) and are left out' in warning
    (tmp_path / "b.csv").write_text("id,prompt\n1,one line\n2,and another\n")
    assert throughput.read_prompts(str(tmp_path / "b.csv"), tokenizer) == wanted
    (tmp_path / "c.json").write_text('["one line", "and another"]')
    assert throughput.read_prompts(str(tmp_path / "c.json"), tokenizer) == wanted


def test_a_text_needs_a_tokenizer(capsys):
    assert main("throughput --shape llama-3-8b --prompts x".split()) == 1
    assert "--model instead of --shape" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "throughput --batch 4 0",
        "throughput --repeats 0",
        "throughput --num-prompts 0",
        "throughput --num-prompts -1",
        "throughput --input-len -5",
        "throughput --output-len 0",
        "latency --batch 0",
        "latency --input-len 0",
        "latency --output-len -1",
        "serve --num-prompts 0",
        "serve --max-concurrency 0",
        "serve --processes 0",
        "kv-error --num-heads 0",
        "kv-error --num-kv-heads 0",
        "kv-error --head-dim 0",
    ],
)
def test_what_is_counted_is_at_least_one(words, capsys):
    command, flag, *values = words.split()
    with pytest.raises(SystemExit, match="2"):
        main([command, flag, *values])
    error = capsys.readouterr().err
    assert f"argument {flag}: got '{values[-1]}', wanted an integer of at least 1" in error
