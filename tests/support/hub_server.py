"""A small Hub on loopback for the real huggingface_hub client, with the routes of https://huggingface.co.

As there, small files are sent at once, and weights redirect to another host (`localhost`) that supports
ranges. `requests` keeps every request, so that a test can count them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from qrt.model_files import hub as hub_module

TOKEN = "hf_secret-of-the-test"
LARGE = (".safetensors", ".bin", ".gguf", ".pth")  # files that are sent through a redirect
ID = "((?:datasets/)?[^/]+/[^/]+)"
API = re.compile(f"/api/models/{ID}(?:/(revision|tree)/([^/]+)(/.+)?)?")
RESOLVE = re.compile(f"/{ID}/resolve/([^/]+)/(.+)")
RANGE = re.compile(r"bytes=(\d+)-")


@dataclass
class Repo:
    """One repository: its files, its commit, and how it misbehaves.

    gated      files need a token with access; the repository's page does not
    closed     gated, and the token has no access
    private    hidden without the token
    cut_off    (bytes, times): bodies of large files end after so many bytes, so many times
    seconds    delay of a large file
    status     the status of every answer, instead of the right one
    headers    whether files have the headers that show the client a Hub
    tags       further revisions and their commits
    """

    files: dict[str, bytes]
    gated: bool = False
    closed: bool = False
    private: bool = False
    cut_off: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    status: int | None = None
    headers: bool = True
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        """Return the commit of main."""
        digest = hashlib.sha1()
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()

    def resolve(self, revision: str) -> str | None:
        """Return the commit of a revision; None for an unknown one."""
        known = {"main": self.commit, self.commit: self.commit, **self.tags}
        return known.get(revision)


def repo_of(folder: Path, **more: Any) -> Repo:
    """Make a repository of a folder's files."""
    return Repo({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}, **more)


class HubServer(ThreadingHTTPServer):
    """Serves repositories by id: ORG/NAME, or datasets/ORG/NAME."""

    daemon_threads = True

    def __init__(self, repos: dict[str, Repo]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos, self.requests = repos, list[tuple[str, str]]()
        self.ranges: list[int] = []  # starts of the requested ranges
        self.leaks: list[str] = []  # paths on the other host that were requested with the token

    @property
    def url(self) -> str:
        """Return the value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"

    def asked(self, method: str, ending: str) -> int:
        """Count the requests of a method for paths with this ending."""
        return sum(each == method and path.endswith(ending) for each, path in self.requests)


@contextlib.contextmanager
def hub(repos: dict[str, Repo]) -> Iterator[HubServer]:
    """Run a Hub for a `with` block."""
    server = HubServer(repos)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def asks(server: HubServer, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Callable[..., None]:
    """Let this process ask `server`, and keep what it gets in `cache`; return what changes fields of ENV."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    environment = replace(hub_module.ENV, hub_endpoint=server.url, hub_cache=str(cache), hub_offline=False)

    def change(**settings: Any) -> None:
        nonlocal environment
        environment = replace(environment, **settings)
        monkeypatch.setattr(hub_module, "ENV", environment)

    change()
    return change


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.server.requests.append((self.command, path))
        path = path.replace("/api/datasets/", "/api/models/datasets/", 1)
        if found := API.fullmatch(path):
            if found[4]:
                return self._refuse(404, "EntryNotFound")  # no repository here has folders
            self._api(found[1], found[2], found[3] or "main")
        elif found := RESOLVE.fullmatch(path):
            self._file(found[1], found[2], found[3])
        elif found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            if "Authorization" in self.headers:
                self.server.leaks.append(path)
            self._body(self.server.repos[found[1]], found[3])
        else:
            self._refuse(404, "EntryNotFound")

    def _repo(self, id: str, revision: str, file: bool) -> tuple[Repo, str] | None:
        """Return the repository and the commit; None after a refusal."""
        repo, sent = self.server.repos.get(id), self.headers.get("Authorization")
        trusted = sent == f"Bearer {TOKEN}"
        if sent and not trusted:
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif repo is None or repo.private and not trusted:
            self._refuse(404 if trusted else 401, "RepoNotFound" if trusted else "")
        elif repo.status is not None:
            self._refuse(repo.status, "")
        elif repo.gated and file and (repo.closed or not trusted):
            self._refuse(403 if trusted else 401, "GatedRepo")
        elif (commit := repo.resolve(revision)) is None:
            self._refuse(404, "RevisionNotFound")
        else:
            return repo, commit
        return None

    def _api(self, id: str, what: str | None, revision: str) -> None:
        if (found := self._repo(id, revision, file=False)) is None:
            return
        repo, commit = found
        entries = [
            {"type": "file", "path": name, "oid": _etag(content), "size": len(content)}
            for name, content in repo.files.items()
        ]
        siblings = [{"rfilename": each["path"], "size": each["size"]} for each in entries]
        about = {"id": id, "sha": commit, "siblings": siblings, "private": repo.private}
        body = json.dumps(entries if what == "tree" else about).encode()
        self._reply(200, body, {"Content-Type": "application/json"})

    def _file(self, id: str, revision: str, name: str) -> None:
        if (found := self._repo(id, revision, file=True)) is None:
            return
        repo, commit = found
        if name not in repo.files:
            return self._refuse(404, "EntryNotFound")
        if not repo.headers:
            return self._reply(200, b"<html>", {})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(repo.files[name])}"'}
        if not name.endswith(LARGE):
            return self._reply(200, repo.files[name], headers)
        linked = {"X-Linked-Size": str(len(repo.files[name])), "X-Linked-ETag": headers.pop("ETag")}
        place = {"Location": f"http://localhost:{self.server.server_port}/cdn/{id}/{commit}/{name}"}
        self._reply(302, b"", {**headers, **linked, **place})

    def _body(self, repo: Repo, name: str) -> None:
        """Send a large file from the start of the range; cut it off where the repository says so."""
        content = repo.files[name]
        ranged = RANGE.match(self.headers.get("Range", ""))
        start = int(ranged[1]) if ranged else 0
        headers = {"ETag": f'"{_etag(content)}"'}
        time.sleep(repo.seconds)
        if ranged:
            self.server.ranges.append(start)
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        length, times = repo.cut_off
        if self.command == "GET" and times:
            repo.cut_off = (length, times - 1)
            self._reply(206 if ranged else 200, content[start:], headers, sent=length)
            self.close_connection = True
        else:
            self._reply(206 if ranged else 200, content[start:], headers)

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        given = {"X-Error-Code": code, "X-Error-Message": message or code}
        self._reply(status, b'{"error":"refused"}', {name: value for name, value in given.items() if value})

    def _reply(self, status: int, body: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[:sent])


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
