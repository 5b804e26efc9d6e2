"""A system message behind the first one, on every route of chats, with a template that wants it first."""

import httpx
import pytest
from servers import ThreadServer, bearer

pytestmark = pytest.mark.model
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
WANTED = "<system>Be brief.<user>Hi<user>Agents changed.<user>Go on.<assistant>"


@pytest.fixture(scope="module")
def server():
    with ThreadServer(kv="fp16", chat_template=TEMPLATE, api_keys=()) as running:
        yield running


def turns(role):
    said = [("user", "Hi"), (role, "Agents changed."), ("user", "Go on.")]
    return [{"role": role, "content": text} for role, text in said]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_every_route_repairs_a_late_system_message(server, role):
    with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
        chat = {"messages": [{"role": "system", "content": "Be brief."}, *turns(role)], "max_tokens": 1}
        rendered = client.post("/v1/chat/completions/render", json=chat).json()
        assert rendered["prompt"] == WANTED
        count = len(rendered["token_ids"])
        reply = client.post("/v1/chat/completions", json=chat).json()
        assert reply["usage"]["prompt_tokens"] == count
        assert client.post("/tokenize", json={"messages": chat["messages"]}).json()["count"] == count
        items = {"instructions": "Be brief.", "input": turns(role), "max_output_tokens": 1}
        assert client.post("/v1/responses", json=items).json()["usage"]["input_tokens"] == count
        assert client.post("/v1/responses/input_tokens", json=items).json()["input_tokens"] == count
        body = {"system": "Be brief.", "messages": turns("system"), "max_tokens": 1}
        usage = client.post("/v1/messages", json=body).json()["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
        assert client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"] == count
