"""One server in this process: a socket, an engine, and an orderly end."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.errors import ConfigError, OctavoError
from octavo.server.app import create_app
from octavo.server.options import ServerOptions

__all__ = ["Address", "serve", "start_lines"]

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75  # longer than clients keep an idle connection, so that none is closed under a request
LAST_SECONDS = 5.0  # for answers to leave, once the engine has ended

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Where the server listens.

    Attributes:
        host, port: of TCP; port 0 takes a free one.
        uds: path of a unix socket, in place of them.
        tls_certificate, tls_key: files that make it HTTPS.

    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None

    def open(self) -> socket.socket:
        """A socket that is bound and does not listen yet.

        Raises:
            ConfigError: the address cannot be had.

        """
        try:
            return self._open_unix() if self.uds else self._open_tcp()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            place = self.uds or f"{self.host}:{self.port}"
            raise ConfigError(f"cannot listen on {place}: {reason}; choose another host, port or uds") from error

    def _open_tcp(self) -> socket.socket:
        family, kind, protocol, _, address = socket.getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        return opened

    def _open_unix(self) -> socket.socket:
        path = Path(self.uds or "")
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.stat().st_mode):
                path.unlink()  # of a server that is gone: one that listens would be replaced, as by a restart
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.bind(str(path))
        return opened

    def url(self, opened: socket.socket) -> str:
        """How clients name it."""
        if self.uds:
            return f"unix:{self.uds}"
        host, port = opened.getsockname()[:2]
        scheme = "https" if self.tls_certificate else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """Uvicorn's server, which leaves signals to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    config: EngineConfig, options: ServerOptions, address: Address, *, stall_timeout: float, drain_seconds: float
) -> None:
    """Serve until SIGTERM or SIGINT, then let requests under way finish for at most `drain_seconds`.

    The server listens while the model loads, and answers 503 until it is there.

    Raises:
        OctavoError: the address cannot be had, or the engine cannot start, or has ended for good.

    """
    opened = address.open()
    try:
        engine = await AsyncEngine.start(config, stall_timeout=stall_timeout, wait=False)
        try:
            await _serve(engine, options, address, opened, drain_seconds)
        finally:
            await engine.stop()
    finally:
        opened.close()
        if address.uds:
            Path(address.uds).unlink(missing_ok=True)
    if engine.failure is not None:
        raise engine.failure


async def _serve(
    engine: AsyncEngine, options: ServerOptions, address: Address, opened: socket.socket, drain_seconds: float
) -> None:
    app = create_app(engine, options)
    config = uvicorn.Config(
        app,
        http="httptools",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=address.tls_certificate,
        ssl_keyfile=address.tls_key,
    )
    try:
        config.load()
    except OSError as error:
        raise ConfigError(f"the TLS files cannot be used: {error}; see tls_certificate and tls_key") from error
    server = _Server(config)
    with _told_to_end() as told:
        serving = asyncio.create_task(server.serve([opened]))
        others = [
            asyncio.create_task(_report(engine, address.url(opened))),
            asyncio.create_task(engine.wait_dead()),
            asyncio.create_task(told.wait()),
        ]
        try:
            await asyncio.wait([serving, *others[1:]], return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            if engine.state != "dead":
                await _drain(engine, serving, told, drain_seconds)
            await asyncio.wait([serving], timeout=LAST_SECONDS)
            server.force_exit = True
            await serving
        finally:
            for task in (serving, *others):
                task.cancel()
            await asyncio.gather(serving, *others, return_exceptions=True)
            if app.state.tracing is not None:
                await app.state.tracing.close(LAST_SECONDS)


async def _drain(engine: AsyncEngine, serving: asyncio.Task[None], told: asyncio.Event, seconds: float) -> None:
    """Let the connections finish, as long as that is allowed and nobody asks again; then end the engine."""
    logger.info("ending: %d requests under way have %g s; a second signal ends at once", engine.num_live, seconds)
    told.clear()
    again = asyncio.create_task(told.wait())
    await asyncio.wait([serving, again], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if engine.num_live:
        logger.warning("ending: %d requests are cut off", engine.num_live)
    await engine.stop()


@contextlib.contextmanager
def _told_to_end() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    try:
        yield told
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _report(engine: AsyncEngine, url: str) -> None:
    """Say what is served, once it is."""
    logger.info("listening on %s while %s loads", url, engine.config.model.model)
    try:
        await engine.wait_ready()
    except OctavoError:
        return  # whoever waits for its end says so
    # What is there now stays: the collector need not go through it again and again, which takes 0.1 s each time.
    gc.collect()
    gc.freeze()
    for what, value in start_lines(engine):
        logger.info("%-18s %s", what + ":", value)
    logger.info("ready on %s", url)


def start_lines(engine: AsyncEngine) -> list[tuple[str, str]]:
    """What is served on what, as (what, value): the first things to look at when it is slow or full."""
    flat = engine.config.flat()
    prefix_caching = "on" if flat["enable_prefix_caching"] else "off"
    limits = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "scheduling_policy")
    return [
        *engine.facts.items(),
        *engine.memory,
        ("prefix caching", f"{prefix_caching}, blocks of {flat['block_size']} tokens"),
        ("settings", ", ".join(f"{name} {flat[name]}" for name in limits)),
    ]
