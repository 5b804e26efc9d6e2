"""HTTP of old clients, probes and proxies, over raw sockets and httpx."""

import gzip
import json
import socket

import httpx
import pytest
from servers import KEY, ThreadServer, bearer, refused

pytestmark = pytest.mark.model
KEYED = f"Authorization: Bearer {KEY}\r\n".encode()
CLOSED = b"Host: x\r\nConnection: close\r\n"
GET_ROUTES = ("/", "/page/app.js", "/health", "/healthz", "/ping", "/readiness", "/liveness", "/metrics")
GET_ROUTES += (
    "/load",
    "/v1/models",
    "/v1/models/tiny",
    "/version",
    "/openapi.json",
    "/tokenizer_info",
    "/nowhere",
)


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
        yield client


def raw(server, *data):
    """Send the bytes; return what comes until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        for part in data:
            connection.sendall(part)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def post(body, version=b"1.1", headers=CLOSED):
    text = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/%b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    return head % (version, len(text)) + headers + KEYED + b"\r\n" + text


def parts(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().lower().split("\r\n")
    return status, dict(line.split(": ", 1) for line in lines), body


@pytest.mark.parametrize("path", GET_ROUTES)
def test_head_is_get_without_a_body(server, client, path):
    """HEAD has the status and the length of GET, and needs the same key."""
    get, head = client.get(path), client.head(path)
    assert head.status_code == get.status_code and head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"] if get.content else True
    if path not in ("/metrics", "/load"):  # their numbers change
        assert int(head.headers["content-length"]) == len(get.content)
    keyless = {"Authorization": ""}
    assert client.head(path, headers=keyless).status_code == client.get(path, headers=keyless).status_code
    answer = raw(server, b"HEAD %b HTTP/1.1\r\n" % path.encode() + CLOSED + KEYED + b"\r\n")
    assert answer.endswith(b"\r\n\r\n") and answer.count(b"\r\n\r\n") == 1


def test_head_of_a_route_for_post(client):
    assert client.head("/v1/completions").status_code == 405 == client.get("/v1/completions").status_code


@pytest.mark.parametrize("headers", [b"", b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n"])
def test_an_http_1_0_client_gets_no_chunks(server, headers):
    body = {"prompt": "In the", "max_tokens": 3, "stream": True}
    status, fields, events = parts(raw(server, post(body, b"1.0", headers)))
    assert status == "http/1.1 200 ok" and "transfer-encoding" not in fields
    assert fields["connection"] == "close"
    lines = events.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: {") for line in lines[:-2])
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-2]]
    whole = {**body, "stream": False, "temperature": 0}
    status, fields, reply = parts(raw(server, post(whole, b"1.0", headers)))
    assert int(fields["content-length"]) == len(reply) and json.loads(reply)["choices"][0]["text"] and texts
    status, fields, events = parts(raw(server, post(body)))
    assert fields["transfer-encoding"] == "chunked" and events.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("apart", [False, True])
def test_upgrade_is_ignored_and_the_body_is_read(server, protocol, apart):
    """Java's client offers h2c with every request."""
    offer = b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUPGRADE: " + protocol + b"\r\n"
    request = post({"prompt": "x", "max_tokens": 1}, headers=offer)
    head, _, body = request.partition(b"\r\n\r\n")
    sent = (head + b"\r\n\r\n", body) if apart else (request,)
    last = b"GET /liveness HTTP/1.1\r\n" + CLOSED + b"\r\n"
    answer = raw(server, *sent, last)
    assert answer.count(b"HTTP/1.1 200 OK") == 2 and answer.endswith(b'{"status":"alive"}')


