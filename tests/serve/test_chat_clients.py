"""Clients and frameworks that people use, against the server; each test skips where its package is missing.

The answers are the bundled model's own, so schemas and forced calls are kept by the server alone.
"""

import json
from typing import Literal

import pytest
from pydantic import BaseModel, Field
from servers import KEY, ThreadServer

pytestmark = [pytest.mark.model, pytest.mark.slow]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}\n{% endfor %}"
)
CHAT = [{"role": "user", "content": "Name a city"}]


class City(BaseModel):
    model_config = {"extra": "forbid"}
    name: Literal["Rom", "Wien"]
    people: int = Field(ge=0, le=999)


TOOL = {
    "type": "function",
    "function": {"name": "note", "description": "x", "parameters": City.model_json_schema()},
}


@pytest.fixture(scope="module")
def url():
    with ThreadServer(kv="fp16", chat_template=TEMPLATE, tool_call_parser="hermes") as running:
        yield running.url


@pytest.mark.parametrize("name", ["openai/tiny", "hosted_vllm/tiny", "anthropic/tiny"])
def test_litellm(url, name):
    litellm = pytest.importorskip("litellm")
    base = url if name.startswith("anthropic") else f"{url}/v1"
    ask = {"model": name, "api_base": base, "api_key": KEY, "messages": CHAT, "max_tokens": 900}
    ask |= {"temperature": 0, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    for reply in (
        litellm.completion(**ask),
        litellm.stream_chunk_builder(list(litellm.completion(**ask, stream=True))),
    ):
        (call,) = reply.choices[0].message.tool_calls
        given = json.loads(call.function.arguments)
        assert given["name"] in ("Rom", "Wien")
        if not name.startswith("hosted_vllm"):  # for which litellm takes additionalProperties out of a schema
            City.model_validate(given)


def test_litellm_responses(url):
    litellm = pytest.importorskip("litellm")
    ask = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": KEY, "input": "x"}
    *_, last = litellm.responses(**ask, max_output_tokens=5, stream=True)
    assert last.type in ("response.completed", "response.incomplete")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(url, mode):
    instructor = pytest.importorskip("instructor")
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=instructor.Mode[mode])
    ask = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_retries": 1}
    assert isinstance(client.chat.completions.create(response_model=City, **ask), City)


@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(url, api):
    ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    agent = ai.Agent(getattr(models, api)("tiny", provider=provider), output_type=City)
    assert isinstance(agent.run_sync("Name a city").output, City)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(url, responses):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key=KEY, temperature=0, use_responses_api=responses
    )
    assert isinstance(model.with_structured_output(City).invoke("Name a city"), City)
