"""Run the serving process: port, engine, uvicorn, signals, and a bounded shutdown."""

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

from trt_eagle3.decode.policy.off import off_reason
from trt_eagle3.engine.bundle.advice import setting_warnings
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.serving.app import Front, make_app
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.engine import Engine
from trt_eagle3.serving.engine_process import EngineJob
from trt_eagle3.serving.http_options import HttpOptions
from trt_eagle3.serving.log import set_up_log
from trt_eagle3.serving.remote_engine import RemoteEngine
from trt_eagle3.serving.request_guard import checked_hosts, is_loopback
from trt_eagle3.serving.throughput_log import ThroughputLog
from trt_eagle3.serving.tls import encrypted, tls_context

try:
    import uvicorn

    from trt_eagle3.serving.connection import connection_class, drop_all, drop_idle, drop_stalled
except ImportError as missing:
    raise EnvironmentMissingError(
        f"serve: {missing.name} is not installed. Run: pip install starlette uvicorn"
    ) from missing

__all__ = ["Server", "serve"]

_log = logging.getLogger("trt_eagle3")
DRAIN_S = 30  # time limit for answers after SIGTERM
FLUSH_S = 3  # after that, time limit for sending the rest
_SWEEP_S = 0.5
# file descriptors besides connections: the bundle's, Python's, sockets of fetched images
_OTHER_FILES = 128


def serve(
    bundle: Path,
    *,
    serving: ServingConfig,
    http: HttpOptions,
    host: str,
    port: int,
    log_level: str = "info",
    tensor_parallel: int | None = None,
) -> None:
    """Serve ``bundle`` until SIGTERM or SIGINT; requests in flight may then take 30 s more.

    After SIGTERM the process ends with status 0; before it is ready, it ends at once. A second
    SIGINT ends it at once. If the engine fails, waiting clients get an error, and the process ends
    with status 1. Call it from the main thread, which receives the signals.

    ``tensor_parallel``: as for ``LLM``.

    Raises:
        UserError: no bundle, a certificate that cannot be read, or no such address to listen on.
        EngineFailedError: the engine's process ended before it was ready.
    """
    with contextlib.ExitStack() as stack:
        # works as a container's first process too; uvicorn raises SIGTERM again after draining
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        stack.callback(signal.signal, signal.SIGTERM, before or signal.SIG_DFL)
        set_up_log(log_level)
        tls = tls_context(http)
        sockets = [stack.enter_context(bound) for bound in _bind(host, port)]
        if http.api_key is None and not is_loopback(host):
            _log.warning(
                "listening on %s without an API key: every client that reaches this port is served",
                host,
            )
        serving = _within_file_limit(serving)
        _log.info("loading %s", bundle)
        engine = _start_engine(bundle, serving, log_level, tensor_parallel, stack)
        for warning in setting_warnings(engine.bundle.limits, engine.bundle.spec):
            _log.warning(warning)
        if engine.bundle.manifest is None:
            _log.warning("draft: the bundle has none, so it decodes without speculation.")
        _log.info("loaded; warming up: the shapes of most requests run once")
        seconds = engine.wait_until_ready()
        hosts = checked_hosts(host, http.host_headers, has_key=http.api_key is not None)
        server = Server(engine, serving, http, tls=tls, hosts=hosts)
        for bound in sockets:
            bound.listen(server.config.backlog)
        url = _url(host, port, tls=tls is not None)
        _log.info(
            "%s answers on %s/v1; %swarm-up took %.1f s; %s",
            ", ".join(server.names),
            url,
            f"chat page on {url}/; " if http.chat_page else "",
            seconds,
            engine.bundle.capacity,
        )
        _run(server, engine, sockets)


def _run(server: Server, engine: RemoteEngine, sockets: list[socket.socket]) -> None:
    """Serve until a signal or a failure of the engine; exit with status 1 after a failure."""
    config, bundle = engine.bundle.record.config, engine.bundle
    has_draft = bundle.manifest is not None  # else the start has warned
    reason = off_reason(bundle.path, config.speculation, has_draft=True) if has_draft else None
    with ThroughputLog(engine.metrics, off_reason=reason):
        engine.on_failure(server.end)
        try:
            server.run(sockets)
        finally:
            engine.close()  # the log thread may be waiting for its metrics
    if engine.failed:  # the log has the reason
        sys.exit(1)


