"""A stand-in for the Hugging Face hub: one data set in a local folder, by the hub's own requests. It can fail."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse


class Hub(ThreadingHTTPServer):
    """Serves `folder` as the data set `name`.

    fails: called with each path; it returns the failure, "503" or "drop", or "" for none.
    """

    daemon_threads = True

    def __init__(self, folder: Path, name: str, fails: Callable[[str], str] = lambda path: "") -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.folder, self.name, self.fails, self.revision = folder, name, fails, "a" * 40

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        thread = threading.Thread(target=self.serve_forever, daemon=True)
        thread.start()
        yield self
        self.shutdown()
        self.server_close()
        thread.join()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        hub, url = self.server, urlparse(self.path)
        path, body = unquote(url.path), self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if (failure := hub.fails(path)) == "503":
            return self._send(b"", 503)
        self._drops = failure == "drop"
        api, files = f"/api/datasets/{hub.name}", f"/datasets/{hub.name}/resolve/"
        if path == api or path.startswith(f"{api}/revision/"):
            named = path.removeprefix(f"{api}/revision/").removeprefix(api)
            return self._json({"_id": "1", "id": hub.name, "sha": named or hub.revision, "tags": [], "siblings": []})
        if path.startswith(f"{api}/tree/"):
            folder = hub.folder / path.removeprefix(f"{api}/tree/").partition("/")[2]
            deep = parse_qs(url.query).get("recursive", [""])[0].lower() == "true"
            entries = sorted(folder.rglob("*") if deep else folder.glob("*"))
            return self._json([self._entry(file) for file in entries])
        if path.startswith(f"{api}/paths-info/"):
            names = parse_qs(body.decode()).get("paths", [])
            return self._json([self._entry(hub.folder / name) for name in names if (hub.folder / name).exists()])
        file = hub.folder / path.removeprefix(files).partition("/")[2]
        if path.startswith(files) and file.is_file():
            return self._file(file)
        return self._send(b"{}", 404, {"X-Error-Code": "EntryNotFound" if path.startswith(files) else "RepoNotFound"})

    do_HEAD = do_POST = do_GET

    def _entry(self, file: Path) -> dict[str, Any]:
        kind, size = ("file", file.stat().st_size) if file.is_file() else ("directory", 0)
        oid = hashlib.sha1(str(file).encode()).hexdigest()
        return {"type": kind, "oid": oid, "size": size, "path": str(file.relative_to(self.server.folder))}

    def _file(self, file: Path) -> None:
        content = file.read_bytes()
        size, status, headers = len(content), 200, {"ETag": '"1"', "X-Repo-Commit": self.server.revision}
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            content, status = content[int(first) : int(last) + 1 if last else size], 206
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(content) - 1}/{size}"
        self._send(content, status, headers)

    def _json(self, content: object) -> None:
        self._send(json.dumps(content).encode(), 200, {"Content-Type": "application/json"})

    def _send(self, content: bytes, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if self._drops else content)
        if self._drops:
            self.close_connection = True

    _drops = False


@contextmanager
def silent() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def environment(url: str, home: Path) -> dict[str, str]:
    """Return the environment that sends the packages of Hugging Face to another address, with a cache of their own."""
    return os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
