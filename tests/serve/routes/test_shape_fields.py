"""Shapes of answers: each field of each peer, and what reaches the engine."""

import httpx
import pytest
from servers import ThreadServer, bearer, refused

from qrt import StructuredOutputsParams
from qrt.grammar.ebnf import lark_of
from qrt.serve.routes.protocol import CompletionRequest
from qrt.serve.routes.shapes import READERS

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}
TEXT = '{"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}'
JSON = StructuredOutputsParams(json=TEXT)
OBJECT = StructuredOutputsParams(json_object=True)
REGEX = StructuredOutputsParams(regex="a+")
GRAMMAR = StructuredOutputsParams(grammar='root ::= "a"')
NAMED = {"name": "answer", "schema": SCHEMA}
ASKED = [
    ("response_format", {"type": "json_schema", "json_schema": NAMED}, JSON),  # OpenAI, vLLM, SGLang
    ("response_format", {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}, JSON),
    ("response_format", {"type": "json_schema", "json_schema": {**NAMED, "strict": False}}, JSON),
    ("response_format", {"type": "json_object"}, OBJECT),
    ("response_format", {"type": "json_object", "schema": SCHEMA}, JSON),  # llama.cpp, Together
    ("response_format", {"type": "json_schema", "schema": SCHEMA}, JSON),
    ("response_format", {"type": "json_object", "value": SCHEMA}, JSON),  # TGI
    ("structured_outputs", {"json": SCHEMA}, JSON),  # vLLM
    (
        "structured_outputs",
        {"json": TEXT, "regex": None, "structural_tag": None, "disable_fallback": False},
        JSON,
    ),
    ("structured_outputs", {"regex": "a+"}, REGEX),
    ("structured_outputs", {"grammar": 'root ::= "a"'}, GRAMMAR),
    ("structured_outputs", {"choice": ["a", "b"]}, StructuredOutputsParams(choice=("a", "b"))),
    (
        "structured_outputs",
        {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": None},
        StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
    ),
    ("guided_json", SCHEMA, JSON),  # vLLM's former names, and LightLLM's
    ("guided_json", TEXT, JSON),
    ("guided_regex", "a+", REGEX),
    ("guided_choice", ["a", "b"], StructuredOutputsParams(choice=("a", "b"))),
    ("guided_grammar", 'root ::= "a"', GRAMMAR),
    ("guided_json_object", True, OBJECT),
    ("json_schema", TEXT, JSON),  # SGLang
    ("json_schema", SCHEMA, JSON),  # llama.cpp
    ("json_schema", {}, StructuredOutputsParams(json="{}")),
    ("regex", "a+", REGEX),
    ("ebnf", 'root ::= "a"', GRAMMAR),
    ("grammar", 'root ::= "a"', GRAMMAR),
    ("grammar", {"type": "regex", "value": "a+"}, REGEX),  # TGI
    ("grammar", {"type": "json", "value": SCHEMA}, JSON),
    ("grammar", {"type": "json_schema", "value": NAMED}, JSON),
    ("regular_constraint", "a+", REGEX),  # LightLLM
    ("format", "json", OBJECT),  # Ollama
    ("format", SCHEMA, JSON),
]
NO_SHAPE = [
    ("response_format", {"type": "text"}),
    ("structured_outputs", {"json": None}),
    ("guided_choice", []),
    ("guided_json_object", False),
    ("guided_whitespace_pattern", r"\s"),
    ("grammar", ""),
    ("grammar", {}),
    ("format", ""),
    *((name, None) for name in READERS),
]


def shape(**fields):
    return CompletionRequest.model_validate({"prompt": "x", **fields}).shape()


@pytest.mark.parametrize("name, value, expected", ASKED)
def test_every_peers_field_becomes_a_shape(name, value, expected):
    assert shape(**{name: value}) == expected


@pytest.mark.parametrize("name, value", NO_SHAPE)
def test_fields_that_ask_for_no_shape(name, value):
    assert shape(**{name: value}) is None


def test_a_whitespace_pattern_counts_for_json():
    assert shape(guided_json=TEXT, guided_whitespace_pattern=" ?").whitespace_pattern == " ?"
    assert shape(guided_regex="a+", guided_whitespace_pattern=" ?") == REGEX


@pytest.fixture(scope="module")
def served():
    """A client, and the parameters that the engine gets."""
    with ThreadServer(kv="fp16") as server:
        got, add = [], server.engine.add

        def watched(request_id, ids, params, **options):
            got.append(params)
            add(request_id, ids, params, **options)

        server.engine.add = watched
        with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
            yield client, got


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
ROUTES = [("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 1}), ("/v1/chat/completions", CHAT)]


@pytest.mark.model
def test_the_engine_gets_the_shape(served):
    """EBNF in Lark's notation."""
    client, got = served
    for name, value, expected in ASKED[::5]:
        if expected.grammar:
            expected = StructuredOutputsParams(grammar=lark_of(expected.grammar))
        for route, body in ROUTES:
            got.clear()
            assert client.post(route, json={**body, name: value, "n": 2}).status_code == 200
            assert [params.structured_outputs for params in got] == [expected] * (
                2 * len(body.get("prompt", "x"))
            )
        got.clear()
        parameters = {"max_new_tokens": 1, name: value}
        assert client.post("/generate", json={"inputs": "x", "parameters": parameters}).status_code == 200
        assert [params.structured_outputs for params in got] == [expected]


@pytest.mark.model
@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format and guided_regex: ",
        ),
        ({"regex": "a", "json_schema": {}}, "json_schema and regex: expected one of them"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs: expected one of"),
        ({"structured_outputs": {"schema": {}}}, "structured_outputs: expected json, regex"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs: expected one of"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type: expected text, json_object or json_schema",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema: expected a JSON"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
            "response_format.json_schema.schema: expected a JSON schema, an object, got 5",
        ),
        ({"response_format": "json"}, "response_format: Input should be"),
        ({"guided_json": "{"}, "guided_json: expected a JSON schema"),
        ({"guided_choice": ["a", ""]}, "guided_choice: expected non-empty texts"),
        ({"format": "yaml"}, "format: expected a JSON schema"),
        ({"grammar": {"type": "lark", "value": "x"}}, "grammar.type: expected json, json_schema or regex"),
        ({"grammar": {"type": "regex"}}, "grammar.value: expected"),
        ({"regex": 5}, "regex: Input should be a valid string"),
    ],
)
def test_wrong_shapes_are_refused_by_name(served, fields, message):
    for route, body in ROUTES:
        assert refused(served[0].post(route, json={**body, **fields})).startswith(message)
    reply = served[0].post("/generate", json={"inputs": "x", "parameters": fields})
    assert refused(reply).removeprefix("parameters.").startswith(message)


@pytest.mark.model
def test_structural_tags_are_refused_by_name(served):
    for fields, name in (
        (
            {"response_format": {"type": "structural_tag", "format": {}}},
            "response_format.type: structural tags",
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag: structural tags",
        ),
        ({"structural_tag": "{}"}, "structural_tag: structural tags"),
    ):
        for route, body in ROUTES:
            assert refused(served[0].post(route, json={**body, **fields}), 501).startswith(name)


@pytest.mark.model
def test_a_prompt_that_is_only_scored_has_no_shape(served):
    body = {"prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 0}
    assert served[0].post("/v1/completions", json=body).status_code == 200
    reply = served[0].post("/v1/completions", json={**body, "regex": "a"})
    assert refused(reply) == "max_tokens: expected at least 1 for an answer that has a shape, got 0"