def _start_engine(
    bundle: Path,
    serving: ServingConfig,
    log_level: str,
    tensor_parallel: int | None,
    stack: contextlib.ExitStack,
) -> RemoteEngine:
    """Start the engine of ``bundle`` in its own process, which ends with ``stack``.

    The warm-up continues after this call.

    Raises:
        UserError: an error in the bundle.
    """
    read_bundle(bundle)  # raises before a process is started
    media, split, calls = serving.media(), serving.split_special_tokens, serving.tool_format
    job = EngineJob.of_bundle(
        bundle,
        media,
        media_cache=serving.media_cache(),
        split_special_tokens=split,
        tool_format=calls,
        tensor_parallel=tensor_parallel,
        max_step_ms=serving.max_step_ms,
        log_level=log_level,
    )
    engine = stack.enter_context(RemoteEngine(job))
    engine.attach(
        bundle,
        media=media,
        split_special_tokens=split,
        tool_format=calls,
        tensor_parallel=tensor_parallel,
    )
    return engine


def _url(host: str, port: int, *, tls: bool) -> str:
    where = f"[{host}]" if ":" in host else host
    return f"http{'s' if tls else ''}://{where}:{port}"


class Server(uvicorn.Server):
    """A uvicorn server over one engine, with bounded connections and a bounded shutdown."""

    def __init__(
        self,
        engine: Engine,
        serving: ServingConfig,
        http: HttpOptions | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        hosts: frozenset[str] | None = None,
    ) -> None:
        """Configure uvicorn.

        Args:
            tls: encrypts connections; None: unencrypted HTTP.
            hosts: allowed values of Host (``checked_hosts``).
        """
        self._engine = engine
        self._front = Front(engine, serving, http)
        proxies = self._front.http.forwarded_allow_ips
        unencrypted = connection_class(serving)
        connection: Any = unencrypted if tls is None else encrypted(unencrypted, tls, serving)
        config = uvicorn.Config(
            make_app(self._front, hosts),
            port=0,
            http=connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=proxies,
            timeout_graceful_shutdown=DRAIN_S + FLUSH_S + 1,
        )
        super().__init__(config)
        self._front.on_overload = lambda: drop_stalled(self.server_state.connections)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model that requests may use."""
        return self._front.names

    def end(self) -> None:
        """End as after SIGTERM; callable from any thread."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; drop all connections at a second SIGINT."""
        super().handle_exit(sig, frame)
        if self.force_exit:  # suppress one logged error per dropped request
            for name in ("uvicorn.error", "asyncio"):
                logging.getLogger(name).disabled = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse bodies that are still arriving, wait for answers, then drop all connections."""
        loop, connections = asyncio.get_running_loop(), self.server_state.connections
        self._front.stop()
        sweeping = loop.create_task(_close_idle(connections))
        drain_s = DRAIN_S if self._engine.ready else 0
        ends = [
            loop.call_later(drain_s, self._engine.close),  # ends unfinished answers with an error
            loop.call_later(drain_s + FLUSH_S, drop_all, connections),
        ]
        try:
            await super().shutdown(sockets)
        finally:
            drop_all(self.server_state.connections)
            sweeping.cancel()
            for end in ends:
                end.cancel()


async def _close_idle(connections: set[Any]) -> None:
    """Close idle connections repeatedly: some are accepted while the server stops."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        drop_idle(connections)


def _within_file_limit(serving: ServingConfig) -> ServingConfig:
    """Reduce ``max_connections`` to the limit on open files.

    Otherwise the server would retry for ever to accept a connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = serving.max_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < num_files:
        soft = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= num_files:
        return serving
    most = max(soft - _OTHER_FILES, soft // 2)
    _log.warning("max_connections is %d: this process may open %d files (ulimit -n)", most, soft)
    return serving.model_copy(update={"max_connections": most})


def _bind(host: str, port: int) -> list[socket.socket]:
    """Bind the port before a large engine is loaded; clients connect only once it listens."""
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
