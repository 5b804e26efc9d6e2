"""`/render` shows the prompt and parameters that the same body runs with."""

import httpx
import pytest
from servers import bearer, refused

pytestmark = pytest.mark.model
CHAT = {"messages": [{"role": "user", "content": "What is a function?"}]}


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
        yield client


def test_a_rendered_prompt_is_the_one_that_runs(client, server):
    wanted = {"temperature": 0.5, "seed": 7, "max_tokens": 4}
    rendered = client.post("/v1/chat/completions/render", json={**CHAT, **wanted}).json()
    assert rendered["prompt"] == server.tokenizer.render_chat(CHAT["messages"], add_generation_prompt=True)
    assert rendered["token_ids"] == client.post("/tokenize", json=CHAT).json()["tokens"]
    assert {name: rendered["sampling_params"][name] for name in wanted} == wanted
    reply = client.post("/v1/chat/completions", json={**CHAT, **wanted}).json()
    again = client.post("/v1/completions", json={"prompt": rendered["token_ids"], **wanted}).json()
    assert again["choices"][0]["text"] == reply["choices"][0]["message"]["content"]


def test_every_prompt_of_a_body_is_rendered(client):
    body = {"prompt": ["The president", "In this"], "logit_bias": {"5": 1}, "stream": True}
    first, second = client.post("/v1/completions/render", json=body).json()
    assert [first["prompt"], second["prompt"]] == body["prompt"] and first["stream"]
    assert first["token_ids"] == client.post("/tokenize", json={"prompt": "The president"}).json()["tokens"]
    assert first["sampling_params"]["logit_bias"] == {"5": 1} and first["request_id"] != second["request_id"]


def test_render_refuses_what_the_route_refuses(client):
    body = {**CHAT, "model": "other"}
    for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
        assert refused(client.post(path, json=body), 404).startswith("model: ")
    many = {"prompt": ["x"] * 1024, "logit_bias": {str(token): 1 for token in range(1024)}}
    assert "in lists per body" in refused(client.post("/v1/completions/render", json=many))
