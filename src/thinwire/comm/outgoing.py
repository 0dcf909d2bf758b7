"""Outgoing connections: TLS with a certificate that is known beforehand, and proxies of HTTP."""

import base64
import hashlib
import hmac
import http.client
import socket
import ssl
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from thinwire._wording import host_port
from thinwire.errors import Mismatch, PeerLost


class _AnotherCertificate(ssl.SSLCertVerificationError):
    """The other end has another certificate than the known one."""


class _KnownSocket(ssl.SSLSocket):
    """A socket that compares the other end's certificate, as the context says."""

    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        _require_known(self)


class _KnownObject(ssl.SSLObject):
    """The same for asyncio."""

    def do_handshake(self) -> None:
        super().do_handshake()
        _require_known(self)


class _KnownContext(ssl.SSLContext):
    fingerprint: bytes
    sslsocket_class = _KnownSocket
    sslobject_class = _KnownObject


def _require_known(end: _KnownSocket | _KnownObject) -> None:
    assert isinstance(end.context, _KnownContext)
    shown = end.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(shown).digest(), end.context.fingerprint):
        raise _AnotherCertificate(1, "another certificate than that of the code")


def known_certificate(expected: bytes) -> ssl.SSLContext:
    """Return a TLS context that accepts the certificate with this fingerprint alone."""
    context = _KnownContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.fingerprint = expected
    return context


def refused(where: object, error: ssl.SSLCertVerificationError) -> Mismatch:
    """Return the error of a certificate that does not verify."""
    if isinstance(error, _AnotherCertificate):
        why = (
            "it is not that of the code. Ask for a new code: the host has another certificate now, "
            "or somebody between it and this machine reads along"
        )
    else:
        why = (
            f"{error.verify_message.rstrip('.')}. Pass the CA that signed it, or the certificate "
            "itself, as ca=. It must be valid for this address"
        )
    return Mismatch(f"the certificate of {where} is refused: {why}")


def through_proxy(host: str, port: int, limit_s: float) -> socket.socket | None:
    """Return a connection through the proxy of HTTPS_PROXY; None if there is none for the host."""
    proxy = getproxies().get("https")
    if proxy is None or proxy_bypass(host):
        return None
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if parts.scheme != "http" or parts.hostname is None:
        raise ValueError(
            f"HTTPS_PROXY={parts.scheme}://{parts.hostname} is not a proxy such as "
            "http://10.0.0.1:3128; NO_PROXY names hosts that are reached without it"
        )
    headers = {}
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    where = host_port(parts.hostname, parts.port or 80)
    tunnel = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=limit_s)
    tunnel.set_tunnel(host, port, headers)
    try:
        tunnel.connect()
    except OSError as error:
        tunnel.close()
        raise PeerLost(
            f"the proxy of HTTPS_PROXY at {where} does not connect to {host_port(host, port)}: "
            f"{error}. NO_PROXY={host} goes without it"
        ) from None
    return tunnel.sock
