"""A budget of thinking, from Python and through the server, on a real engine; and what comes behind it."""

import asyncio
import json

import httpx
import pytest
from servers import ThreadServer, bearer

from qrt import LLM, AsyncLLM, SamplingParams
from qrt.errors import ConfigError
from qrt.text.reasoning import FORMATS, ReasoningFormat
from qrt.text.tool_calls import FORMATS as NOTATIONS

pytestmark = pytest.mark.model
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}{% if not quick %} §{% endif %}"
)
ASK = [{"role": "user", "content": "The president said"}]
TOOL = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"x": {"enum": [1, 2]}},
        "required": ["x"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module", autouse=True)
def signs():
    """Marks that are tokens of their own for tiny too."""
    FORMATS["signs"] = ReasoningFormat(("§",), ("¶",))
    yield
    del FORMATS["signs"]


@pytest.fixture(scope="module")
def llm(signs):
    return LLM("tiny", kv="fp16", reasoning_parser="signs")


def ids(llm, text):
    return llm.tokenizer.encode(text, add_special_tokens=False)


def limited(budget, **named):
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 30, "ignore_eos": True, **named}, thinking_token_budget=budget
    )


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_thinking_ends_with_its_budget(llm, budget):
    closing = [*ids(llm, "\n"), *ids(llm, "¶")]
    (free,) = llm.chat(ASK, limited(None), use_tqdm=False, chat_template=TEMPLATE)
    (held,) = llm.chat(ASK, limited(budget), use_tqdm=False, chat_template=TEMPLATE)
    found = held.outputs[0].token_ids
    assert found[: budget + len(closing)] == free.outputs[0].token_ids[:budget] + closing
    assert len(found) == 30
    (same,) = llm.generate([held.prompt_token_ids], limited(budget), use_tqdm=False)
    assert same.outputs[0].token_ids == found


def test_an_answer_without_thinking_has_no_budget(llm):
    options = {"use_tqdm": False, "chat_template": TEMPLATE, "chat_template_kwargs": {"quick": True}}
    (free,), (held,) = (llm.chat(ASK, limited(budget), **options) for budget in (None, 2))
    assert held.outputs[0].token_ids == free.outputs[0].token_ids
    with pytest.raises(ConfigError, match="thinking_token_budget: expected none"):
        LLM("tiny", kv="fp16").generate(["x"], limited(5), use_tqdm=False)


def test_the_shape_begins_behind_the_thinking(llm):
    params = limited(4, structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False)
    (found,) = llm.chat(ASK, params, use_tqdm=False, chat_template=TEMPLATE)
    thought, _, answer = found.outputs[0].text.partition("¶")
    assert answer in ("yes", "no") and thought and found.outputs[0].finish_reason == "stop"


def test_async_llm_keeps_the_budget():
    async def run():
        llm = AsyncLLM("tiny", kv="fp16", reasoning_parser="signs")
        async for output in llm.generate("The president §", limited(3)):
            found = output.outputs[0].token_ids
        await llm.shutdown()
        return found, [*ids(llm, "\n"), *ids(llm, "¶")]

    found, closing = asyncio.run(run())
    assert found[3 : 3 + len(closing)] == closing


@pytest.mark.parametrize("notation", NOTATIONS)
def test_forced_calls_behind_the_thinking(notation):
    """Random answers of a small model: each is a call, behind a thinking that keeps its budget."""
    parsers = {"reasoning_parser": "signs", "tool_call_parser": notation}
    with ThreadServer(kv="fp16", chat_template=TEMPLATE, **parsers) as server:
        with httpx.Client(base_url=server.url, headers=bearer(), timeout=60) as client:
            body = {
                "messages": ASK, "n": 4, "seed": 1, "temperature": 1, "max_tokens": 250,
                "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required",
                "parallel_tool_calls": False, "thinking_token_budget": 6,
            }  # fmt: skip
            reply = client.post("/v1/chat/completions", json=body).json()
    for choice in reply["choices"]:
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls" and message["content"] is None, message
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"])["x"] in (1, 2)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 4 * (6 + 1)
