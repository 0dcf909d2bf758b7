"""The code with which a machine joins a run, and the certificate of its host; without torch."""

import base64
import datetime
import hashlib
import re
import ssl
from pathlib import Path
from typing import NamedTuple

from thinwire.members.credentials import Address, parse_address, read_private, write_private
from thinwire.members.server import LENGTH, framed, unframed

CODE_VARIABLE = "THINWIRE_CODE"
_FORM = "tw1."
_CHECK_BYTES = 4
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_YEARS = 10


class Code(NamedTuple):
    """What a machine needs to join a run; a secret."""

    address: Address
    run: str
    token: bytes
    fingerprint: bytes
    """SHA-256 of the host's certificate."""
    relay: bool

    def text(self) -> str:
        """Return it as a word that can be pasted."""
        parts = str(self.address).encode(), self.run.encode(), self.token, self.fingerprint
        content = framed([*parts, b"relay" if self.relay else b""])
        return _FORM + base64.urlsafe_b64encode(content + _check(content)).decode().rstrip("=")


def read_code(text: str) -> Code:
    """Return what `Code.text` made; raise `ValueError` for anything else, without its text."""
    try:
        coded = text.strip().removeprefix(_FORM)
        packed = base64.b64decode(coded + "=" * (-len(coded) % 4), b"-_", validate=True)
        content, check = packed[:-_CHECK_BYTES], packed[-_CHECK_BYTES:]
        if not text.strip().startswith(_FORM) or check != _check(content):
            raise ValueError
        parts = [part or b"" for part in unframed(content[LENGTH.size :])]
        address, run, token, known, relay = parts
    except ValueError:
        raise ValueError(
            f"a code of {len(text.strip())} characters is not one that `thinwire host --run` "
            f"printed: it begins with {_FORM}, and must be whole, on one line"
        ) from None
    where = parse_address("address", address.decode(), scheme=False)
    return Code(where, run.decode(), token, known, bool(relay))


def is_code(word: str) -> bool:
    """Return True for a word that is meant as a code."""
    return word.startswith(_FORM)


def code_of_file(path: Path) -> Code:
    """Return the code in a file that only its owner can read."""
    return read_code(read_private(path, "code file", "`thinwire host --run` prints one").decode())


def _check(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECK_BYTES).digest()


def certificate(cert: Path, key: Path | None) -> ssl.SSLContext:
    """Return the TLS context of a host or relay."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:
        files = f"--cert {cert}, --key {key}" if key else f"--cert {cert} without --key"
        raise ValueError(
            f"{files}: not a certificate and its private key: {error.strerror or error}"
        ) from None
    return context


def fingerprint_of(cert: Path) -> bytes:
    """Return the SHA-256 of the certificate that a host shows, the first one of a file."""
    found = _PEM.search(cert.read_text(encoding="ascii"))
    assert found is not None, "loaded before"
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(found[0])).digest()


def make_certificate(path: Path) -> None:
    """Write a new certificate, signed by itself, and its key to a file for its owner only."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "thinwire")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=366 * _YEARS))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    kept = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(path, kept + made.public_bytes(pem))
