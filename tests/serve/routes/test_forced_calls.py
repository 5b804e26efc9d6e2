"""Forced and strict tool calls: what reaches the engine, and how its answers are read."""

import json

import openai
import pydantic
import pytest
from scripted import script
from servers import KEY, ThreadServer

pytestmark = pytest.mark.model
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


class Weather(pydantic.BaseModel):
    """Look up the weather."""

    city: str
    days: int


WEATHER = openai.pydantic_function_tool(Weather, name="get_weather")
TIME = {"type": "function", "function": {"name": "now"}}
TOOLS = [{**WEATHER, "function": {**WEATHER["function"], "strict": False}}, TIME]
ARGUMENTS = '{"city": "K\u00f6ln", "days": 2}'
CALL = '{"name": "get_weather", "arguments": ' + ARGUMENTS + "}"
LISTED_CALL = '[{"name": "get_weather", "parameters": ' + ARGUMENTS + "}]"
ANSWERS = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "llama3_json": CALL.replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "pythonic": '[get_weather(city="K\u00f6ln", days=2)]',
    "none": LISTED_CALL,
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


class Server(ThreadServer):
    """A server that answers in one notation, and remembers the shapes that its engine gets."""

    def __init__(self, notation):
        super().__init__(kv="fp16", chat_template=TEMPLATE, tool_call_parser=notation)
        script(self.engine, self.tokenizer, {"call": ANSWERS[notation], "text": "No."})
        self.shapes, add = [], self.engine.add

        def watched(request_id, ids, params, **options):
            self.shapes.append(params.structured_outputs)
            add(request_id, ids, params, **options)

        self.engine.add = watched

    @property
    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def ask(self, text, **given):
        self.shapes.clear()
        given = {"model": "tiny", "tools": TOOLS, **given}
        return self.client.chat.completions.create(messages=[{"role": "user", "content": text}], **given)

    def grammar(self):
        (shape,) = self.shapes
        return None if shape is None else shape.grammar


@pytest.fixture(scope="module", params=ANSWERS)
def server(request):
    with Server(request.param) as server:
        server.notation = request.param
        yield server


@pytest.mark.parametrize(
    "choice, reason", [("required", "tool_calls"), (NAMED, "stop"), (ALLOWED, "tool_calls")]
)
def test_forced_calls(server, choice, reason):
    """A named function ends with `stop`, as with OpenAI and vLLM."""
    chosen = server.ask("call", tool_choice=choice).choices[0]
    assert chosen.finish_reason == reason and chosen.message.content is None
    (call,) = chosen.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", json.loads(ARGUMENTS))
    grammar = server.grammar()
    assert grammar.count("%json") == (2 if choice == "required" else 1) or server.notation == "pythonic"
    assert ("now" in grammar) == (choice == "required") and "start: calls\n" in grammar
    chunks = list(server.ask("call", tool_choice=choice, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.arguments for call in calls] == [chosen.message.tool_calls[0].function.arguments]
    assert chunks[-1].choices[0].finish_reason == reason
    assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
