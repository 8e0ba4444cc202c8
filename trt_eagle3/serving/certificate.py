"""Read a server's certificate, match it with its key, and check it as a client would."""

from __future__ import annotations

import contextlib
import re
import ssl
from pathlib import Path

from trt_eagle3.errors import UserError

__all__ = ["certificate_warning", "read_certificate"]

_CERTIFICATE = re.compile(rb"-----BEGIN (TRUSTED |X509 )?CERTIFICATE-----")
_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY-----")
_LOCKED = re.compile(rb"BEGIN ENCRYPTED PRIVATE KEY|Proc-Type: *4, *ENCRYPTED")
_MAX_FLIGHTS = 4  # more than any TLS version needs
_NOT_YET_VALID, _EXPIRED = 9, 10  # OpenSSL's X509_V_ERR_*


def read_certificate(cert: Path, key: Path) -> ssl.SSLContext:
    """Build a server's TLS context (1.2 and above) from a certificate chain and its key, both PEM.

    Raises:
        UserError: a file that cannot be read or has other contents, a key with a password, or a key
            that does not match the certificate.
    """
    _check(cert, "--tls-cert", _CERTIFICATE, "a certificate chain")
    _check(key, "--tls-key", _KEY, "a private key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = (getattr(error, "reason", None) or str(error)).lower().replace("_", " ")
        raise UserError(
            f"--tls-cert {cert}, --tls-key {key}: not a certificate and its key ({reason}). Give "
            "the certificate's own key, and put the server's certificate first in the chain."
        ) from error
    return context


def certificate_warning(context: ssl.SSLContext, cert: Path) -> str | None:
    """Return a warning if the certificate is expired or not valid yet; None if it is valid now.

    Names and signers are not checked: clients decide whether to trust them.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # accept any signer
    try:
        client.load_verify_locations(cert)
        _shake_hands(context, client)
    except ssl.SSLCertVerificationError as error:
        what = {_NOT_YET_VALID: "not valid yet", _EXPIRED: "expired"}.get(error.verify_code)
        if what is not None:
            return f"--tls-cert {cert}: {what}, so clients will refuse it. Renew it and restart."
    except ssl.SSLError:
        pass  # not an expiry problem
    return None


def _check(path: Path, option: str, expected: re.Pattern[bytes], what: str) -> None:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}. Expected a PEM file.") from error
    if _LOCKED.search(data) and expected is _KEY:
        raise UserError(
            f"{option} {path}: has a password. Remove it: openssl pkey -in {path} -out plain.pem"
        )
    if not expected.search(data):
        found = "is empty" if not data.strip() else f"does not contain {what}"
        raise UserError(f"{option} {path}: {found}. Expected a PEM file of {what}.")


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Run a TLS handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_MAX_FLIGHTS):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
