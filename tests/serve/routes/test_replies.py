"""Logprobs in replies where texts of tokens say little: parts of characters, special tokens, streams."""

import json

import numpy as np
import pytest

import small_tokenizers
from qrt.answers.processor import OutputProcessor
from qrt.engine.schedule.logprobs import LogprobRows
from qrt.engine.schedule.output import StepDelta
from qrt.engine.schedule.request import FinishReason
from qrt.request.sampling import SamplingParams
from qrt.serve.routes.protocol import ChatCompletionRequest, CompletionRequest
from qrt.serve.routes.replies import ChatReply, CompletionReply
from qrt.text.tokenizer import Tokenizer

TEXT = "Köln 🦄 你好"


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request, tmp_path):
    return Tokenizer(small_tokenizers.save(getattr(small_tokenizers, request.param)(), tmp_path))


def scores(ids, others=()) -> LogprobRows:
    """Each token is the likeliest of its place, `others` come behind."""
    ranked = [[token, *(other for other in others if other != token)][: len(others) or 1] for token in ids]
    values = -np.tile(np.arange(1, len(ranked[0]) + 1, dtype=np.float32), (len(ids), 1))
    return LogprobRows(values[:, 0], np.ones(len(ids), np.int64), np.array(ranked), values)


def deltas(ids, others, prompt_ids):
    """The prompt's scores, and one token a step."""
    yield StepDelta("r#0", prompt_scores=scores(prompt_ids[1:]) if prompt_ids[1:] else None)
    for place, token in enumerate(ids):
        finish = FinishReason.LENGTH if place == len(ids) - 1 else None
        yield StepDelta("r#0", (token,), finish, logprobs=scores([token], others))


def reply(kind, tokenizer, ids, others=(), *, prompt=None, prompt_ids=(5,), **body):
    """The whole reply's choice, and those of a stream."""
    request = CompletionRequest if kind is CompletionReply else ChatCompletionRequest
    given = {"prompt": "x"} if kind is CompletionReply else {"messages": [{"role": "user", "content": "x"}]}
    params = SamplingParams(max_tokens=len(ids), logprobs=5)
    collector = OutputProcessor("r", prompt, list(prompt_ids), params, tokenizer)
    made = kind("id", "m", request.model_validate({**given, **body}), [collector])
    events = [
        event
        for delta in deltas(ids, others, prompt_ids)
        for event in made.events(0, collector.process(delta))
    ]
    chunks = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    return made.body()["choices"][0], chunks


def test_usage_per_chunk_does_not_read_all_choices(tokenizer):
    """With a thousand of them each chunk's would take longer than the chunk."""

    class Counted(list):
        seen = 0

        def __iter__(self):
            for item in super().__iter__():
                Counted.seen += 1
                yield item

    count, ids = 50, [5, 6, 7]
    params = SamplingParams(max_tokens=len(ids), logprobs=5)
    collectors = Counted(OutputProcessor(f"r{i}", None, [5], params, tokenizer) for i in range(count))
    options = {"continuous_usage_stats": True, "include_usage": True}
    asked = {"prompt": ["x"] * count, "stream": True, "stream_options": options}
    made = CompletionReply("id", "m", CompletionRequest.model_validate(asked), collectors)
    usages = []
    for place, token in enumerate(ids):
        for index in range(count):
            finish = FinishReason.LENGTH if place == len(ids) - 1 else None
            delta = StepDelta(f"r{index}#0", (token,), finish, num_cached=index % 2, logprobs=scores([token]))
            events = list(made.events(index, collectors[index].process(delta)))
            usages += [json.loads(event.removeprefix(b"data: "))["usage"] for event in events]
    (last,) = [json.loads(event.removeprefix(b"data: "))["usage"] for event in made.closing()]
    assert Counted.seen <= count
    assert [usage["completion_tokens"] for usage in usages] == list(range(1, count * len(ids) + 1))
    assert last == usages[-1] == made.body()["usage"]
    assert last["total_tokens"] == 4 * count and last["prompt_tokens_details"]["cached_tokens"] == count // 2


def test_bytes_of_parts_of_characters(tokenizer):
    """Together they are the text's; its text comes with the last part of a character."""
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    whole, chunks = reply(ChatReply, tokenizer, ids, ids[:4], logprobs=True, top_logprobs=5)
    content = whole["logprobs"]["content"]
    assert any(not entry["token"] for entry in content), "some are parts of a character"
    assert "".join(entry["token"] for entry in content) == whole["message"]["content"]
    written = bytes(byte for entry in content for byte in entry["bytes"]).decode()
    assert written == whole["message"]["content"] and written.strip() == TEXT
    streamed = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert streamed == content
    for entry in content:
        assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}
        assert len({tuple(top["bytes"]) for top in entry["top_logprobs"]}) >= len(entry["top_logprobs"]) - 1


def test_the_likeliest_of_one_text_stands_for_all(tokenizer):
    ids = tokenizer.encode("🦄", add_special_tokens=False)[-2:]
    assert [tokenizer.decode([token], False) for token in ids] == ["\ufffd"] * 2
    whole, _ = reply(CompletionReply, tokenizer, ids, ids, logprobs=5)
    assert whole["logprobs"]["top_logprobs"] == [{"\ufffd": -1.0}] * 2
    assert whole["logprobs"]["token_logprobs"] == [-1.0] * 2


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_stream_offsets_equal_those_of_the_whole_reply(tokenizer, echo, as_text):
    """And they are where each token stands in the text, though special tokens come between."""
    ids = tokenizer.encode("the dog", add_special_tokens=False)
    ids = [*ids[:2], 2, *ids[2:], 1]
    prompt_ids = tokenizer.encode("the fox")
    prompt = "the fox" if as_text else tokenizer.decode(prompt_ids, False)
    given = {"prompt": prompt, "prompt_ids": prompt_ids, "echo": echo, "logprobs": 1}
    whole, chunks = reply(CompletionReply, tokenizer, ids, **given)
    streamed = [offset for chunk in chunks for offset in chunk["logprobs"]["text_offset"]]
    logprobs = whole["logprobs"]
    assert streamed == logprobs["text_offset"]
    output = len(prompt) if echo else 0
    before = len(streamed) - len(ids)
    shown = ["" if token in tokenizer.special_ids else tokenizer.token_text(token) for token in ids]
    assert "".join(shown) == whole["text"][output:]
    assert streamed[before:] == [output + len("".join(shown[:place])) for place in range(len(ids))]


@pytest.mark.parametrize("prompt", ["the fox runs", "naïve 你好", "🦄 the fox"])
@pytest.mark.parametrize("bos", [[0], []])
def test_a_token_stands_where_its_offset_says(tokenizer, prompt, bos):
    """Also behind characters of several tokens, which all stand where the character does."""
    prompt_ids = [*bos, *tokenizer.encode(prompt, add_special_tokens=False)]
    ids = [2, *tokenizer.encode("the dog 🦄 and on", add_special_tokens=False)]
    given = {"prompt": prompt, "prompt_ids": prompt_ids, "echo": True, "logprobs": 1}
    whole, chunks = reply(CompletionReply, tokenizer, ids, **given)
    logprobs = whole["logprobs"]
    assert logprobs["text_offset"][len(prompt_ids)] == len(prompt)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert [offset for chunk in chunks for offset in chunk["logprobs"]["text_offset"]] == logprobs[
        "text_offset"
    ]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        shown = "" if token in small_tokenizers.SPECIAL else token.strip("\ufffd")
        shown = shown if offset else shown.lstrip()  # SentencePiece's first token has a space
        assert whole["text"].startswith(shown, offset + token.startswith("\ufffd"))
