"""Forced and strict tool calls: what reaches the engine, and how its answers are read."""

import json
from functools import cached_property

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
    "pythonic": '[get_weather(city="K\u00f6ln", days=2)]',
    "none": LISTED_CALL,
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


class Server(ThreadServer):
    """A server that answers in one notation, and remembers the shapes that its engine gets."""

    def __init__(self, notation):
        super().__init__(kv="fp16", chat_template=TEMPLATE, tool_call_parser=notation)
        script(self.engine, self.tokenizer, {"call": ANSWERS[notation], "text": "No.", "json": ARGUMENTS})
        self.shapes, add = [], self.engine.add

        def watched(request_id, ids, params, **options):
            self.shapes.append(params.structured_outputs)
            add(request_id, ids, params, **options)

        self.engine.add = watched

    @cached_property
    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def ask(self, text, **given):
        self.shapes.clear()
        given = {"model": "tiny", "tools": TOOLS, **given}
        return self.client.chat.completions.create(messages=[{"role": "user", "content": text}], **given)

    def grammar(self):
        (shape,) = self.shapes
        return None if shape is None else shape.grammar


@pytest.fixture(scope="module", params=["hermes", "pythonic", "none"])
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


def test_strict_tools_of_the_openai_client(server):
    """`pydantic_function_tool` makes strict ones, whose arguments `parse` reads back."""
    server.shapes.clear()
    asked = [{"role": "user", "content": "call"}]
    reply = server.client.chat.completions.parse(model="tiny", tools=[WEATHER], messages=asked)
    if server.notation == "none":
        assert server.grammar() is None and reply.choices[0].message.content == LISTED_CALL
        return
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="K\u00f6ln", days=2)
    assert "TEXT" in server.grammar() and reply.choices[0].finish_reason == "tool_calls"


def test_calls_without_strict_tools_are_free(server):
    assert server.ask("text").choices[0].message.content == "No." and server.grammar() is None
    server.ask("text", tool_choice="none", response_format={"type": "json_object"})
    assert server.shapes[0].json_object


def test_one_call_at_a_time(server):
    for given, more in (({}, True), ({"parallel_tool_calls": False}, False)):
        server.ask("call", tool_choice="required", **given)
        assert ("{0,127}" in server.grammar()) == more
    server.ask("call", tool_choice=NAMED)
    assert "{0,127}" not in server.grammar()


def test_a_shape_beside_tools(server):
    """The answer has the shape, unless it calls; forced calls leave no other answer."""
    server.ask("text", response_format={"type": "json_object"})
    if server.notation == "none":
        assert server.shapes[0].json_object, "its calls are text"
    else:
        assert "start: calls | answer\n" in server.grammar()
        with pytest.raises(openai.BadRequestError, match="expected no tools beside a grammar"):
            server.ask("text", extra_body={"structured_outputs": {"grammar": "start: /a/"}})
    server.ask("call", tool_choice="required", response_format={"type": "json_object"})
    assert "answer" not in server.grammar()


def test_what_cannot_be_enforced_names_its_place(server):
    for schema, place in (
        ({"type": "string"}, "tools.0.function.parameters.type: expected object"),
        ({"properties": {"x": {"not": {}}}}, "tools: expected a supported schema, got keyword 'not'"),
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        with pytest.raises(openai.BadRequestError) as error:
            server.ask("call", tools=[tool], tool_choice="required")
        assert error.value.body["message"].startswith(place)


def test_parse_of_the_openai_client():
    """Its response_format is a model of pydantic, sent as a strict schema and read back."""
    with Server("hermes") as server:
        asked = [{"role": "user", "content": "json"}]
        reply = server.client.chat.completions.parse(model="tiny", messages=asked, response_format=Weather)
        assert reply.choices[0].message.parsed == Weather(city="K\u00f6ln", days=2)
        sent = json.loads(server.shapes[0].json)
        assert sent["additionalProperties"] is False and sent["required"] == ["city", "days"]
        with pytest.raises(openai.BadRequestError) as error:
            server.client.chat.completions.create(
                model="tiny",
                messages=asked,
                response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
            )
        assert error.value.body["message"] == (
            "response_format.json_schema.schema: expected a supported schema, got keyword 'not'; leave it out"
        )
