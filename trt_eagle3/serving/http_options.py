"""Define HttpOptions: the options of ``serve`` that are not limits on requests."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from trt_eagle3.errors import UserError

__all__ = ["HttpOptions"]

_HOST = re.compile(r"[\w.-]+|[0-9A-Fa-f:]+")
# as browsers send it: lower case, without a slash at the end
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@A-Z\s]+")


@dataclass(frozen=True)
class HttpOptions:
    """Options of the HTTP server.

    Attributes:
        api_key: bearer token that ``/v1`` requires; None: none.
        names: model names that requests may use; empty: the bundle's name.
        cors_origins: origins whose web pages may read answers; ``*`` is all.
        tls_cert, tls_key: PEM files of the certificate chain and its key; None: plain HTTP.
        forwarded_allow_ips: proxies whose ``X-Forwarded-For`` is trusted: addresses and networks,
            separated by commas, or ``*`` for any; empty: none.
        host_headers: allowed values of Host, in addition to those of ``checked_hosts``; ``*``: any.
        access_log: write one log line per request.
        chat_page: serve a chat page at ``/``.
    Raises:
        UserError: an empty key or name, an invalid proxy or host, or only one of the two PEM files.
    """

    api_key: str | None = None
    names: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    forwarded_allow_ips: str = ""
    host_headers: tuple[str, ...] = ()
    access_log: bool = True
    chat_page: bool = True

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise UserError(
                "--api-key: it is empty, and would let every client in. Give a key, or leave the "
                "option out."
            )
        if not all(self.names):
            raise UserError("--served-model-name: it is empty. Give a name, or leave it out.")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise UserError(
                    f"--cors-origin: expected * or an origin such as https://example.com, got "
                    f"{origin!r:.80}"
                )
        if self.forwarded_allow_ips not in {"", "*"}:
            for proxy in self.forwarded_allow_ips.split(","):
                _check_proxy(proxy.strip())
        for name in self.host_headers:
            if name != "*" and not _HOST.fullmatch(name):
                raise UserError(
                    f"--allow-host-header: expected a host such as llm.example.com, without scheme "
                    f"and port, or *, got {name!r:.80}"
                )
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "--tls-key" if self.tls_key is None else "--tls-cert"
            raise UserError(f"{missing}: missing. A certificate and its key belong together.")


def _check_proxy(proxy: str) -> None:
    try:
        ipaddress.ip_network(proxy)
    except ValueError as error:
        raise UserError(
            f"--forwarded-allow-ips: expected addresses and networks separated by commas, or *, "
            f"got {proxy!r:.80}"
        ) from error
