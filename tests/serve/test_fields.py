"""Fields of a body: which are run, refused by name or let in, and what is said of a wrong one."""

import httpx
import pytest
from servers import ThreadServer, bearer, refused

pytestmark = pytest.mark.model
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def client():
    with ThreadServer(kv="fp16") as server:
        with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
            yield client


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
        {"structured_outputs": {"regex": "(a+)+$"}},
        {"guided_grammar": "root ::= root"},
        {"functions": [{"name": "f"}]},
        {"suffix": "x"},
        {"use_beam_search": True},
    ],
    ids=lambda field: next(iter(field)),
)
def test_what_would_change_the_result_and_is_not_run_is_refused_by_name(client, field):
    """Grammars among it: no schema or expression reaches a compiler."""
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "max_tokens": 2, **field}
    for route in ("/v1/completions", "/v1/chat/completions"):
        assert next(iter(field)) in refused(client.post(route, json=body), 501)
    assert "embeddings" in refused(client.post("/v1/embeddings", json={"input": "x"}), 501)


def test_unknown_fields_that_change_nothing_are_let_in(client):
    fields = {
        "user": "u",
        "store": True,
        "metadata": {"a": 1},
        "service_tier": "auto",
        "parallel_tool_calls": True,
    }
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    body = {"prompt": "x", "max_tokens": 2, "top_logprobs": ["of the other endpoint"]}
    assert client.post("/v1/completions", json=body).status_code == 200
