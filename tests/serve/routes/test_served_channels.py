"""A conversation in gpt-oss's channels through the server, with the openai client."""

import json
from dataclasses import replace

import openai
import pytest
from scripted import script
from servers import KEY, ThreadServer

from qrt.serve.routes import tools as routes_tools

pytestmark = pytest.mark.model
# In the form of gpt-oss's own template: it reads an earlier analysis as `thinking`
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.tool_calls %}"
    "{% if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
    "{% endif %}"
    "{{ '<|start|>assistant<|channel|>commentary to=functions.' + m.tool_calls[0].function.name"
    " + '<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
NEXT = "<|end|><|start|>assistant"
ARGUMENTS = '{"city": "Köln"}'
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
ANALYSIS = "<|channel|>analysis<|message|>"
ANSWERS = {  # the later message of the conversation comes first, as a prompt holds the earlier ones too
    "It rains.": f"{ANALYSIS}It rains, so{NEXT}<|channel|>final<|message|>Take an umbrella.",
    "Köln?": f"{ANALYSIS}I look it up.{NEXT}{CALL}",
    "Paris?": f"<|channel|>commentary<|message|>One moment.{NEXT}{CALL}",
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def server():
    with ThreadServer(kv="fp16", chat_template=TEMPLATE) as running:
        script(running.engine, running.tokenizer, ANSWERS)
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def ask(client, messages, tools=TOOLS, **arguments):
    return client.chat.completions.create(
        model="tiny", messages=messages, extra_body={"ignore_eos": True}, tools=tools, **arguments
    )


def test_a_call_and_then_the_answer(client):
    messages = [{"role": "user", "content": "Köln?"}]
    first = ask(client, messages).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.content is None
    assert first.message.reasoning == "I look it up."
    (call,) = first.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == json.loads(ARGUMENTS)
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    second = ask(client, [*messages, first.message.model_dump(exclude_none=True), result]).choices[0]
    assert second.finish_reason == "stop" and second.message.tool_calls is None
    assert (second.message.reasoning, second.message.content) == ("It rains, so", "Take an umbrella.")


def test_streamed_a_preamble_is_content(client):
    content, arguments, reasons = "", "", []
    for chunk in ask(client, [{"role": "user", "content": "Paris?"}], stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        arguments += "".join(call.function.arguments for call in choice.delta.tool_calls or [])
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert content == "One moment." and json.loads(arguments) == json.loads(ARGUMENTS)
    assert reasons == ["tool_calls"]


def test_the_earlier_analysis_reaches_the_template(client):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    assistant = {"role": "assistant", "tool_calls": [call]}
    turns = [
        {"role": "user", "content": "x"},
        assistant,
        {"role": "tool", "tool_call_id": "1", "content": "y"},
    ]

    def prompt(**thought):
        body = {"messages": [turns[0], {**assistant, **thought}, turns[2]]}
        tokens = client.post("../tokenize", body=body, cast_to=object)["tokens"]
        return client.post("../detokenize", body={"tokens": tokens}, cast_to=object)["prompt"]

    shown = f"<|start|>assistant{ANALYSIS}Look.<|end|>"
    assert shown in prompt(reasoning="Look.") and shown in prompt(reasoning_content="Look.")
    assert ANALYSIS not in prompt()
    assert ANALYSIS not in prompt(reasoning="Look.", content="I look."), "the template refuses both"


def test_strict_tools_have_a_grammar(server, client, monkeypatch):
    """The rules are those of `channel_grammar`; here the marks are text, so that there is none."""
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    messages = [{"role": "user", "content": "Köln?"}]
    with pytest.raises(openai.InternalServerError, match="tools: expected none with strict: true"):
        ask(client, messages, strict)
    marks = {
        mark: number for number, mark in enumerate(("<|start|>", "<|channel|>", "<|message|>", "<|end|>"), 5)
    }
    reader = server.service.reasoning
    monkeypatch.setattr(reader, "_marks", replace(reader._marks, exact=True))
    rules, real = [], routes_tools.channel_grammar
    monkeypatch.setattr(
        routes_tools, "channel_grammar", lambda calls, _: rules.append(real(calls, marks)) or rules[-1]
    )
    (call,) = ask(client, messages, strict).choices[0].message.tool_calls
    assert call.function.name == "weather" and "to=functions.weather" in rules[0]
    assert ask(client, messages).choices[0].message.tool_calls and len(rules) == 1
