"""The server: OpenAI's completions and chats, also streamed, on one scheduler. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import hmac
import json
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from socket import socket
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

from hecate.errors import CheckpointError, ConfigError, HecateError, install_line, shorten
from hecate.serve.protocol import Asked, Cutter, Limits, Reply, Texts, parse, problem, usage
from hecate.serve.scheduler import QueueFull, Request, Scheduler

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as Http
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError:
    raise ImportError(f"a server needs starlette and uvicorn: {install_line('serve')}") from None


LOOPBACK = ("127.0.0.1", "localhost", "::1")
QUIET = 60.0
"""Seconds that a connection may wait for its client: for the head of a request, or to read an answer."""
Handler = Callable[[Http], Awaitable[Response]]


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that also stops the application if a second Ctrl-C cuts answers short, lets answers end by
    themselves, with a reason, before its own timeout would cut them, and ends connections of silent clients."""

    # When each connection that waits for its client began to wait, by its request.
    _since: Mapping[tuple[Any, Any], float] = MappingProxyType({})

    async def on_tick(self, counter: int) -> bool:
        """Several times a second: ends connections that have waited for their clients for more than `QUIET`."""
        now, pairs = time.monotonic(), [(line, line.cycle) for line in self.server_state.connections]
        waiting = [(a, b) for a, b in pairs if b is None or b.response_complete or a.flow.write_paused]
        self._since = {pair: self._since.get(pair, now) for pair in waiting}
        for (line, _), since in self._since.items():
            if now - since > QUIET:
                line.transport.abort()
        return bool(await super().on_tick(counter))

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        if (hurry := getattr(self.config.app.state, "hurry", None)) is not None:
            hurry(0.8 * (self.config.timeout_graceful_shutdown or 0))
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()


class _Refused(HTTPException):
    """An error response that ends the handling of a request."""


