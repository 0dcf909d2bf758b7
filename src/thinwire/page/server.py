"""HTTP server of the page, read only."""

import hmac
import ipaddress
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist
from torch.distributed import HashStore

from thinwire._wording import host_port
from thinwire.page import RunView, report_of

_MOST_CLIENTS, _PERIOD_S, _PATIENCE_S = 64, 1.0, 10.0
_RANK_SILENT_S = 60.0
_KEY = "thinwire/page/"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_log = logging.getLogger("thinwire")


class Page(ThreadingHTTPServer):
    """Server on threads of its own. Beyond loopback it asks for the token in its `url`."""

    daemon_threads = True

    def __init__(self, host: str, port: int, token: str) -> None:
        self.runs: dict[str, RunView] = {}
        self._token = token.encode()
        self._loopback = ipaddress.ip_address(host).is_loopback
        self._clients = threading.BoundedSemaphore(_MOST_CLIENTS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ValueError(f"the page cannot listen at {host}: {error.strerror}") from None
        query = "" if self._loopback else f"?token={token}"
        self.url = f"http://{host_port(host, self.server_port)}/{query}"
        threading.Thread(target=self.serve_forever, name="thinwire-page", daemon=True).start()

    def admits(self, query: str, host: str) -> bool:
        """Return True for a request with the token, or over loopback under a name of it."""
        if self._loopback:  # any other name is that of a site which resolves to this machine
            return urlsplit(f"//{host}").hostname in ("localhost", "127.0.0.1", "::1")
        given = parse_qs(query).get("token", [""])[0]
        return hmac.compare_digest(given.encode(), self._token)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one client, unless there are `_MOST_CLIENTS`."""
        if not self._clients.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._clients.release()

    def handle_error(self, *_: object) -> None:
        """Ignore a client that has gone."""


class _Handler(BaseHTTPRequestHandler):
    server: Page
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self.server.admits(url.query, self.headers.get("Host", "")):
            self._begin(HTTPStatus.FORBIDDEN, "text/plain")
            self.wfile.write(b"Open the link that thinwire printed: it ends in ?token=...\n")
        elif url.path == "/":
            self._begin(HTTPStatus.OK, "text/html")
            self.wfile.write(files("thinwire.page").joinpath("page.html").read_bytes())
        elif url.path == "/events":
            self._begin(HTTPStatus.OK, "text/event-stream")
            while True:
                views = [*self.server.runs.items()]
                runs = {name: view.latest for name, view in views if view.latest}
                self.wfile.write(f"data: {json.dumps(runs)}\n\n".encode())
                time.sleep(_PERIOD_S)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _begin(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing: paths hold the token."""


_alone: Any = HashStore()
"""Store of a process without a process group."""
_pages: dict[str, Page] = {}
"""Pages of this process, by the address that was asked for."""


def show_rank(url: str, stats: Mapping[str, Any], loss: Any) -> None:
    """Report this rank's numbers through the job's store; rank 0 serves the page at `url`."""
    try:
        found = urlsplit(url.replace("//localhost:", "//127.0.0.1:"))
        host = str(ipaddress.ip_address(found.hostname or ""))
        port = found.port
        if port is None:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"writer={url!r} must be http://ADDRESS:PORT, with localhost or an IP address of this "
            "machine, such as http://127.0.0.1:8080"
        ) from None
    rank = 0
    size = 1
    store = _alone
    if (job := dist.group.WORLD) is not None:
        rank = job.rank()
        size = job.size()
        store = job.get_group_store()
    store.set(f"{_KEY}{rank}", json.dumps([socket.gethostname(), report_of(stats, loss)]))
    if rank == 0 and url not in _pages:
        page = _pages[url] = Page(host, port, secrets.token_hex(16))
        page.runs["ranks"] = view = RunView(_RANK_SILENT_S)
        _log.warning("the page of this run: %s", page.url)
        # a store of its own: a call that waits blocks all calls of a connection
        args = (view, store.clone(), size)
        name = "thinwire-page-ranks"
        threading.Thread(target=_follow, args=args, name=name, daemon=True).start()


def _follow(view: RunView, store: Any, size: int) -> None:
    try:
        while True:
            time.sleep(_PERIOD_S)
            found = {}
            for rank in range(size):
                if store.check([f"{_KEY}{rank}"]):
                    host, report = json.loads(store.get(f"{_KEY}{rank}"))
                    found[f"rank {rank} on {host}"] = report["at"], report
            view.update(None, found)
    except Exception as error:  # the job has ended, or a report cannot be read
        _log.info("the page shows no new numbers of the ranks: %s", error)
