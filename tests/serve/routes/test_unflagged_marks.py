"""Forced calls where the marks are added tokens that are not flagged special, as Qwen 2.5 and 3 have them."""

import json
import shutil

import httpx
import jsonschema
import pytest
from servers import ThreadServer, bearer

from qrt.assets import model_path

pytestmark = pytest.mark.model
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}"
    "{# <tool_call> <think> #}"
)
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": [1, "<tool_call>", "</think>"]}},
    "required": ["x"],
    "additionalProperties": False,
}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
QUIET = {"thinking_token_budget": 3}


def with_marks(folder):
    """The tiny model, whose last tokens are marks."""
    shutil.copytree(model_path("tiny"), folder)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    vocab = state["model"]["vocab"]
    last = sorted(vocab, key=vocab.get)[-len(MARKS) :]
    ids = {vocab.pop(token): mark for token, mark in zip(last, MARKS, strict=True)}
    vocab |= {mark: number for number, mark in ids.items()}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    state["added_tokens"] += [plain | {"id": number, "content": mark} for number, mark in ids.items()]
    pairs = (
        (merge, merge if isinstance(merge, list) else merge.split(" ")) for merge in state["model"]["merges"]
    )
    state["model"]["merges"] = [m for m, (a, b) in pairs if not {a, b, a + b} & {*last}]
    path.write_text(json.dumps(state))
    return folder


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = with_marks(tmp_path_factory.mktemp("marks") / "model")
    settings = {"chat_template": TEMPLATE, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with ThreadServer(engine={"model": str(folder)}, **settings) as server:
        with httpx.Client(base_url=server.url, headers=bearer(), timeout=60) as client:
            yield client


def post(client, path, **body):
    body = {"model": "tiny", "temperature": 0, **body}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat_calls(client, **body):
    function = {"name": "f", "parameters": SCHEMA, "strict": body.pop("strict", None)}
    body = {"tools": [{"type": "function", "function": function}], "max_tokens": 80, **body}
    reply = post(client, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], **body)
    message = reply["choices"][0]["message"]
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []
    ]


@pytest.mark.parametrize("thinking", [OFF, QUIET], ids=["off", "on"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=["any", "named"]
)
def test_forced_calls_of_a_chat(choice, thinking, client):
    calls = chat_calls(client, tool_choice=choice, **thinking)
    assert calls and all(name == "f" for name, _ in calls)
    for _, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMA)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_strict_tools_of_a_chat(choice, client):
    """With auto the tiny model may write any text; the request is answered."""
    for _, arguments in chat_calls(client, tool_choice=choice, strict=True, **OFF):
        jsonschema.validate(json.loads(arguments), SCHEMA)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}], ids=["any", "tool"])
def test_forced_calls_of_messages(choice, client):
    tools = [{"name": "f", "input_schema": SCHEMA}]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 80, "tools": tools, **OFF}
    blocks = post(client, "/v1/messages", tool_choice=choice, **body)["content"]
    (use, *_) = [block for block in blocks if block["type"] == "tool_use"]
    jsonschema.validate(use["input"], SCHEMA)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}], ids=["any", "named"])
def test_forced_calls_of_responses(choice, client):
    tools = [{"type": "function", "name": "f", "parameters": SCHEMA}]
    reply = post(
        client, "/v1/responses", input="Hi", tools=tools, tool_choice=choice, max_output_tokens=80, **OFF
    )
    (call, *_) = [item for item in reply["output"] if item["type"] == "function_call"]
    jsonschema.validate(json.loads(call["arguments"]), SCHEMA)


@pytest.mark.parametrize("mark", MARKS)
def test_shapes_that_spell_a_mark(mark, client):
    for shape in (
        {"choice": [f"a {mark}"]}, {"json": {"const": mark}}, {"json": {"enum": [mark]}},
        {"regex": f"x{mark}"}, {"grammar": f'root ::= "{mark}"'}, {"grammar": f'start: "a" {mark}'},
    ):  # fmt: skip
        reply = post(client, "/v1/completions", prompt="x", max_tokens=40, structured_outputs=shape)
        (choice,) = reply["choices"]
        assert mark in choice["text"] and choice["finish_reason"] == "stop"


def test_tools_without_arguments_on_all_routes(client):
    for schema in ({"type": "object"}, {"type": "object", "properties": {}}):
        now = {"name": "now", "parameters": schema}
        body = {"tools": [{"type": "function", "function": now}], "tool_choice": "required", "max_tokens": 80}
        assert chat_calls(client, **body, **OFF) == [("now", "{}")]
        tools = [{"name": "now", "input_schema": schema}]
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 80, "tools": tools, **OFF}
        blocks = post(client, "/v1/messages", tool_choice={"type": "any"}, **body)["content"]
        assert [block["input"] for block in blocks if block["type"] == "tool_use"] == [{}]
        body = {"input": "Hi", "max_output_tokens": 80, "tools": [{"type": "function", **now}], **OFF}
        items = post(client, "/v1/responses", tool_choice="required", **body)["output"]
        assert [item["arguments"] for item in items if item["type"] == "function_call"] == ["{}"]