class _Stream(StreamingResponse):
    """A stream of a request's events; the request is cancelled when it ends, also if the client has disconnected."""

    def __init__(self, request: Request, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self.request = request

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self.request.cancelled = True


class _Server:
    """Handlers of one scheduler."""

    def __init__(self, scheduler: Scheduler, texts: Texts, name: str, key: str | None, limits: Limits) -> None:
        self.scheduler, self.texts, self.name, self.key, self.limits = scheduler, texts, name, key, limits
        self.requests, self.until = WeakSet[Request](), float("inf")

    def hurry(self, seconds: float) -> None:
        """No request, present or future, takes longer: the server stops."""
        self.until = time.monotonic() + seconds
        for request in self.requests:
            request.deadline = min(request.deadline, self.until)

    def guard(self, handler: Handler) -> Handler:
        """A handler with access control, by the key or without one by host name, and with errors as `_Refused`."""

        async def handle(http: Http) -> Response:
            try:
                self._admit(http)
                return await handler(http)
            except QueueFull as error:
                raise _Refused(429, str(error), {"retry-after": "1"}) from None
            except (TimeoutError, ClientDisconnect):
                raise _Refused(408, "the body did not come") from None
            except CheckpointError:
                raise _Refused(500, "the user's memory cannot be deleted; its file is not writable") from None
            except HecateError as error:
                raise _Refused(400, str(error)) from None

        return handle

    def _admit(self, http: Http) -> None:
        if self.key is not None:
            header = http.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(header, f"Bearer {self.key}".encode()):
                raise _Refused(401, "the key is missing or wrong; send it as `Authorization: Bearer KEY`")
        elif _host(http.headers.get("host", "")) not in LOOPBACK:
            # DNS rebinding: a foreign web page may have pointed its own name at this machine.
            raise _Refused(403, "without a key this server answers by the names of this machine alone")

    async def _body(self, http: Http) -> bytes:
        """The body of a request; refuses one that is too long or not JSON."""
        if http.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise _Refused(415, "the body must be sent as application/json")  # which foreign web pages cannot do
        raw, most = b"", self.limits.body
        async with asyncio.timeout(self.limits.seconds):
            async for piece in http.stream():
                raw += piece
                if len(raw) > most:
                    raise _Refused(413, f"a body must have at most {most} bytes")
        return raw

    async def answer(self, http: Http, *, chat: bool) -> Response:
        """POST /v1/completions, or with `chat` POST /v1/chat/completions."""
        if not self.scheduler.alive:
            raise _Refused(503, "the scheduler has ended; the host has to start the server again")
        raw = await self._body(http)
        # In a thread: tokenizing takes a while, and must not block other requests.
        remembers = self.scheduler.memories is not None
        asked = await asyncio.to_thread(parse, raw, chat, self.texts, self.limits, model=self.name, remembers=remembers)
        queue: asyncio.Queue[int | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(token: int | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, token)

        asked.request.tell, asked.request.deadline = tell, min(asked.request.deadline, self.until)
        self.requests.add(asked.request)
        self.scheduler.submit(asked.request)
        reply = Reply(f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", self.name, int(time.time()), chat)
        if asked.stream:
            return _Stream(asked.request, self._events(asked, queue, reply))
        return await self._whole(http, asked, queue, reply)

    async def _pieces(self, request: Request, cutter: Cutter, queue: asyncio.Queue[int | None]) -> AsyncIterator[str]:
        """Pieces of text as they are made; `ConfigError` if the request fails."""
        token: int | None = 0
        while token is not None and not cutter.ended:
            token = await queue.get()
            if token is None and request.finish not in ("stop", "length"):
                raise ConfigError(_why(request))
            if piece := cutter.add(token):
                yield piece
        if cutter.ended:
            request.cancelled = True

    async def _events(self, asked: Asked, queue: asyncio.Queue[int | None], reply: Reply) -> AsyncIterator[str]:
        """Server-sent events; an error is sent as the last event before [DONE]."""

        def event(content: dict[str, Any]) -> str:
            return f"data: {json.dumps(content)}\n\n"

        cutter = Cutter(self.texts, asked.stops)
        try:
            async for piece in self._pieces(asked.request, cutter, queue):
                yield event(reply.body(piece, None, whole=False))
            yield event(reply.body("", _finish(asked.request, cutter), whole=False))
            if asked.usage:
                yield event({**reply.body("", None, whole=False), "choices": [], **usage(asked.request, cutter.count)})
        except ConfigError as error:
            yield event(problem(str(error), "server_error"))
        yield "data: [DONE]\n\n"

    async def _whole(self, http: Http, asked: Asked, queue: asyncio.Queue[int | None], reply: Reply) -> Response:
        cutter = Cutter(self.texts, asked.stops)

        async def text() -> str:
            return "".join([piece async for piece in self._pieces(asked.request, cutter, queue)])

        async def wait_for_disconnect() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass

        work, disconnect = asyncio.ensure_future(text()), asyncio.ensure_future(wait_for_disconnect())
        try:
            await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise _Refused(400, "the client has gone")
            answer = work.result()
        except ConfigError as error:
            raise _Refused(504 if asked.request.finish == "timeout" else 500, str(error)) from None
        finally:
            asked.request.cancelled = True
            work.cancel()
            disconnect.cancel()
        counts = usage(asked.request, cutter.count)  # without what was made beyond a text of `stop`
        return JSONResponse(reply.body(answer, _finish(asked.request, cutter), whole=True, **counts))

    async def forget(self, http: Http) -> Response:
        """DELETE /v1/memories/{user}."""
        user = http.path_params["user"]
        if self.scheduler.memories is None:
            raise _Refused(404, "this server keeps no memories; start it with --memories FOLDER")
        try:
            deleted = await asyncio.to_thread(self.scheduler.forget, user)
        except ConfigError as error:
            raise _Refused(409, str(error)) from None
        if not deleted:
            raise _Refused(404, "nothing is remembered of this user")
        return JSONResponse({"id": user, "object": "memory.deleted", "deleted": True})

    async def models(self, _: Http) -> Response:
        """GET /v1/models."""
        one = {"id": self.name, "object": "model", "created": 0, "owned_by": "hecate"}
        return JSONResponse({"object": "list", "data": [one]})

    async def health(self, _: Http) -> Response:
        """GET /health."""
        alive = self.scheduler.alive
        return JSONResponse({"status": "ok" if alive else "the scheduler has ended"}, 200 if alive else 503)

    async def metrics(self, _: Http) -> Response:
        """GET /metrics, in the format of Prometheus."""
        scheduler, prefixes, memories = self.scheduler, self.scheduler.prefixes, self.scheduler.memories
        rows = {f"{name}_total": scheduler.counts[name] for name in ("requests", "tokens", "prompt_tokens", "steps")}
        rows |= {"running": scheduler.running, "waiting": scheduler.waiting}
        if prefixes is not None:
            rows |= {"prefix_hits_total": prefixes.hits, "prefix_misses_total": prefixes.misses}
            rows |= {"prefix_tokens_saved_total": prefixes.tokens_saved, "prefix_evicted_total": prefixes.evicted}
            rows |= {"prefix_bytes": prefixes.bytes, "prefix_states": len(prefixes)}
        if memories is not None:
            rows |= {"memories": len(memories), "memories_bytes": memories.bytes}
        return PlainTextResponse("".join(f"hecate_{name} {value}\n" for name, value in rows.items()))


def _host(header: str) -> str | None:
    """The host name in a Host header, without the port; None if there is none."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:  # an unbalanced bracket of IPv6
        return None


def _finish(request: Request, cutter: Cutter) -> str:
    """The `finish_reason`; if a text of `stop` was found it is "stop", even if `max_tokens` were made meanwhile."""
    return "length" if request.finish == "length" and not cutter.ended else "stop"


def _why(request: Request) -> str:
    """Reason why a request has failed, for the client, without paths of this machine."""
    if isinstance(request.error, CheckpointError):
        return "this user's memory is of another model, damaged or not writable; DELETE /v1/memories/USER begins anew"
    if request.error is not None:
        return str(request.error)
    late = "the request took too long, or the server is stopping"
    return late if request.finish == "timeout" else f"the request was {request.finish}"


def application(
    scheduler: Scheduler, texts: Texts, *, name: str = "hecate", key: str | None = None, limits: Limits | None = None
) -> Starlette:
    """A Starlette application that starts and stops the scheduler's thread. [SERVE-HTTP-D1]

    Args:
        scheduler: scheduler of the model.
        texts: the model's tokenizer.
        name: the model's name for clients.
        key: key that clients have to send; None serves this machine only.
        limits: limits of requests.
    """
    server = _Server(scheduler, texts, name, key, limits or Limits())

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        scheduler.start()
        yield
        await asyncio.to_thread(scheduler.stop)

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, server.guard(handler), methods=[method])

    routes = [
        route("/v1/completions", partial(server.answer, chat=False), "POST"),
        route("/v1/chat/completions", partial(server.answer, chat=True), "POST"),
        route("/v1/memories/{user:path}", server.forget, "DELETE"),
        route("/v1/models", server.models),
        route("/metrics", server.metrics),
        Route("/health", server.health),
    ]
    app = Starlette(routes=routes, lifespan=running, exception_handlers={HTTPException: _refusal})
    app.state.hurry = server.hurry
    return app


async def _refusal(http: Http, error: Any) -> Response:
    """The answer to a refused request, also to one of a path or a method that there is none of."""
    text, code = error.detail, error.status_code
    if not isinstance(error, _Refused):
        text = f"{http.method} {shorten(http.url.path)} is not served; docs/pages/serve.md lists what is"
    kind = "server_error" if code >= 500 else "rate_limit_error" if code == 429 else "invalid_request_error"
    return JSONResponse(problem(text, kind), code, error.headers)


def check_host(host: str, key: str | None) -> None:
    """Refuses an address that other machines can reach, if there is no key."""
    if host not in LOOPBACK and not key:
        raise ConfigError(f"host {host} is beyond this machine: set HECATE_API_KEY, which clients then have to send")


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt: uvicorn repeats the signal that has stopped it, and SIGTERM alone would end the
    process before its caller could save anything."""
    if threading.current_thread() is not threading.main_thread():  # which no signal reaches
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def serve(application: Starlette, host: str = "127.0.0.1", port: int = 8000, *, key: str | None = None) -> None:
    """Serves an application until SIGINT or SIGTERM; `key` is the application's.

    Raises:
        ConfigError: a host that other machines can reach, without a key.
    """
    check_host(host, key)
    how = {"log_level": "warning", "timeout_graceful_shutdown": 10, "ws": "none"}
    config = uvicorn.Config(application, host=host, port=port, **how)
    server = _Uvicorn(config)
    with _sigterm_as_ctrl_c(), suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        raise SystemExit(3)  # uvicorn has printed the reason
