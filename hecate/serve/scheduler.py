"""Continuous batching: requests are admitted as rows become free, prompts are read in pieces, and all rows are
continued together.

Rows are independent, so that an answer does not depend on concurrent requests, except by rounding. A batch has 1, 2, 4,
8, ... rows, some of which may be idle, because every number of rows is another compiled program.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hecate import states
from hecate.checks import expect_count, expect_ids, expect_number
from hecate.errors import ConfigError, HecateError, NonFiniteError, ShapeError
from hecate.serve.kept import Memories, PrefixCache, check_parked
from hecate.tape import exact as exactly
from hecate.train.evaluate import likely

Finish = Literal["stop", "length", "cancelled", "timeout", "error"]
_LOG = logging.getLogger(__name__)


class QueueFull(HecateError):
    """The queue is full: `max_queue` requests wait already."""


@dataclass(eq=False)
class Request:
    """A prompt to continue, and its progress.

    Fields:
        tokens: the prompt, at least one token.
        max_tokens: number of tokens after which it ends, with `finish` "length".
        stop: tokens that end it, with `finish` "stop"; such a token is then the last of `made`.
        temperature, top_k, top_p: as in `hecate generate`; temperature 0 takes the likeliest token.
        seed: seed of its draws.
        user: user whose memory it continues, and updates if it ends by "stop" or "length".
        deadline: value of `time.monotonic()`, in seconds, at which it ends, with `finish` "timeout".
        tell: function that the scheduler's thread calls with every token as soon as it is made, and None at the end.
        made: generated tokens so far.
        finish: reason why it has ended; None while it runs.
        error: the exception, if `finish` is "error".
        cancelled: set to True to end the request within a step.
    """

    tokens: Sequence[int]
    max_tokens: int = 64
    stop: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    user: str | None = None
    deadline: float = float("inf")
    tell: Callable[[int | None], None] = lambda token: None
    made: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: Exception | None = None
    cancelled: bool = False
    _state: Any = None  # its state until it joins the batch
    _read: int = 0
    _row: int | None = None  # its row in the batch
    _draws: torch.Generator | None = None

    def check(self, vocabulary: int | None) -> None:
        """Refuses a request that the model cannot continue, such as one with tokens outside the vocabulary."""
        expect_ids(self.tokens, "tokens")
        if not self.tokens:
            raise ConfigError("a prompt must have at least one token")
        if vocabulary is not None:
            for token in (min(self.tokens), max(self.tokens)):
                if not 0 <= token < vocabulary:
                    raise ShapeError(f"tokens must be in 0..{vocabulary - 1}, the vocabulary, got {token}")
        expect_count(self.max_tokens, "max_tokens")
        expect_number(self.temperature, "temperature")
        if self.top_k is not None:
            expect_count(self.top_k, "top_k")
        if self.top_p is not None:
            expect_number(self.top_p, "top_p", 0.0, 1.0)

    def pick(self, logits: Tensor) -> int:
        """The next token, drawn by logits `[V]`."""
        if self.temperature == 0:
            return int(logits.argmax())
        if self._draws is None:
            self._draws = torch.Generator().manual_seed(self.seed)
        chances = likely(logits.float().cpu(), self.temperature, self.top_k, self.top_p)
        return int(torch.multinomial(chances, 1, generator=self._draws))

    def over(self) -> Finish | None:
        """Reason why it ends now; None if it continues."""
        if self.made and self.made[-1] in self.stop:
            return "stop"
        if len(self.made) >= self.max_tokens:
            return "length"
        return "cancelled" if self.cancelled else "timeout" if time.monotonic() > self.deadline else None


class Scheduler:
    """Scheduler of requests on one model. [SERVE-BATCH-D1]

        scheduler = Scheduler(model)
        request = scheduler.submit(Request(tokens, max_tokens=20))
        while scheduler.step():    # or `start()`, which does this in a thread
            ...
        request.made

    Args:
        model: `(tokens [B, T], state) -> (logits, state)`, with states of constant size; set to evaluation mode.
        max_batch: number of requests that are continued at once; a power of two.
        piece: number of prompt tokens read between two steps of the batch, so that a long prompt delays nobody.
        max_queue: number of requests that may wait.
        prefixes: states of prefixes that prompts share.
        memories: states of users.
        exact: answers have the same bits as alone, by `hecate.exact`; tested once, here. [SERVE-EXACT-D1]

    Raises:
        ConfigError: a model whose states grow with the tokens, as with attention without a window, since they cannot be
            batched; states parked in float16 with a rule that it would harm; `exact` with parked states, or if the test
            fails for this model on this machine.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_batch: int = 16,
        piece: int = 256,
        max_queue: int = 64,
        prefixes: PrefixCache | None = None,
        memories: Memories | None = None,
        exact: bool = False,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("piece", piece), ("max_queue", max_queue)):
            expect_count(value, name)
        if max_batch & (max_batch - 1):
            raise ConfigError(f"max_batch must be a power of two, got {max_batch}")
        self.model, self.max_batch, self.piece, self.max_queue = model.eval(), max_batch, piece, max_queue
        self.prefixes, self.memories, self.exact = prefixes, memories, exact
        if prefixes is not None and prefixes.exact != exact:
            raise ConfigError(f"exact={exact}, and the PrefixCache has exact={prefixes.exact}: give both the same")
        for store in (prefixes, memories):
            if store is not None and store.parked_dtype is not None:
                if exact:
                    raise ConfigError(
                        f"exact=True, and parked_dtype={store.parked_dtype!r} rounds what is kept: drop one"
                    )
                check_parked(model, store.parked_dtype)
        self.block = piece if prefixes is None else prefixes.block
        self.device = next(model.parameters()).device
        self.vocabulary: int | None = getattr(getattr(model, "config", None), "vocab_size", None)
        self.counts: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._waiting: deque[Request] = deque()
        self._reading: Request | None = None
        self._running: list[Request] = []
        self._users: dict[str, Request] = {}  # the request that is being served, by user
        self._state: Any = None  # the batch's state, of `_size` rows
        self._size, self._stopping = 0, False
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        with torch.no_grad():
            _, one = self._run([[0]], None)
            _, two = self._run([[0]], one)
        self.state_bytes, self._form = states.bytes_of(two), _form(two)
        self.file_bytes = self.state_bytes if memories is None else memories.file_bytes(two)
        if _form(one) != self._form:
            raise ConfigError(
                "states of this model grow with the tokens, and make no batch: give its attention a window"
            )
        if exact:
            with torch.no_grad():
                self._check_exact()

    def _run(self, tokens: list[list[int]], state: Any) -> tuple[Tensor, Any]:
        """Logits `[B, V]` of the next token after these, and the state."""
        with exactly() if self.exact else nullcontext():
            logits, state = self.model(torch.tensor(tokens, device=self.device), state)
        return logits[:, -1], state

    def _run_one(self, tokens: list[int], state: Any) -> tuple[Tensor, Any]:
        """As `_run`, of one row; refuses logits that are not finite."""
        logits, state = self._run([tokens], state)
        if not bool(torch.isfinite(logits).all()):
            raise NonFiniteError("the logits are not finite")
        return logits, state

    def _check_exact(self) -> None:
        """Refuses a model or a machine on which a row's bits depend on the other rows, or on how a prompt is split."""
        rows = [[(7 * row + t) % (self.vocabulary or 2) for t in range(6)] for row in range(self.max_batch)]
        state = None
        for token in rows[-1]:
            logits, state = self._run([[token]], state)
        batch, whole = self._run(rows, None)
        alone, row = states.leaves(state), states.leaves(states.rows(whole, [self.max_batch - 1]))
        if not torch.equal(batch[-1:], logits) or not all(torch.equal(row[name], leaf) for name, leaf in alone.items()):
            raise ConfigError(
                f"exact=True, and a {type(self.model).__name__} on this machine answers a window in a batch with other "
                "bits than its tokens alone; leave exact out"
            )

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of requests that are being read or continued."""
        return len(self._running) + (self._reading is not None)

    def submit(self, request: Request) -> Request:
        """Puts a request into the queue; may be called from any thread.

        Raises:
            QueueFull: too many requests wait; try again later.
            ConfigError, ShapeError: a request that cannot be served.
        """
        request.check(self.vocabulary)
        if request.user is not None and self.memories is None:
            raise ConfigError("nothing is remembered here (no folder for memories was given); leave user out")
        with self._lock:
            if self.failure is not None:
                raise ConfigError("the scheduler has ended after a failure; start the server again")
            if len(self._waiting) >= self.max_queue:
                raise QueueFull(f"{self.max_queue} requests wait already; try again later")
            if request.user is not None and self.memories is not None:
                coming = {other.user for other in self._waiting if other.user is not None}  # and have no file yet
                self.memories.check_room(request.user, self.file_bytes, coming.union(self._users))
            self._waiting.append(request)
        self._wake.set()
        return request

    def forget(self, user: str) -> bool:
        """Deletes a user's memory; returns False if there was none. `ConfigError` while a request of the user is
        served."""
        if self.memories is None:
            raise ConfigError("nothing is remembered here (no folder for memories was given)")
        with self._lock:
            if user in self._users or any(request.user == user for request in self._waiting):
                raise ConfigError("a request of this user is being answered; delete the memory when it is done")
            return self.memories.delete(user)

    @torch.no_grad()
    def step(self) -> bool:
        """Reads up to `piece` tokens of prompts, and makes one token for every running request; returns False if there
        was nothing to do."""
        self._end_early()
        budget, busy = self.piece, False
        while budget > 0 and (request := self._next()) is not None:
            budget, busy = budget - self._read(request), True
        if not self._running:
            return busy
        logits = self._continue()
        finite = torch.isfinite(logits).all(-1).tolist()
        likeliest = logits.argmax(-1).tolist()
        for row, request in enumerate(list(self._running)):
            if not finite[row]:
                self._leave(request, "error", NonFiniteError("the logits are not finite"))
                continue
            self._add_token(request, likeliest[row] if request.temperature == 0 else request.pick(logits[row]))
            if why := request.over():
                self._leave(request, why)
        self.counts["steps"] += 1
        return True

    def _end_early(self) -> None:
        """Ends requests that were cancelled or are past their deadline."""
        with self._lock:
            gone = [request for request in self._waiting if request.over()]
            self._waiting = deque(request for request in self._waiting if request not in gone)
        for request in gone:
            self._end(request, request.over())
        if self._reading is not None and (why := self._reading.over()):
            request, self._reading = self._reading, None
            self._end(request, why)
        for request in list(self._running):
            if why := request.over():
                self._leave(request, why)

    def _next(self) -> Request | None:
        """The request whose prompt is to be read: in order of arrival, but only one request per user at a time."""
        if self._reading is None and len(self._running) < self.max_batch:
            with self._lock:
                for request in self._waiting:
                    if request.user is None or request.user not in self._users:
                        self._waiting.remove(request)
                        if request.user is not None:
                            self._users[request.user] = request
                        self._reading = request
                        break
        return self._reading

    def _read(self, request: Request) -> int:
        """Reads a piece of a prompt, after the last of which the request joins the batch; returns the number of
        tokens read."""
        tokens, whole = request.tokens, len(request.tokens)
        try:
            if not request._read and request._state is None:
                if request.user is not None and self.memories is not None:
                    request._state = self.memories.load(request.user)
                elif self.prefixes is not None:
                    request._read, request._state = self.prefixes.longest(tokens[:-1])
                if request._state is not None:  # files are read on the CPU
                    request._state = states.to(request._state, self.device)
            start = request._read
            end = min((start // self.block + 1) * self.block, start + self.piece, whole)
            shared = self.prefixes is not None and request.user is None
            if shared and start < whole - 1:  # keeps a state before the last token, for the next turn of a conversation
                end = min(end, whole - 1)
            logits, request._state = self._run_one(list(tokens[start:end]), request._state)
            if end == whole and _form(request._state) != self._form:
                raise ShapeError("the memory is of documents with resets, or was made elsewhere; begin a new one")
            request._read = end
            if self.prefixes is not None and shared and end < whole and (end % self.block == 0 or end == whole - 1):
                self.prefixes.keep(tokens[:end], request._state)
        except HecateError as error:
            self._reading = None
            self._end(request, "error", error)
            return 1
        self.counts["prompt_tokens"] += end - start
        if end == whole:
            self._reading = None
            self._running.append(request)
            self._add_token(request, request.pick(logits[0]))
            if why := request.over():
                self._leave(request, why)
        return end - start

    def _continue(self) -> Tensor:
        """Logits `[N, V]` after the last token of every running request."""
        count = 1 << (len(self._running) - 1).bit_length()  # the smallest power of two that has room for them
        if count < self._size or any(request._row is None for request in self._running):
            self._join(count)
        feed = [[0]] * self._size  # idle rows get token 0
        for request in self._running:
            feed[request._row or 0] = [request.made[-1]]
        try:
            logits, self._state = self._run(feed, self._state)
        except HecateError:
            return self._continue_alone()
        return logits[[request._row for request in self._running]]

    def _join(self, count: int) -> None:
        """Makes a batch of `count` rows from the running requests; idle rows repeat the last."""
        rows = [request._row for request in self._running if request._row is not None]
        parts = [states.rows(self._state, rows)] if rows else []
        parts += [request._state for request in self._running if request._row is None]
        self._state, self._size = parts[0] if len(parts) == 1 else states.stack(parts), count
        for row, request in enumerate(self._running):
            request._row, request._state = row, None
        if count > len(self._running):
            self._state = states.rows(self._state, [min(row, len(self._running) - 1) for row in range(count)])

    def _continue_alone(self) -> Tensor:
        """As `_continue`, row by row, after a failure: the request that fails ends with an error."""
        rows: list[Tensor] = []
        for request in list(self._running):
            try:
                logits, request._state = self._run([[request.made[-1]]], states.rows(self._state, [request._row or 0]))
            except HecateError as error:
                self._leave(request, "error", error)
            else:
                request._row = None
                rows.append(logits)
        return torch.cat(rows) if rows else torch.zeros(0, 1)

    def _add_token(self, request: Request, token: int) -> None:
        request.made.append(token)
        self.counts["tokens"] += 1
        request.tell(token)

    def _leave(self, request: Request, why: Finish, error: Exception | None = None) -> None:
        """Removes a running request from the batch, and ends it."""
        state = request._state if request._row is None else None
        if state is None and request.user is not None:
            state = states.rows(self._state, [request._row or 0])
        self._running.remove(request)
        if not self._running:
            self._state, self._size = None, 0
        self._end(request, why, error, state if why in ("stop", "length") else None)

    def _end(self, request: Request, why: Finish | None, error: Exception | None = None, state: Any = None) -> None:
        """Ends a request: first the user's memory, including the whole answer, is saved, then `tell(None)` is
        called."""
        if state is not None and request.user is not None and self.memories is not None:
            try:
                _, state = self._run_one(request.made[-1:], state)
                self.memories.save(request.user, state)
            except HecateError as fault:
                why, error = "error", fault
        request.finish, request.error, request._state = why, error, None
        self.counts["requests"] += 1
        self.counts[f"ended_{why}"] += 1
        with self._lock:
            if request.user is not None and self._users.get(request.user) is request:
                del self._users[request.user]
        request.tell(None)

    @property
    def alive(self) -> bool:
        """True while its thread runs."""
        return self._thread is not None and self._thread.is_alive() and self.failure is None

    def start(self) -> None:
        """Runs steps in a thread until `stop`."""
        self._thread = threading.Thread(target=self._loop, name="hecate-scheduler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread after its current step; unfinished requests stay unfinished."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        try:
            while not self._stopping:
                if not self.step():
                    self._wake.wait(0.05)
                    self._wake.clear()
        except BaseException as error:
            _LOG.exception("the scheduler has ended")
            with self._lock:
                self.failure = error
                requests = [*self._running, *([self._reading] if self._reading else []), *self._waiting]
                self._running, self._reading, self._waiting = [], None, deque()
            for request in requests:
                self._end(request, "error", ConfigError("the scheduler has failed; start the server again"))


def _form(state: Any) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Dtypes and shapes, without the batch axis, of a state's tensors, by path; they must agree within a batch."""
    return {path: (leaf.dtype, leaf.shape[1:]) for path, leaf in states.leaves(state).items()}
