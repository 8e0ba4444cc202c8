"""The process that serves: port, engine, uvicorn, signals, and an end in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from trt_eagle3.decode.llm import LLM, load
from trt_eagle3.engine.advice import setting_warnings
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.serving.app import Front, make_app
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.http_options import HttpOptions
from trt_eagle3.serving.log import OnePerCause
from trt_eagle3.serving.throughput_log import ThroughputLog
from trt_eagle3.serving.tls import encrypted, tls_context
from trt_eagle3.serving.warm_up import warm_up

try:
    import uvicorn

    from trt_eagle3.serving.connection import connection_class, drop_all, drop_idle, drop_stalled
except ImportError as missing:
    raise EnvironmentMissingError(
        f"serve: {missing.name} is not installed. Run: pip install starlette uvicorn"
    ) from missing

__all__ = ["Server", "serve"]

_log = logging.getLogger("trt_eagle3")
DRAIN_S = 30  # after SIGTERM, for answers
FLUSH_S = 3  # after that, to send what is left to say
_SWEEP_S = 0.5
# descriptors that are no connections: the bundle's, Python's, sockets of fetched images
_OTHER_FILES = 128
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    bundle: Path,
    *,
    serving: ServingConfig,
    http: HttpOptions,
    host: str,
    port: int,
    log_level: str = "info",
) -> None:
    """Serve ``bundle`` until SIGTERM or SIGINT; requests in flight may then take 30 s more.

    SIGTERM ends the process with status 0 then. A second SIGINT ends it at once. Call it from the
    main thread, which is where signals arrive.

    Raises:
        UserError: no bundle, a certificate that cannot be read, or no such address to listen on.
    """
    with contextlib.ExitStack() as stack:
        _set_up_log(log_level)
        tls = tls_context(http)
        sockets = [stack.enter_context(bound) for bound in _bind(host, port)]
        if http.api_key is None and host not in _LOOPBACK:
            _log.warning(
                "listening on %s without an API key: whoever reaches this port is answered", host
            )
        serving = _within_file_limit(serving)
        engine = load(
            bundle, media=serving.media(), split_special_tokens=serving.split_special_tokens
        )
        stack.callback(engine.close)
        for warning in setting_warnings(engine.bundle.limits, engine.bundle.spec):
            _log.warning(warning)
        if engine.bundle.manifest is None:
            _log.warning("draft: the bundle has none, so nothing is speculated.")
        seconds = warm_up(engine)
        server = Server(engine, serving, http, tls=tls)
        for bound in sockets:
            bound.listen(server.config.backlog)
        # uvicorn raises it again once it has drained
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        _log.info(
            "%s answers on %s; warm-up took %.1f s; %s",
            ", ".join(server.names),
            _url(host, port, tls=tls is not None),
            seconds,
            engine.bundle.capacity,
        )
        with ThroughputLog(engine.metrics):
            server.run(sockets)


def _url(host: str, port: int, *, tls: bool) -> str:
    where = f"[{host}]" if ":" in host else host
    return f"http{'s' if tls else ''}://{where}:{port}/v1"


class Server(uvicorn.Server):
    """uvicorn over one engine, with bounds on connections, and an end that comes in time."""

    def __init__(
        self,
        engine: LLM,
        serving: ServingConfig,
        http: HttpOptions | None = None,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``tls``: with which connections are encrypted; None: they are not."""
        self._engine = engine
        self._front = Front(engine, serving, http)
        plain = connection_class(serving)
        connection: Any = plain if tls is None else encrypted(plain, tls, serving)
        config = uvicorn.Config(
            make_app(self._front),
            port=0,
            http=connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=DRAIN_S + FLUSH_S + 1,
        )
        super().__init__(config)
        self._front.on_overload = lambda: drop_stalled(self.server_state.connections)

    @property
    def names(self) -> tuple[str, ...]:
        """By which requests may call the model."""
        return self._front.names

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; after a second Ctrl-C nobody is waited for."""
        super().handle_exit(sig, frame)
        if self.force_exit:  # uvicorn would log each request that it cuts off as an error
            logging.getLogger("uvicorn.error").disabled = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse bodies that are still coming, wait for answers, and then drop whoever is left."""
        loop, connections = asyncio.get_running_loop(), self.server_state.connections
        self._front.stop()
        sweeping = loop.create_task(_close_idle(connections))
        ends = [
            loop.call_later(DRAIN_S, self._engine.close),  # tells those whose answers are not ready
            loop.call_later(DRAIN_S + FLUSH_S, drop_all, connections),
        ]
        try:
            await super().shutdown(sockets)
        finally:
            drop_all(self.server_state.connections)
            sweeping.cancel()
            for end in ends:
                end.cancel()


async def _close_idle(connections: set[Any]) -> None:
    """Connections that were accepted while the server stopped are nobody's to wait for."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        drop_idle(connections)


def _set_up_log(level: str) -> None:
    """Where nobody has set up logging, to stderr. Handlers of others are left as they are."""
    handler = logging.StreamHandler()
    handler.addFilter(OnePerCause())
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", handlers=[handler])
    _log.setLevel(level.upper())


def _within_file_limit(serving: ServingConfig) -> ServingConfig:
    """As many connections as this process may open files: one that cannot be accepted would be
    tried again for ever.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = serving.max_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return serving
    most = max(soft - _OTHER_FILES, soft // 2)
    _log.warning("max_connections is %d: this process may open %d files (ulimit -n)", most, soft)
    return serving.model_copy(update={"max_connections": most})


def _bind(host: str, port: int) -> list[socket.socket]:
    """Take the port before a big engine is loaded; nobody is let in before the server listens."""
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            listener = socket.socket(family, kind, protocol)
            bound.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
    except OSError as error:
        for listener in bound:
            listener.close()
        raise UserError(
            f"{host}:{port}: cannot listen: {error.strerror}. Name another --host or --port."
        ) from error
    return bound
