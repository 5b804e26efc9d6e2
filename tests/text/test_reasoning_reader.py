"""What a prompt's end says of the thinking, in text and in token ids."""

import pytest
from templates import TEMPLATES
from tokenizers import AddedToken

import small_tokenizers
from qrt.errors import ConfigError
from qrt.request.sampling import SamplingParams
from qrt.request.thinking import Thinking
from qrt.text.chat_template import ChatTemplate
from qrt.text.reasoning import FORMATS, ReasoningReader
from qrt.text.reasoning.counting import ReasoningCounter
from qrt.text.tokenizer import Tokenizer

CHANNEL_TOKENS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"]
ASK = [{"role": "user", "content": "What does <think> mean?"}]
TAIL = "<|im_start|>assistant\n"


def tokenizer(folder, kind="byte_level", special=()):
    made = getattr(small_tokenizers, kind)()
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return Tokenizer(small_tokenizers.save(made, folder))


def rendered(name, messages, **arguments):
    return ChatTemplate(TEMPLATES[name], {}).render(messages, **arguments)


@pytest.fixture
def reader(tmp_path):
    return lambda name, template="": ReasoningReader(name, template, tokenizer(tmp_path))


def test_the_prompts_end_says_whether_it_thinks(reader):
    qwen = reader("auto", TEMPLATES["qwen3"])
    assert qwen.format is FORMATS["qwen3"]
    prompt = rendered("qwen3", ASK, add_generation_prompt=True)
    assert prompt.endswith(TAIL) and qwen.read(prompt).inside is False
    off = rendered("qwen3", ASK, add_generation_prompt=True, enable_thinking=False)
    assert off.endswith("<think>\n\n</think>\n\n") and qwen.read(off) is None
    assert qwen.read(prompt + "<think>\n").inside is True
    r1 = reader("deepseek_r1")
    assert r1.read("<|Assistant|>").inside is True and r1.read("<|Assistant|></think>") is None
    assert reader("none", TEMPLATES["qwen3"]).read(prompt + "<think>") is None


def test_an_answer_that_has_begun_thinks_only_where_it_does(reader):
    for name in ("qwen3", "deepseek_r1"):
        here = reader(name)
        for begun, inside in (
            ("<think>\nOkay", True), ("<think>Okay</think>\n\nYes", None), ("Yes", None),
            ("<think>\n", True), ("Okay</think>", None),
        ):  # fmt: skip
            found = here.read(f"user: hi {TAIL}{begun}", continued=True)
            assert (found.inside if found else None) is inside, begun


def test_channels_go_on_where_the_prompt_ends(reader):
    here = reader("gpt-oss")
    head = "<|start|>user<|message|>hi<|end|><|start|>assistant"
    for begun, answer, wanted in (
        ("", "<|channel|>final<|message|>b", "b"),
        ("<|channel|>final<|message|>a", "b", "b"),
        ("<|channel|>analysis<|message|>a", "b<|end|><|start|>assistant<|channel|>final<|message|>c", "bc"),
    ):
        stream = here.read(head + begun, continued=bool(begun)).stream(())
        assert "".join(part.text for part in stream.feed(answer) + stream.finish()) == wanted


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_marks_are_the_tokens_that_an_answer_has(kind, tmp_path):
    """Also where a tokenizer puts a space before a text's first token."""
    here = tokenizer(tmp_path, kind)
    params = SamplingParams(max_tokens=50, thinking_token_budget=5)
    thinking = ReasoningReader("qwen3", "", here).read("x").thinking(params)
    (start,), (end,) = (
        here.encode_all(["<think>", "</think>"], add_special_tokens=False)[0][-1:],
        thinking.end,
    )
    assert thinking.start == (start,) and here.token_text(end) == "</think>"
    assert (thinking.inside, thinking.budget) == (False, 5)
    closing = "directly now.</think>" if kind == "metaspace" else "directly now.\n</think>"  # it has no \n
    assert here.decode(thinking.closing).endswith(closing)


