"""Streaming text: nothing shown is ever taken back, half a character or the start of a stop string."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import small_tokenizers
from qrt.request.sampling import SamplingParams
from qrt.text.detokenizer import LONGEST_WINDOW, Detokenizer, StopStrings, TextStream
from qrt.text.tokenizer import Tokenizer

KINDS = ("byte_level", "byte_fallback", "metaspace")
TEXTS = [
    *small_tokenizers.TEXT,
    "👋🏽🎉👨‍👩‍👧" * 5,
    "今天的天气很好" * 12,
    " leading and  double   spaces \n\n\ttabs\n",
    "ends in the middle 🎉",
    "x",
]
_loaded: dict[str, Tokenizer] = {}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def tokenizer(kind, tmp_path_factory):
    return load(kind, tmp_path_factory)


def load(kind, tmp_path_factory) -> Tokenizer:
    if kind not in _loaded:
        folder = tmp_path_factory.mktemp(kind)
        _loaded[kind] = Tokenizer(small_tokenizers.save(getattr(small_tokenizers, kind)(), folder))
    return _loaded[kind]


def stream(tokenizer, prompt, ids, **params):
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **params))
    return [detokenizer.feed([token]) for token in ids], detokenizer.finish(), detokenizer


def continuation(tokenizer, prompt, ids):
    return tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]


@pytest.mark.parametrize("count", [1, 6, 10, 100])
def test_skipped_special_tokens_lose_no_space(tokenizer, count):
    """At the prompt's end and, where the window begins anew, in the output."""
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("the dog", "The dog runs"))
    special = [min(tokenizer.special_ids)] * count
    for prompt, ids in ((first + special, second), (first, second * 3 + special * 3 + second)):
        pieces, rest, _ = stream(tokenizer, prompt, ids)
        assert "".join(pieces) + rest == continuation(tokenizer, prompt, ids)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_pieces_add_up_wherever_the_prompt_ends(tokenizer, kind, text):
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    if kind != "metaspace":  # its vocabulary does not cover every character
        assert whole.strip() == text.strip()
    for cut in sorted({0, 1, 2, len(ids) // 2, len(ids) - 1}):
        prompt, output = ids[:cut], ids[cut:]
        if tokenizer.decode(prompt).endswith("\ufffd"):
            continue
        pieces, rest, detokenizer = stream(tokenizer, prompt, output)
        assert "".join(pieces) + rest == continuation(tokenizer, prompt, output)
        assert not any("\ufffd" in piece for piece in [*pieces, rest])
        assert detokenizer.text == "".join(pieces) + rest and detokenizer.num_tokens == len(output)


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_decode_alike_in_any_chunks(tokenizer, seed):
    """A busy process gives out several tokens at once."""
    rng = random.Random(seed)
    ids = [rng.randrange(3, 300) for _ in range(60)]
    pieces, rest, _ = stream(tokenizer, [5], ids)
    at_once = TextStream(tokenizer, [5], True)
    text = ""
    while ids:
        count = rng.randrange(1, 8)
        text, ids = text + at_once.feed(ids[:count]), ids[count:]
    assert text + at_once.finish() == "".join(pieces) + rest


@pytest.mark.parametrize("seed", range(50))
def test_invalid_bytes_decode_alike_in_any_chunks(kind, tokenizer, seed):
    if kind == "metaspace":
        pytest.skip("no bytes")
    rng = random.Random(seed)
    words = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    words += [[token] * count for token in (100, 200, 255) for count in (1, 3, LONGEST_WINDOW)]
    ids = [i for word in rng.choices(words, k=4) for i in word]
    ids = ids[: rng.randrange(len(ids) // 2, len(ids))]  # it may end inside a character
    singly, at_once, text = TextStream(tokenizer, [5], True), TextStream(tokenizer, [5], True), ""
    wanted = "".join(singly.feed([token]) for token in ids) + singly.finish()
    while ids:
        count = rng.randrange(1, 2 * LONGEST_WINDOW)
        text, ids = text + at_once.feed(ids[:count]), ids[count:]
    assert text + at_once.finish() == wanted


def test_a_character_comes_with_its_last_byte(kind, tokenizer):
    if kind == "metaspace":
        pytest.skip("no bytes")
    ids = tokenizer.encode("a🦄b", add_special_tokens=False)
    assert len(ids) >= 5, "the emoji must be spread over tokens"
    pieces, rest, _ = stream(tokenizer, [], ids)
    assert [piece for piece in pieces if piece] == ["a", "🦄", "b"] and rest == ""
    pieces, rest, _ = stream(tokenizer, [], ids[:-2])
    assert "".join(pieces) == "a" and set(rest) == {"\ufffd"}, "cut short: flushed as what it is"


def test_a_prompt_may_end_inside_a_character(kind, tokenizer):
    if kind == "metaspace":
        pytest.skip("no bytes")
    ids = tokenizer.encode("世世世世🦄 and on")
    whole = next(i for i in range(len(ids)) if tokenizer.decode(ids[:i]).endswith("世世世世"))
    for inside in (whole + 1, whole + 2):
        assert tokenizer.decode(ids[:inside]).endswith("\ufffd")
        pieces, rest, _ = stream(tokenizer, ids[:inside], ids[inside:])
        assert "".join(pieces) + rest == "🦄 and on"


def test_a_prompt_may_end_with_invalid_bytes(kind, tokenizer):
    if kind == "metaspace":
        pytest.skip("no bytes")
    bad = next(i for i in range(3, 300) if tokenizer.decode([i]) == "\ufffd")
    ids = tokenizer.encode("the", add_special_tokens=False)
    pieces, rest, _ = stream(tokenizer, [*ids, *[bad] * 9], tokenizer.encode(" ok", add_special_tokens=False))
    assert ("".join(pieces) + rest).strip() == "ok"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_bytes_add_up(data, tmp_path_factory):
    """Byte-level tokens in any order, most of them invalid UTF-8: still the decoding of the whole."""
    tokenizer = load("byte_level", tmp_path_factory)
    ids = data.draw(st.lists(st.integers(3, 300), min_size=1, max_size=3 * LONGEST_WINDOW))
    pieces, rest, _ = stream(tokenizer, [], ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_several_tokens_at_once_add_up(data, kind, tmp_path_factory):
    """However they are cut, text and broken bytes mixed: the decoding of the whole, in a short window."""
    tokenizer = load(kind, tmp_path_factory)
    words = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    if kind == "byte_level":
        words += [[token] * count for token in (100, 200, 255) for count in (1, 3, LONGEST_WINDOW)]
    ids = [i for word in data.draw(st.lists(st.sampled_from(words), max_size=6)) for i in word]
    text_stream, shown, start = TextStream(tokenizer, [], True), "", 0
    while start < len(ids):
        end = start + data.draw(st.integers(1, 2 * LONGEST_WINDOW))
        shown += text_stream.feed(ids[start:end])
        start = end
        assert len(text_stream._window) <= LONGEST_WINDOW + 1
    assert shown + text_stream.finish() == tokenizer.decode(ids)


def test_invalid_bytes_are_shown_soon_and_stay_cheap(kind, tokenizer):
    if kind == "metaspace":
        pytest.skip("no bytes")
    bad = next(i for i in range(3, 300) if tokenizer.decode([i]) == "\ufffd")
    text_stream = TextStream(tokenizer, [], True)
    shown = "".join(text_stream.feed([bad]) for _ in range(1000))
    assert len(shown) > 900 and len(text_stream._window) <= LONGEST_WINDOW + 1
    assert shown + text_stream.finish() == "\ufffd" * 1000
    after = TextStream(tokenizer, [], True)
    for _ in range(200):
        after.feed([bad])
    good = "".join(after.feed([i]) for i in tokenizer.encode("ok 你好", add_special_tokens=False))
    assert good.lstrip("\ufffd ") + after.finish() == "ok 你好"


def test_special_tokens_are_left_out_or_kept(tokenizer):
    ids = tokenizer.encode("the dog", add_special_tokens=False)
    prompt = tokenizer.encode("the", add_special_tokens=False)
    pieces, rest, _ = stream(tokenizer, prompt, [ids[0], 2, *ids[1:], 1])
    assert "<|user|>" not in "".join(pieces) + rest
    pieces, rest, _ = stream(tokenizer, prompt, [ids[0], 2, *ids[1:], 1], skip_special_tokens=False)
    assert "<|user|>" in "".join(pieces) + rest and ("".join(pieces) + rest).endswith("</s>")


def test_a_long_stream_keeps_a_short_window(tokenizer):
    ids = tokenizer.encode(" ".join(TEXTS[:4]) * 10, add_special_tokens=False)
    text_stream, longest = TextStream(tokenizer, [], True), 0
    for token in ids:
        text_stream.feed([token])
        longest = max(longest, len(text_stream._window))
    assert longest <= LONGEST_WINDOW + 1 < len(ids)


def cut(text, stops, include, early):
    """Definition: the text up to the first stop string that is complete behind `early` characters, the
    longest that ends there."""
    for end in range(early + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab\n", max_size=40),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
    early=st.sampled_from([0, 0, 3, 7]),
    seed=st.integers(0, 10**6),
)
def test_stop_strings_by_definition(text, stops, include, early, seed):
    """For any cutting into pieces: the same text, the same stop string, nothing shown too early."""
    rng, checker, shown = random.Random(seed), StopStrings(stops, include), ""
    wanted, stop = cut(text, stops, include, early)
    while text and checker.found is None:
        size = rng.randrange(1, 6)
        size = min(size, early) if early else size
        shown += checker.feed(text[:size], overlook=early > 0)
        text, early = text[size:], max(0, early - size)
        assert wanted.startswith(shown)
    if checker.found is None:
        shown += checker.finish()
    assert (shown, checker.found) == (wanted, stop)


def test_only_what_may_be_a_stop_string_is_held_back():
    checker = StopStrings(["\nUser:"], False)
    assert checker.feed("Hello") == "Hello"
    assert checker.feed(" there\nUs") == " there"
    assert checker.feed("ual") == "\nUsual"
    assert checker.feed("\nUser: hi") == "" and checker.found == "\nUser:"


def test_num_tokens_ends_with_the_stop_string(tokenizer):
    ids = tokenizer.encode("the quick brown fox. the dog.", add_special_tokens=False)
    pieces, rest, detokenizer = stream(tokenizer, [], ids, stop=["fox."])
    text = "".join(pieces) + rest
    assert text == "the quick brown " and detokenizer.stop_reason == "fox."
    fed = ids[: detokenizer.num_tokens]
    assert "fox." in tokenizer.decode(fed) and "fox." not in tokenizer.decode(fed[:-1])
    pieces, rest, _ = stream(tokenizer, [], ids, stop=["fox."], include_stop_str_in_output=True)
    assert "".join(pieces) + rest == "the quick brown fox."
    pieces, rest, detokenizer = stream(tokenizer, [], ids, stop=["dog.\n"])
    assert "".join(pieces) == "the quick brown fox. the " and rest == "dog." and not detokenizer.stop_reason


def test_min_tokens_overlooks_early_stop_strings(tokenizer):
    ids = tokenizer.encode("the dog. the dog. the dog.", add_special_tokens=False)
    pieces, rest, detokenizer = stream(tokenizer, [], ids, stop=["dog"], min_tokens=len(ids) // 3 + 1)
    assert "".join(pieces) + rest == "the dog. the " and detokenizer.stop_reason == "dog"


def test_a_stop_string_in_what_is_flushed_is_found(kind, tokenizer):
    if kind == "metaspace":
        pytest.skip("no bytes")
    ids = tokenizer.encode("a🦄", add_special_tokens=False)[:-1]
    pieces, rest, detokenizer = stream(tokenizer, [], ids, stop=["\ufffd"])
    assert "".join(pieces) + rest == "a" and detokenizer.stop_reason == "\ufffd"
    pieces, rest, detokenizer = stream(tokenizer, [], ids, stop=["\ufffd"], min_tokens=len(ids))
    assert rest.strip("\ufffd") == "" != rest and detokenizer.stop_reason is None
