"""Test `qrt-eval answers`: where answers differ, near ties, and transformers as the truth."""

import json

import pytest
import torch
from tiny_variants import fewer_merges, noisy
from transformers import AutoModelForCausalLM

from errors import assert_error, assert_names
from qrt.answers.output import CompletionOutput, Logprob
from qrt.assets import model_path
from qrt.text.tokenizer import Tokenizer
from qrt_eval.cli import main
from qrt_eval.inputs.prompts import CONVERSATIONS, read_conversations
from qrt_eval.quality import answers
from qrt_eval.quality.answers import differences, figures, first_difference
from result_schema import checked

TINY = model_path("tiny")


def test_first_difference_of_two_answers():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 4, 5, 6]) == 1


def output(ids, gaps):
    places = zip(ids, gaps, strict=True)
    logprobs = [{token: Logprob(-0.5, 1, ""), 99: Logprob(-0.5 - gap, 2, "")} for token, gap in places]
    return CompletionOutput(0, "", ids, -1.0, logprobs, "length", None)


def test_near_ties_are_counted_apart_from_changes():
    base = [output([10, 11, 12, 13], [1.0, 0.05, 2.0, 3.0]) for _ in range(4)]
    written = [[10, 11, 12, 13], [10, 50, 12, 13], [10, 11, 51, 13], [52, 11, 12, 13]]
    other = [output(ids, [0.0] * 4) for ids in written]
    asked = [[{"role": "user", "content": f"question {i}"}] for i in range(4)]
    found = differences(Tokenizer("tiny"), asked, base, other, near_tie=0.1)
    assert [(d.conversation, d.question, d.token, d.near_tie) for d in found] == [
        (1, "question 1", 1, True), (2, "question 2", 2, False), (3, "question 3", 0, False)
    ]  # fmt: skip
    assert [d.gap for d in found] == pytest.approx([0.05, 2.0, 1.0])
    assert figures(base, found) == {
        "answers": 4, "tokens": 16, "same": 1, "near_ties": 1, "changed": 2,
        "same_tokens": 7 / 16, "first": 0, "median": 1.0,
    }  # fmt: skip
    equal = figures(base, [])
    assert (equal["same"], equal["same_tokens"], equal["first"], equal["median"]) == (4, 1.0, None, None)


def test_bundled_conversations_are_20_different_ones():
    found = read_conversations("--prompts", str(CONVERSATIONS))
    assert len(found) == 20 == len({json.dumps(messages) for messages in found})
    assert all(messages[-1]["role"] == "user" for messages in found)
    assert {len(messages) for messages in found} == {1, 2, 3, 5}


@pytest.mark.model
def test_differences_match_transformers(tmp_path, capsys):
    """Transformers has the same likeliest token there, and the same gap to the next one."""
    out = tmp_path / "a.json"
    words = f"answers --model tiny --kv fp16 int4 --limit 6 --max-tokens 32 --json {out}"
    assert main(words.split()) == 0
    result = checked(out)
    same, int4 = result["runs"]
    assert same["same"] == 6 and not same["differences"] and same["same_tokens"] == 1
    assert int4["same"] + len(int4["differences"]) == 6 and int4["differences"]
    assert f"{100 * int4['same_tokens']:.0f} %" in capsys.readouterr().out
    tokenizer, model = Tokenizer("tiny"), AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    conversations = read_conversations("--prompts", str(CONVERSATIONS))
    for difference in int4["differences"]:
        prompt = tokenizer.encode_chat(conversations[difference["conversation"]], add_generation_prompt=True)
        count = len(prompt) + difference["token"]
        with torch.no_grad():
            written = model.generate(
                torch.tensor([prompt]),
                do_sample=False,
                max_new_tokens=difference["token"] + 1,
                pad_token_id=1,
            )[0]
            logprobs = model(written[None, :count]).logits[0, -1].log_softmax(-1)
        top = logprobs.topk(2)
        assert top.indices[0] == written[count]
        assert difference["base"].startswith(tokenizer.decode([int(written[count])]))
        assert difference["gap"] == pytest.approx(float(top.values[0] - top.values[1]), abs=1e-3)
        assert difference["near_tie"] == (difference["gap"] < 0.1)


@pytest.mark.model
def test_quantized_weights_change_answers(tmp_path):
    asked, out = tmp_path / "asked.txt", tmp_path / "a.json"
    asked.write_text("The government said that\nIn this chapter we will\n")
    words = f"answers --baseline tiny --model {noisy(tmp_path / 'noisy')} --prompts {asked} --max-tokens 64"
    assert main([*words.split(), "--json", str(out)]) == 0
    result = checked(out)
    (run,) = result["runs"]
    assert run["model"].endswith("noisy") and result["baseline"]["model"] == "tiny"
    assert run["answers"] == 2 and run["same"] < 2 and run["differences"][0]["question"].startswith("The")


@pytest.mark.model
def test_incomparable_models_and_prompts_are_refused(tmp_path, capsys, monkeypatch):
    other = fewer_merges(tmp_path / "other")
    assert main(f"answers --baseline tiny --model {other} --limit 1 --max-tokens 1".split()) == 1
    assert_names(capsys.readouterr().err, "error:", str(other), "tiny", "tokenizer")
    assert main("answers --model tiny --max-tokens 2030".split()) == 1
    assert_error(capsys.readouterr().err, "--prompts", "conversation 1", "18 tokens", "--max-tokens 2030")
    monkeypatch.setattr(answers, "CONVERSATIONS", tmp_path / "none.jsonl")
    assert main("answers --model tiny".split()) == 1
    assert_error(capsys.readouterr().err, "--prompts", "none.jsonl")
