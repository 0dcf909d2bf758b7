"""Servers on this machine, behind lines that break: web servers, S3, SFTP and a hub of models."""

import contextlib
import functools
import http.server
import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.api import free_port
from tests.processes import running
from tests.waiting import until

_HOST, _PART = "127.0.0.1", 1 << 16


class Line:
    """A relay to a server, which may break, slow down, fall silent or be cut.

    Attributes:
        port: Where clients connect.
        sent: Bytes that went to clients.
        connections: How many clients have connected.
        rate: Bytes a second to each client.
        breaks: Bytes after which the next connections are reset.
    """

    def __init__(self, port: int) -> None:
        self.sent, self.connections, self.rate = 0, 0, inf
        self._server, self.breaks, self._cut = port, list[int](), False
        self._passes = threading.Event()
        self._passes.set()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server((_HOST, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def break_after(self, size: int, times: int = 1) -> None:
        """Reset the next connections that give so many bytes, each after these."""
        self.breaks = [size] * times

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Connections stay, and are accepted, and nothing passes."""
        self._passes.clear()
        try:
            yield
        finally:
            self._passes.set()

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Each connection is reset, those that there are and new ones."""
        self._cut = True
        for each in [*self._sockets]:
            _reset(each)
        try:
            yield
        finally:
            self._cut = False

    def close(self) -> None:
        self._cut = True
        _stop(self._listener)
        for each in [*self._sockets]:
            _reset(each)
        self._passes.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                if self._cut:
                    _reset(client)
                    continue
                # what a client lost counts as sent, so little of it may be on its way
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PART)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._passes.wait()
        try:
            server = socket.create_connection((_HOST, self._server))
        except OSError:
            _reset(client)
            return
        self._sockets |= {client, server}
        up = threading.Thread(target=self._pump, args=(client, server), daemon=True)
        up.start()
        self._pump(server, client, counted=True)
        up.join()
        self._sockets -= {client, server}
        client.close()
        server.close()

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool = False) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while True:
                size = min(_PART, max(1, self.rate / 20)) if counted else _PART
                part = source.recv(int(size))
                self._passes.wait()
                if not part:
                    target.shutdown(socket.SHUT_WR)
                    return
                if counted and self.breaks and passed + len(part) >= self.breaks[0]:
                    part = part[: self.breaks.pop(0) - passed]
                    target.sendall(part)
                    self.sent += len(part)
                    break
                target.sendall(part)
                passed += len(part)
                if counted:
                    self.sent += len(part)
                    time.sleep(len(part) / self.rate)
        _reset(target)
        _reset(source)


def _reset(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        each.shutdown(socket.SHUT_RD)  # wakes the thread that reads
    with contextlib.suppress(OSError):
        each.close()


def _stop(listener: socket.socket) -> None:
    listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listener.close()


@contextlib.contextmanager
def line_to(port: int) -> Iterator[Line]:
    line = Line(port)
    try:
        yield line
    finally:
        line.close()


class _Web(http.server.ThreadingHTTPServer):
    daemon_threads = True
    ranges = False
    unavailable = 0
    """How many requests are answered by 503."""

    def handle_error(self, *_: Any) -> None:
        """A client that went away is no error of the server's."""


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Python's own, which ignores ranges, unless the server has them."""

    server: _Web

    def log_message(self, *_: Any) -> None: ...

    def end_headers(self) -> None:
        if self.server.ranges:
            self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def send_head(self) -> Any:
        if self.server.unavailable:
            self.server.unavailable -= 1
            return self.send_error(503)
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if not (self.server.ranges and found and path.is_file()):
            return super().send_head()
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin, end = int(found[1]), min(int(found[2] or size - 1), size - 1)
            if begin > end:
                return self.send_error(416)
            file.seek(begin)
            part = file.read(end + 1 - begin)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end}/{size}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        return io.BytesIO(part)