def test_an_error_in_a_stream_of_http_1_0(server):
    status, fields, body = parts(raw(server, post({"prompt": "x", "stream": 5}, b"1.0", b"")))
    assert status.startswith("http/1.1 400") and int(fields["content-length"]) == len(body)


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_a_slash_at_the_end_leads_nowhere_else(root_path):
    """Behind a proxy that ends TLS a redirect would lead to http://, and send the key in clear."""
    with ThreadServer(kv="fp16", root_path=root_path) as server:
        forwarded = {
            **bearer(),
            "X-Forwarded-Proto": "https",
            "X-Forwarded-Host": "evil",
            "Host": "api.example",
        }
        with httpx.Client(base_url=server.url, headers=forwarded) as client:
            for path in ("/v1/completions/", "/v1/chat/completions/", "/generate/", "/health/", "/metrics/"):
                for method in ("GET", "POST"):
                    reply = client.request(method, root_path + path)
                    assert "location" not in reply.headers
                    assert refused(reply, 404).endswith("; leave out the slash at its end"), path
            for path in ("/nowhere/", "/page/", "/page"):
                assert "slash" not in refused(client.get(root_path + path), 404)


@pytest.mark.parametrize(
    "target, code",
    [
        ("http://a.example/v1/models", 200),
        ("/v1%2Fmodels", 200),
        ("/v1/models?x=%zz&y[]=1", 200),
        ("//v1/models", 404),
        ("/v1/%zz%ff%00", 404),
        ("/page/..%2f..%2fapp.py", 404),
        ("/page/%00", 404),
        ("/" + "a" * 60_000, 404),
        ("/" + "a" * 70_000, 431),
    ],
    ids=lambda value: str(value)[:30],
)
def test_request_targets(server, target, code):
    status, _, body = parts(raw(server, f"GET {target} HTTP/1.1\r\n".encode() + CLOSED + KEYED + b"\r\n"))
    assert int(status.split()[1]) == code and len(body) < 3000
    status, _, _ = parts(raw(server, f"GET {target} HTTP/1.1\r\n".encode() + CLOSED + b"\r\n"))
    assert int(status.split()[1]) == (431 if code == 431 else 401 if "page" not in target else code)


def test_other_methods(server, client):
    refused(client.request("OPTIONS", "/v1/models"), 405)
    refused(client.request("OPTIONS", "/v1/models", headers={"Authorization": ""}), 401)
    for line in (b"get /liveness", b"FOO /liveness", b"GET /\xc3\xa4"):
        assert parts(raw(server, line + b" HTTP/1.1\r\n" + CLOSED + b"\r\n"))[0].startswith("http/1.1 400")


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\u0085"])
def test_events_are_one_line_each(client, end):
    """httpx and others split at every line end of Unicode."""
    text = f"a{end}b"
    body = {"prompt": text, "echo": True, "stream": True, "max_tokens": 2}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        lines = [line for line in reply.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    assert "".join(event["choices"][0]["text"] for event in events).startswith(text)


def test_health_while_the_model_loads(server, client):
    ready = server.service.client.ready
    ready.clear()
    try:
        for path in ("/health", "/healthz", "/readiness"):
            reply = client.get(path)
            assert "the model is being loaded" in refused(reply, 503) and reply.headers["Retry-After"]
            assert client.head(path).status_code == 503
        assert client.get("/liveness").status_code == 200
    finally:
        ready.set()
    assert client.get("/health").status_code == 200


CODINGS = ["gzip", "br", "deflate", "zstd", "GZIP", "x-gzip", "identity, gzip", "nonsense"]
POSTS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
    "/v1/embeddings",
]


@pytest.mark.parametrize("path", POSTS)
def test_a_compressed_body_is_refused_as_such(client, path):
    """415 (RFC 9110), not an error of JSON; identity is no coding."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    for coding in CODINGS:
        given = gzip.compress(body) if "gzip" in coding.lower() else body
        reply = client.post(path, content=given, headers={**headers, "Content-Encoding": coding})
        assert reply.status_code == 415 and reply.headers["accept-encoding"] == "identity"
        assert reply.json()["error"]["message"].startswith("Content-Encoding: expected none, got ")
    plain = client.post(path, content=body, headers=headers).status_code
    for coding in ("identity", "", "Identity"):
        reply = client.post(path, content=body, headers={**headers, "Content-Encoding": coding})
        assert reply.status_code == plain != 415
