"""Shapes of answers end to end: whatever the tiny model draws, its answers have them."""

import json
import re

import httpx
import jsonschema
import pytest
from servers import ThreadServer, bearer

from qrt import LLM, SamplingParams, StructuredOutputsParams
from qrt.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "maxItems": 3},
        "kind": {"enum": ["a", 'b"', None]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}
SHAPES = [
    ({"structured_outputs": COMPACT}, lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        lambda text: jsonschema.validate(json.loads(text), SCHEMA),
    ),
    ({"regex": "[a-c]{3,9}x"}, lambda text: re.fullmatch("[a-c]{3,9}x", text)[0]),
    ({"guided_choice": ["yes", "no", "not at all"]}, ["yes", "no", "not at all"].index),
    ({"grammar": 'root ::= "ab" "ab"? "c"'}, lambda text: re.fullmatch("(ab)+c", text)[0]),
]
TINY = Tokenizer("tiny")
# no spaces between JSON's marks, which the tiny model is fond of
SPACES = {str(token): -100 for token in range(4096) if TINY.token_text(token).isspace()}
DRAWN = {"temperature": 1, "max_tokens": 100}
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "save", "parameters": SCHEMA, "strict": True}}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def client():
    with ThreadServer(kv="int8") as server:
        with httpx.Client(base_url=server.url, headers=bearer(), timeout=60) as client:
            yield client


def completions(client, **body):
    """Texts and reasons of the choices, which a stream repeats."""
    body = {"prompt": ["The", "When the"], "n": 2, "logit_bias": SPACES, **DRAWN, **body}
    whole = client.post("/v1/completions", json=body)
    assert whole.status_code == 200, whole.text
    choices = {c["index"]: (c["text"], c["finish_reason"]) for c in whole.json()["choices"]}
    streamed = {index: ["", None] for index in choices}
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                streamed[choice["index"]][0] += choice["text"]
                streamed[choice["index"]][1] = choice["finish_reason"]
    assert {index: tuple(found) for index, found in streamed.items()} == choices
    return list(choices.values())


@pytest.mark.parametrize("fields, check", SHAPES, ids=[next(iter(fields)) for fields, _ in SHAPES])
def test_every_answer_has_its_shape(client, fields, check):
    ended = [text for text, reason in completions(client, seed=3, **fields) if reason == "stop"]
    assert len(ended) > 2
    for text in ended:
        check(text)


def test_shapes_of_lightllm(client):
    parameters = {"do_sample": True, "max_new_tokens": 60, "best_of": 4, "regular_constraint": "(a|bc){2,8}d"}
    reply = (
        client.post("/generate", json={"inputs": "The", "parameters": parameters}).raise_for_status().json()
    )
    assert len(reply["generated_text"]) == 4
    assert all(re.fullmatch("(a|bc){2,8}d", text) for text in reply["generated_text"])


SOME = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama3_json", "mistral")]


@pytest.mark.parametrize("notation", ["hermes", "pythonic", "none", *SOME])
def test_forced_calls_in_every_notation(notation):
    with ThreadServer(kv="fp16", chat_template=TEMPLATE, tool_call_parser=notation) as server:
        with httpx.Client(base_url=server.url, headers=bearer(), timeout=60) as client:
            body = {"messages": [{"role": "user", "content": "The"}], "tools": [TOOL, NOW], **DRAWN, "n": 4}
            body |= {"tool_choice": "required", "logit_bias": SPACES, "seed": 5}
            for parallel in (True, False):
                sent = {**body, "parallel_tool_calls": parallel}
                reply = client.post("/v1/chat/completions", json=sent).raise_for_status().json()
                for choice in reply["choices"]:
                    calls, content = choice["message"]["tool_calls"], choice["message"]["content"]
                    assert parallel or (choice["finish_reason"], content, len(calls)) == (
                        "tool_calls",
                        None,
                        1,
                    )
                    for call in calls:
                        named = {"save": SCHEMA, "now": {"maxProperties": 0}}[call["function"]["name"]]
                        jsonschema.validate(json.loads(call["function"]["arguments"]), named)


def test_shapes_in_python():
    llm = LLM("tiny", device="cpu", kv_cache_memory_bytes=16 << 20)
    shape = StructuredOutputsParams(**COMPACT)
    params = SamplingParams(n=3, structured_outputs=shape, seed=1, **DRAWN)
    (output,) = llm.generate("The", params, use_tqdm=False)
    whole = [answer.text for answer in output.outputs if answer.finish_reason == "stop"]
    assert whole
    for text in whole:
        jsonschema.validate(json.loads(text), SCHEMA)


OWN = [
    {"structured_outputs": {"choice": ["yes"]}, "bad_words": ["yes"]},
    {"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [9]},
    {"structured_outputs": {"choice": ["!!"]}, "min_tokens": 2, "stop_token_ids": [5]},
    {"structured_outputs": {"json": {"const": 2**53 + 1}}},
    {"structured_outputs": {"json": {"$ref": "#"}}},
]


@pytest.mark.parametrize("body", OWN, ids=json.dumps)
def test_an_own_error_is_400_and_never_adds_up(client, body):
    for path, prompt in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": ["x", "y"], "n": 2, "temperature": 1}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        answer = client.post(path, json={"max_tokens": 5, **prompt, **body})
        assert answer.status_code == 400 and "structured_outputs" in answer.json()["error"]["message"], (
            answer.text
        )
    with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, **body}) as stream:
        assert "structured_outputs" in "".join(stream.iter_text())
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    "number", ["9007199254740993", "0.1234567890123456789", "12345678901234567.5", "1e400"]
)
def test_numbers_of_a_body_stay_as_they_are_written(client, number):
    """A double does not hold them: the request is refused, and elsewhere the nearest double counts."""
    for shape in (f'{{"const": {number}}}', f'{{"items": {{"enum": ["a", {number}]}}}}'):
        body = f'{{"prompt": "x", "max_tokens": 9, "structured_outputs": {{"json": {shape}}}}}'
        answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and number[:4] in answer.json()["error"]["message"], answer.text
    for field in ('"temperature": 0.1234567890123456789', '"user": "x", "top_p": 0.10000000000000001'):
        body = f'{{"prompt": "x", "max_tokens": 1, {field}}}'
        answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200, answer.text
