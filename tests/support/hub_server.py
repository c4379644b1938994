"""Serve repositories over HTTP as the Hugging Face hub does, from memory, for processes whose HF_ENDPOINT it is."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/(?P<kind>revision|tree)/(?P<revision>.+))?")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Repository:
    """A repository with one commit, which all of its revisions name."""

    files: Mapping[str, bytes | Path]
    revisions: tuple[str, ...] = ("main",)
    private: bool = False
    gated: bool = False

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for name, data in self.files.items():
            digest.update(name.encode() + content(data))
        return digest.hexdigest()


@dataclass
class Hub:
    """What the server has, how it fails, and what it was asked for."""

    repositories: dict[str, Repository]
    token: str = "hf_good"
    breaks: dict[str, int] = field(default_factory=dict)
    """file -> after how many of its bytes the next answer breaks off"""
    failing: set[str] = field(default_factory=set)
    """Files that are answered with status 503."""
    fetched: list[tuple[str, int]] = field(default_factory=list)
    """The files that were sent, each with its first byte."""
    url: str = ""


def content(data: bytes | Path) -> bytes:
    """Return what a file of a repository holds."""
    return data.read_bytes() if isinstance(data, Path) else data


@contextlib.contextmanager
def hub_server(repositories: Mapping[str, Repository]) -> Iterator[Hub]:
    """Yield a hub whose server listens at `url` on loopback."""
    hub = Hub(dict(repositories))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            api, file = _API.fullmatch(path), _FILE.fullmatch(path)
            found = api or file
            given = self.headers.get("Authorization")
            if given not in (None, f"Bearer {hub.token}"):
                return self._error(401, message="Invalid credentials in Authorization header")
            repository = hub.repositories.get(found["repo"]) if found else None
            if found is None or repository is None or (repository.private and given is None):
                return self._error(404 if given else 401, "RepoNotFound")
            revision = found["revision"] or "main"
            if revision not in (*repository.revisions, repository.commit):
                return self._error(404, "RevisionNotFound")
            if file is None:
                return self._describe(found["repo"], repository, tree=found["kind"] == "tree")
            if repository.gated and given is None:
                return self._error(403, "GatedRepo")
            if file["file"] not in repository.files:
                return self._error(404, "EntryNotFound")
            return self._send(repository, file["file"])

        def _describe(self, name: str, repository: Repository, *, tree: bool) -> None:
            sizes = {path: len(content(data)) for path, data in repository.files.items()}
            answer: Any = [{"type": "file", "path": path, "size": size, "oid": ""} for path, size in sizes.items()]
            if not tree:
                siblings = [{"rfilename": path, "size": size} for path, size in sizes.items()]
                answer = {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings}
            self._answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def _send(self, repository: Repository, name: str) -> None:
            data = content(repository.files[name])
            about = {"X-Repo-Commit": repository.commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            start = int(asked[1]) if asked else 0
            if asked:
                about["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            status = 206 if asked else 200
            if self.command == "HEAD":
                self._answer(status, data[start:], about)
                return
            hub.fetched.append((name, start))
            if name in hub.failing:
                self._error(503)
                return
            after = hub.breaks.pop(name, None)
            self._answer(status, data[start:], about, cut=after)
            self.close_connection = after is not None

        def _error(self, status: int, code: str = "", message: str = "") -> None:
            self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

        def _answer(self, status: int, body: bytes, headers: Mapping[str, str], cut: int | None = None) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(body[:cut])
                    self.wfile.flush()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield hub
        finally:
            server.shutdown()
            serving.join()