@contextlib.contextmanager
def _serving(handler: Any) -> Iterator[tuple[_Web, Line]]:
    with _Web((_HOST, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            with line_to(server.server_port) as line:
                yield server, line
        finally:
            server.shutdown()


@dataclass
class Served:
    """What a server gives at an address, behind a line."""

    address: str
    line: Line
    web: _Web | None = None
    moved: list[str] = field(default_factory=list)
    """Names that files were moved to."""

    def refuse(self, times: int) -> None:
        """Answer the next requests for files by 503."""
        assert self.web
        self.web.unavailable = times


@contextlib.contextmanager
def web(folder: Path, *, ranges: bool = False) -> Iterator[Served]:
    with _serving(functools.partial(_Handler, directory=str(folder))) as (server, line):
        server.ranges = ranges
        yield Served(f"http://{_HOST}:{line.port}", line, server)


class _Hub(_Handler):
    """What `huggingface_hub.HfFileSystem` asks for to read models/tests/versions, a folder."""

    repo = "tests/versions"

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        about = f"/api/models/{self.repo}"
        if path.startswith(f"/{self.repo}/resolve/main/"):
            self.path = path.removeprefix(f"/{self.repo}/resolve/main")
            super().do_GET()
        elif path in (about, f"{about}/revision/main"):
            self._answer({"id": self.repo, "modelId": self.repo, "sha": "0" * 40, "siblings": []})
        elif path.startswith(f"{about}/tree/main"):
            under = Path(self.directory, path.removeprefix(f"{about}/tree/main").strip("/"))
            self._answer([self._entry(each) for each in sorted(under.iterdir())])
        else:
            self._answer({"error": "not found"}, 404)

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        names = urllib.parse.parse_qs(text)["paths"]
        found = [Path(self.directory, name) for name in names]
        self._answer([self._entry(path) for path in found if path.exists()])

    def _entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.directory).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
        return {"type": "file", "path": name, "oid": "0" * 40, "size": path.stat().st_size}

    def _answer(self, content: Any, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[Served]:
    """A stand-in for the hub of models; what lies in the folder is `hf://tests/versions`."""
    import fsspec.config

    with _serving(functools.partial(_Hub, directory=str(folder))) as (server, line):
        server.ranges = True
        told = {"endpoint": f"http://{_HOST}:{line.port}", "token": False}
        with patch.dict(fsspec.config.conf, {"hf": told}):
            yield Served(f"hf://{_Hub.repo}", line, server)


@contextlib.contextmanager
def s3() -> Iterator[Served]:
    """moto's S3, at the endpoint of the environment; processes started within find it too."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", _HOST, "-p", str(port)]
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with running(command, **nowhere), line_to(port) as line:
        until(lambda: _answers(port), "moto's answer")
        request = urllib.request.Request(f"http://{_HOST}:{port}/bucket", method="PUT")
        urllib.request.urlopen(request).close()
        told = {
            "AWS_ENDPOINT_URL": f"http://{_HOST}:{line.port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with patch.dict(os.environ, told):
            yield Served("s3://bucket", line)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((_HOST, port)):
        return True
    return False


@contextlib.contextmanager
def sftp(folder: Path) -> Iterator[Served]:
    """An SFTP server of a folder, whose user has a password; `moved` is what was renamed."""
    import paramiko

    def ours(path: str) -> Path:
        return folder / path.lstrip("/")

    def tried(call: Any, *arguments: Any) -> Any:
        try:
            done = call(*arguments)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)
        return paramiko.SFTP_OK if done is None or isinstance(done, Path) else done

    class User(paramiko.ServerInterface):
        def check_auth_password(self, username: str, password: str) -> int:
            known = (username, password) == ("tester", "pass-word")
            return paramiko.AUTH_SUCCESSFUL if known else paramiko.AUTH_FAILED

        def get_allowed_auths(self, username: str) -> str:
            return "password"

        def check_channel_request(self, kind: str, chanid: int) -> int:
            return paramiko.OPEN_SUCCEEDED

    def attributes(path: Path) -> paramiko.SFTPAttributes:
        return paramiko.SFTPAttributes.from_stat(path.stat(), path.name)

    class Files(paramiko.SFTPServerInterface):
        def list_folder(self, path: str) -> Any:
            return tried(lambda: [attributes(each) for each in ours(path).iterdir()])

        def stat(self, path: str) -> Any:
            return tried(attributes, ours(path))

        lstat = stat

        def open(self, path: str, flags: int, attr: Any) -> Any:
            def opened() -> paramiko.SFTPHandle:
                number = os.open(ours(path), flags, 0o644)
                handle = paramiko.SFTPHandle(flags)
                if flags & (os.O_WRONLY | os.O_RDWR):
                    handle.writefile = os.fdopen(number, "r+b" if flags & os.O_RDWR else "wb")
                else:
                    handle.readfile = os.fdopen(number, "rb")
                file = getattr(handle, "readfile", None) or handle.writefile
                handle.stat = lambda: paramiko.SFTPAttributes.from_stat(os.fstat(file.fileno()))
                return handle

            return tried(opened)

        def remove(self, path: str) -> Any:
            return tried(ours(path).unlink)

        def rename(self, old: str, new: str) -> Any:
            if ours(new).exists():
                return paramiko.SFTP_FAILURE
            return self.posix_rename(old, new)

        def posix_rename(self, old: str, new: str) -> Any:
            served.moved.append(ours(new).name)
            return tried(ours(old).replace, ours(new))

        def mkdir(self, path: str, attr: Any) -> Any:
            return tried(ours(path).mkdir)

        def rmdir(self, path: str) -> Any:
            return tried(ours(path).rmdir)

    key, transports = paramiko.RSAKey.generate(2048), list[paramiko.Transport]()
    listener = socket.create_server((_HOST, 0))

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                transports.append(transport := paramiko.Transport(listener.accept()[0]))
                transport.add_server_key(key)
                transport.set_subsystem_handler("sftp", paramiko.SFTPServer, Files)
                with contextlib.suppress(paramiko.SSHException, EOFError):
                    transport.start_server(server=User())

    threading.Thread(target=accept, daemon=True).start()
    try:
        with line_to(listener.getsockname()[1]) as line:
            served = Served(f"sftp://tester:pass-word@{_HOST}:{line.port}", line)
            yield served
    finally:
        _stop(listener)
        for transport in transports:
            transport.close()