def test_the_engine_learns_of_budgets_and_grammars_only(reader):
    qwen = reader("qwen3")
    plain, limited = SamplingParams(max_tokens=50), SamplingParams(max_tokens=50, thinking_token_budget=5)
    shaped = SamplingParams(structured_outputs={"regex": "a"})
    found = qwen.read(TAIL)
    assert found.thinking(plain) is None
    assert found.thinking(limited).budget == 5 and found.thinking(shaped).budget is None
    ids = qwen._tokenizer.encode(TAIL)
    inside = qwen._tokenizer.encode(TAIL + "<think>\n")
    assert qwen.plain_thinking(inside, plain) is None
    assert qwen.plain_thinking(ids, shaped) is None, "a prompt that may be no chat: shaped at once"
    assert qwen.plain_thinking(inside, shaped).inside is True
    assert qwen.plain_thinking(ids, limited).inside is False


def test_a_budget_in_channels_ends_the_analysis(tmp_path):
    here = tokenizer(tmp_path, special=CHANNEL_TOKENS)
    reader = ReasoningReader("gpt-oss", "", here)
    params = SamplingParams(max_tokens=50, thinking_token_budget=5)
    found = reader.read("<|start|>assistant")
    assert found.marks.hidden, "a decoder that skips special tokens would hide the channels"
    thinking = found.thinking(params)
    final = here.encode("<|channel|>final<|message|>")
    assert thinking.inside and list(thinking.end) == final
    assert list(thinking.closing) == here.encode("<|end|><|start|>assistant<|channel|>final<|message|>")
    calling = found.thinking(params, calls=True)
    analysis, end = here.encode("<|channel|>analysis<|message|>"), here.encode("<|end|>")
    assert calling == Thinking(tuple(end), tuple(analysis), False, 5, tuple(end))
    shaped = SamplingParams(max_tokens=50, structured_outputs={"regex": "a"})
    assert list(found.thinking(shaped, calls=True).end) == final


def test_a_budget_without_known_marks_is_refused(reader):
    limited = SamplingParams(max_tokens=50, thinking_token_budget=5)
    with pytest.raises(ConfigError, match="thinking_token_budget: expected none.*reasoning_parser"):
        reader("auto", TEMPLATES["llama3.1"]).check(limited)
    reader("auto", TEMPLATES["qwen3"]).check(limited)
    reader("none").check(SamplingParams())


def test_marks_without_tokens_of_their_own_are_read_as_text(tmp_path):
    """Their last sign joins a new line behind it, and the engine, which sees tokens, cannot find them."""
    here = Tokenizer("tiny")
    found = ReasoningReader("qwen3", "", here).read("x")
    assert not found.marks.exact
    for before, thought in (("<think>\n", "Köln is so"), ("<think>", "a\n\nb")):
        ids = [
            here.encode(text, add_special_tokens=False) for text in (before, thought, "</think>\n\nIt is.")
        ]
        counter = found.counter()
        for token in [token for part in ids for token in part]:
            counter.feed([token])
        assert counter.count == len(ids[1])
    with pytest.raises(ConfigError, match="thinking_token_budget: .* '</think>' is no token of its own"):
        found.thinking(SamplingParams(max_tokens=9, thinking_token_budget=5))
    shaped = SamplingParams(structured_outputs={"regex": "a"})
    assert found.thinking(shaped) is None
    with pytest.raises(ConfigError, match="structured_outputs: "):
        ReasoningReader("qwen3", "", here).read("<think>").thinking(shaped)


@pytest.mark.parametrize("size", [1, 2, 3, 20])
@pytest.mark.parametrize(
    "inside, once, ids, count",
    [
        (False, True, [7, 8, 1, 1, 9, 9, 5, 7, 8, 1], 2),
        (False, True, [1, 1, 9, 9], 0),
        (True, True, [1, 9, 1, 9, 9], 3),
        (True, True, [1, 2, 3], 3),
        (False, False, [7, 8, 1, 9, 9, 5, 7, 8, 2, 3], 3),
        (False, False, [7, 7, 8, 4], 1),
    ],
)  # fmt: skip
def test_tokens_between_marks_are_counted(inside, once, ids, count, size):
    counter = ReasoningCounter((7, 8), (9, 9), inside, once)
    for start in range(0, len(ids), size):
        counter.feed(ids[start : start + size])
    assert counter.count == count
