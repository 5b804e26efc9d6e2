"""Who is let in: a key on every route but health and the page, wherever a proxy puts them."""

import http.client

import httpx
import pytest
from servers import KEY, ThreadServer, bearer, refused

from qrt.errors import ConfigError
from qrt.serve.settings import ServerConfig

pytestmark = pytest.mark.model
OPEN = ("/", "/page/app.js", "/health", "/healthz", "/ping", "/liveness", "/readiness")


@pytest.fixture(scope="module")
def client(server):
    """Without a key."""
    with httpx.Client(base_url=server.url) as client:
        yield client


def test_every_route_wants_a_key_but_health(server, client):
    for path in OPEN:
        assert client.get(path).status_code == 200
        if path == "/ping":
            assert client.post(path).status_code == 200
        else:
            refused(client.post(path), 401)
    paths = server.server.config.app.openapi()["paths"]
    assert len(paths) > 12
    for path in [*paths, "/openapi.json", "/v1/embeddings", "/get_model_info", "/nowhere", "/v1/models/x"]:
        for headers in ({}, bearer("wrong"), {"Authorization": KEY}, bearer(KEY + "x")):
            reply = client.get(path, headers=headers)
            if path.startswith("/v1/messages"):
                assert reply.status_code == 401 and reply.json()["type"] == "error"
            else:
                assert refused(reply, 401)
            assert reply.headers["WWW-Authenticate"] == "Bearer"


def test_the_key_comes_before_the_body(server):
    reply = httpx.post(f"{server.url}/v1/completions", content=b"{broken", headers=bearer("wrong"))
    refused(reply, 401)


def test_the_scheme_is_in_any_case(server):
    """The key is not."""
    for scheme, key, code in (("bearer", KEY, 200), ("BEARER", KEY, 200), ("Bearer", KEY.upper(), 401)):
        headers = {"Authorization": f"{scheme} {key}"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == code


def test_an_empty_key_is_no_key():
    with pytest.raises(ConfigError, match="api_key: expected a key that is not empty"):
        ServerConfig(model_names=("x",), api_keys=("",))


@pytest.mark.parametrize("root_path", ["/page", "/qrt", "/qrt/", "/health"])
def test_a_root_path_opens_and_shuts_nothing(root_path):
    """The key is wanted by the path below it, which is the one that routes go by."""
    with ThreadServer(kv="fp16", root_path=root_path) as server, httpx.Client(base_url=server.url) as client:
        for path in OPEN:
            assert client.get(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere", "/other/health", "/qrtx/health"):
            refused(client.get(path), 401)
        assert client.get("/v1/models", headers=bearer()).status_code == 200


def test_a_proxy_may_strip_the_root_path_or_forward_it():
    with ThreadServer(kv="fp16", root_path="/llm") as server, httpx.Client(base_url=server.url) as client:
        for path in OPEN:
            reply, stripped = client.get(f"/llm{path}"), client.get(path)
            assert reply.status_code == 200 and reply.content == stripped.content, path
        for prefix in ("", "/llm"):
            refused(client.get(f"{prefix}/v1/models"), 401)
            assert client.get(f"{prefix}/v1/models", headers=bearer()).json()["data"][0]["id"] == "tiny"
            document = client.get(f"{prefix}/openapi.json", headers=bearer()).json()
            assert document["servers"] == [{"url": "/llm"}] and "/v1/models" in document["paths"]
            reply = client.post(f"{prefix}/v1/completions", json={"prompt": "x"}, headers=bearer())
            assert reply.status_code == 200
        page = client.get("/llm")
        assert page.status_code == 307 and page.headers["location"] == "/llm/", "its links begin there"
        for path in ("/llm/llm/v1/models", "/llmx/v1/models", "/llm/nowhere", "/llm//v1/models"):
            refused(client.get(path), 401)
            refused(client.get(path, headers=bearer()), 404)


def test_root_path_equal_to_a_route_hides_none():
    with ThreadServer(kv="fp16", root_path="/v1") as server:
        with httpx.Client(base_url=server.url, headers=bearer()) as client:
            for path in ("/v1/models", "/v1/v1/models", "/v1/metrics", "/metrics"):
                assert client.get(path).status_code == 200, path


@pytest.mark.parametrize("root_path", ["llm", "/a b", "//llm", "http://x/llm", "/llm?a", "/l%6cm"])
def test_a_root_path_is_a_path(root_path):
    with pytest.raises(ConfigError, match="root_path: expected a path such as /llm, got "):
        ServerConfig(model_names=("x",), root_path=root_path)
    assert ServerConfig(model_names=("x",), root_path="/a/b/").root_path == "/a/b"


@pytest.mark.parametrize("space", ["", " ", "   ", "\t", " \t "])
def test_spaces_around_a_key_do_not_count(server, space):
    def status(name, value):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", "/v1/models", headers={name: value})
        return connection.getresponse().status

    for header in (f"Bearer {space}{KEY}{space}", f"{space}bearer {KEY}"):
        assert status("Authorization", header) == 200
    assert status("X-API-Key", f"{space}{KEY}{space}") == 200
    for wrong in (f"Bearer {KEY[0]} {KEY[1:]}", f"Bearer {KEY}{space} x", f"{space}{KEY}", "Bearer", space):
        assert status("Authorization", wrong) == 401
