"""OutputProcessor: outputs do not depend on how many tokens text is made of at once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import small_tokenizers
from qrt.answers.output import RequestOutput
from qrt.answers.processor import TOKENS_AT_ONCE, OutputProcessor
from qrt.engine.schedule.logprobs import LogprobRows
from qrt.engine.schedule.output import StepDelta
from qrt.engine.schedule.request import FinishReason
from qrt.request.sampling import SamplingParams
from qrt.text.tokenizer import Tokenizer

KINDS = ("byte_level", "byte_fallback", "metaspace", "tiny")
TEXTS = [
    *small_tokenizers.TEXT,
    " leading and  double   spaces \n\n\ttabs\n",
    "👋🏽🎉👨‍👩‍👧" * 3,
    "the dog. the dog.",
]
STOPS = ["dog", "dog.", "the", "\ufffd", " ", "世界", "\n\n"]
_loaded: dict[str, Tokenizer] = {}


def load(kind, tmp_path_factory) -> Tokenizer:
    if kind not in _loaded:
        path = kind
        if kind != "tiny":
            path = small_tokenizers.save(getattr(small_tokenizers, kind)(), tmp_path_factory.mktemp(kind))
        _loaded[kind] = Tokenizer(path)
    return _loaded[kind]


def deltas(ids, finish, logprobs):
    """What the engine says of a request that draws `ids` and then ends."""
    for place, token in enumerate(ids):
        last = place == len(ids) - 1
        scores = None
        if logprobs is not None:
            top, values = np.arange(logprobs)[None] + token, np.zeros((1, logprobs), np.float32)
            scores = LogprobRows(np.array([-0.5], np.float32), np.array([2]), top, values)
        yield StepDelta("r#0", (token,), finish if last else None, None, scores, num_cached=1)


def collect(tokenizer, prompt, ids, params, finish, at_once: bool) -> tuple[RequestOutput, bool]:
    """The output, and whether the engine was told to end the request."""
    collector = OutputProcessor("r", None, prompt, params, tokenizer)
    for delta in deltas(ids, finish, params.logprobs):
        fed = collector.buffer(delta) if at_once else delta
        if fed is not None and collector.process(fed).abort:
            return collector.output(), True
    return collector.output(), False


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_gathered_tokens_give_the_output_of_single_ones(data, kind, tmp_path_factory):
    """Text and broken bytes mixed, special tokens, stop strings: an abort alone may be needless by then."""
    tokenizer = load(kind, tmp_path_factory)
    words = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    words += [[token] * count for token in (0, 2, 100, 200, 255) for count in (1, 3, TOKENS_AT_ONCE)]
    ids = [i for word in data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=5)) for i in word]
    params = SamplingParams(
        max_tokens=None,
        stop=data.draw(st.lists(st.sampled_from(STOPS), max_size=2)),
        include_stop_str_in_output=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
        min_tokens=data.draw(st.sampled_from([0, 0, 3, 30])),
        logprobs=data.draw(st.sampled_from([None, None, 0, 2])),
    )
    prompt = data.draw(st.sampled_from([[5], *words]))
    finish = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    single, _ = collect(tokenizer, prompt, ids, params, finish, at_once=False)
    gathered, aborted = collect(tokenizer, prompt, ids, params, finish, at_once=True)
    assert gathered == single and single.finished
    assert not aborted or isinstance(single.outputs[0].stop_reason, str)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_text_is_the_decoding_of_all_tokens(kind, skip, tmp_path_factory):
    tokenizer = load(kind, tmp_path_factory)
    ids = [i for text in TEXTS for i in [*tokenizer.encode(text, add_special_tokens=False), 2]]
    params = SamplingParams(max_tokens=None, skip_special_tokens=skip)
    (output,) = collect(tokenizer, [], ids, params, FinishReason.LENGTH, at_once=True)[0].outputs
    assert output.text == tokenizer.decode(ids, skip) and output.token_ids == ids


def test_a_stop_string_ends_the_request_a_few_tokens_late(tmp_path_factory):
    tokenizer = load("byte_level", tmp_path_factory)
    ids = tokenizer.encode("the dog. " * 20, add_special_tokens=False)
    params = SamplingParams(max_tokens=None, stop="dog")
    collector, aborted = OutputProcessor("r", None, [5], params, tokenizer), None
    for place, delta in enumerate(deltas(ids, FinishReason.LENGTH, None)):
        if (fed := collector.buffer(delta)) is not None and collector.process(fed).abort:
            aborted = place
            break
    (output,) = collector.output().outputs
    assert output.text == "the " and output.stop_reason == "dog"
    assert aborted is not None and aborted - len(output.token_ids) < 4


def test_without_detokenizing_there_is_no_text(tmp_path_factory):
    tokenizer = load("byte_level", tmp_path_factory)
    ids = tokenizer.encode("the dog", add_special_tokens=False)
    params = SamplingParams(max_tokens=None, logprobs=1)
    outputs = []
    for detokenize in (True, False):
        asked = replace(params, detokenize=detokenize)
        outputs += collect(tokenizer, [5], ids, asked, FinishReason.LENGTH, at_once=True)[0].outputs
    with_text, without = outputs
    assert with_text.text == "the dog" and without.text == ""
    assert (without.token_ids, without.finish_reason) == (ids, "length")
    for row, bare in zip(with_text.logprobs, without.logprobs, strict=True):
        assert {token: replace(entry, decoded_token=None) for token, entry in row.items()} == bare
