"""Connections: what is too large, too slow or no HTTP is refused or cut, and others go on."""

import json
import socket
import time

import httpx
import pytest
from servers import KEY, bearer, refused, wait_idle

import qrt.serve.http.connection as connection

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def client(server):
    headers = {**bearer(), "Content-Type": "application/json"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30) as client:
        yield client


def raw(server, *parts: bytes, pause: float = 0) -> bytes:
    """What comes back for these bytes on a connection of their own, until the server closes it; TimeoutError
    when it does not."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain:
        received = b""
        try:
            for part in parts:
                plain.sendall(part)
                time.sleep(pause)
            while piece := plain.recv(65536):
                received += piece
        except ConnectionError:
            pass
        return received


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
POST += f"Authorization: Bearer {KEY}\r\n".encode()


def test_headers_are_capped(server):
    assert b" 431 " in raw(server, POST + b"X: " + b"a" * 70_000 + b"\r\n\r\n").split(b"\r\n")[0]
    assert b" 431 " in raw(server, POST, *[b"X: " + b"a" * 9_000 + b"\r\n"] * 8).split(b"\r\n")[0]
    assert b" 431 " in raw(server, POST + b"X: a\r\n" * 200 + b"\r\n").split(b"\r\n")[0]
    assert b" 431 " in raw(server, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n").split(b"\r\n")[0]


def test_trailers_and_chunk_extensions_are_capped(server):
    """Its trailers and the extensions of its chunks, as a header is; and they are no headers."""
    chunked = POST.replace(b"Connection: close\r\n", b"Transfer-Encoding: chunked\r\n")
    for begun in (b"0\r\nX: ", b"1;x="):
        assert b" 431 " in raw(server, chunked + b"\r\n" + begun, *[b"a" * 2**18] * 16).split(b"\r\n")[0]
    body = b'{"prompt": "x", "max_tokens": 1}'
    body = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    keyless = chunked.replace(b"Authorization", b"X-Ignored")
    key = f"Authorization: Bearer {KEY}\r\n\r\n".encode()
    closed = b"Connection: close\r\n\r\n"
    assert b" 200 " in raw(server, chunked + closed + body + key).split(b"\r\n")[0]
    assert b" 401 " in raw(server, keyless + closed + body + key).split(b"\r\n")[0]


def test_a_header_may_end_in_two_parts(server):
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode() + b" " * 200_000
    header = POST + f"Content-Length: {len(body)}\r\n\r".encode()
    assert b" 200 " in raw(server, header, b"\n" + body, pause=0.2).split(b"\r\n")[0]


def test_bodies_are_capped(server, client):
    assert "16777216" in refused(client.post("/v1/completions", content=b" " * (2**24 + 1)), 413)
    chunks = (b"x" * 2**20 for _ in range(17))
    assert "16777216" in refused(client.post("/v1/completions", content=chunks), 413)
    refused(client.post("/v1/completions", content=b" " * 2**24), 400)  # not too large: no JSON


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def test_pipelined_requests_are_capped(server, client):
    """Each answer lets uvicorn read on: what one connection sends would fill the memory."""
    some = HEALTH * 50 + HEALTH.replace(b"Host: x", b"Host: x\r\nConnection: close")
    assert raw(server, some).count(b"HTTP/1.1 200 OK") == 51
    assert raw(server, HEALTH * 100_000).count(b"HTTP/1.1 200 OK") < 100
    assert client.get("/health").status_code == 200


def test_pipelined_request_ends_with_its_connection(server, caplog, monkeypatch):
    """One that others follow on its connection, whether those are wrong or the client is gone."""
    client, aborted = server.service.client, []
    forget = client.forget

    def noted(ids, *, abort, stopped=False):
        aborted.append(abort)
        forget(ids, abort=abort, stopped=stopped)

    monkeypatch.setattr(client, "forget", noted)
    body = json.dumps({"prompt": "x", "max_tokens": 1900, "ignore_eos": True}).encode()
    first = POST.replace(b"Connection: close\r\n", b"") + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        plain.sendall(first + HEALTH)
        while not client.num_running:
            time.sleep(0.01)
    wait_idle(server)
    assert aborted == [True]
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain:
        plain.sendall(first)
        while not client.num_running:
            time.sleep(0.01)
        plain.sendall(b"nonsense\r\n\r\n")
        try:
            assert plain.recv(1000) == b"", "an answer in another's place"
        except ConnectionError:
            pass
    wait_idle(server)
    assert aborted == [True, True] and not [record for record in caplog.records if record.exc_info]


def test_invalid_http_is_refused(server):
    reply = raw(server, b"\x16\x03\x01 nonsense\r\n\r\n")
    assert (
        b" 400 " in reply.split(b"\r\n")[0]
        and json.loads(reply.split(b"\r\n\r\n")[1])["error"]["code"] == 400
    )


HOSTS = [
    (b"1.1", [], 400),
    (b"1.1", [b"x", b"x"], 400),
    (b"1.1", [b"x", b"y"], 400),
    (b"1.0", [], 200),
    (b"1.0", [b"x", b"x"], 400),
    (b"1.1", [b""], 200),
    *((b"1.1", [host], 200) for host in (b"a.example:8000", b"[::1]:80", b"10.0.0.1", b"a_b", b"%2Ftmp%2Fs")),
    *((b"1.1", [host], 400) for host in (b"a b", b"a/b", b"a@b", b"a:b", b"[::1", b"a,b c")),
]


@pytest.mark.parametrize(("version", "hosts", "code"), HOSTS)
def test_a_request_has_one_host(server, version, hosts, code):
    """RFC 9112, 3.2; requests without a body and with one, first on a connection or later."""
    lines = b"".join(b"Host: %b\r\n" % host for host in hosts)
    last = b"GET /health HTTP/%b\r\nConnection: close\r\n%b\r\n" % (version, lines)
    assert raw(server, last).startswith(b"HTTP/1.1 %d " % code)
    body = b'{"prompt": "x", "max_tokens": 1}'
    post = POST.replace(b"Host: x\r\n", lines).replace(b"1.1", version, 1)
    reply = raw(server, post + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert reply.startswith(b"HTTP/1.1 %d " % code)
    if code == 400:
        error = json.loads(reply.split(b"\r\n\r\n")[1])["error"]
        assert error["code"] == 400 and error["message"].startswith("Host: expected ")
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain:
        plain.sendall(HEALTH)
        assert plain.recv(65536).startswith(b"HTTP/1.1 200 ")
        plain.sendall(last)
        assert plain.recv(65536).startswith(b"HTTP/1.1 %d " % code)


def test_slow_senders_and_readers_are_cut(server, client, monkeypatch):
    """A connection that says nothing, those that send byte by byte, and one that never reads its reply;
    others go on. What is sent slowly would be a whole request, and answered, if its bytes bought it time."""
    with monkeypatch.context() as soon:
        soon.setattr(connection, "REQUEST_SECONDS", 0.2)
        idle = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        slowly = [b"a"] * 500
        assert raw(server, b"GET /health HTTP/1.1\r\nX: ", *slowly, b"\r\n\r\n", pause=0.02) == b""
        assert raw(server, POST + b"Content-Length: 500\r\n\r\n", *slowly, pause=0.02) == b""
        assert idle.recv(1) == b""
    assert client.get("/health").status_code == 200
    monkeypatch.setattr(connection, "READ_SECONDS", 0.2)
    body = json.dumps({"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True, "logprobs": 20})
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # connections inherit it
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", server.port))
        reader.sendall(POST + f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        for _ in range(1500):
            if server.service.client.num_running:
                break
            time.sleep(0.02)
        assert server.service.client.num_running == 1
        wait_idle(server)
        assert server.service.client.num_running == 0
