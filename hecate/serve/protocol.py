"""Requests and answers of OpenAI's clients, as JSON: every limit is enforced, and every refusal gives a reason."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hecate.errors import ConfigError, did_you_mean, shorten
from hecate.serve.scheduler import Request

WINDOW = 64  # tokens: how many a `Cutter` may decode again for each new one


class Limits(NamedTuple):
    """Limits of a request.

    Fields:
        body: bytes of the body, also if it is sent in pieces.
        prompt, max_tokens: tokens of the prompt, tokens to generate.
        seconds: time after which a request ends, including its time in the queue.
        user: characters of a user's name.
        stops: number of texts to end at.
    """

    body: int = 1 << 20
    prompt: int = 1 << 16
    max_tokens: int = 1024
    seconds: float = 120.0
    user: int = 256
    stops: int = 4


@dataclass(frozen=True)
class Texts:
    """A model's tokenizer.

    Fields:
        encode: function from a text to its tokens.
        decode: function from tokens to their text, with U+FFFD for incomplete or invalid characters.
        chat: function from messages, dicts with the texts `role` and `content`, to one prompt, a text or its tokens.
        ends: tokens that end a text, and are not part of it.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    chat: Callable[[list[dict[str, str]]], str | list[int]]
    ends: frozenset[int] = frozenset()


def plain_chat(messages: list[dict[str, str]]) -> str:
    """Messages as lines `role: content`, for tokenizers without a template."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"


_KNOWN = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop",
    "stream", "stream_options", "user",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # values without effect, like null; for other unknown fields `_NOTHING`
    "n": (1,), "best_of": (1,), "suffix": ("",), "tool_choice": ("none",), "logprobs": (False,),
}  # fmt: skip
_NOTHING: tuple[Any, ...] = (False, 0, 0.0, [], {})
_ROLES = ("system", "developer", "user", "assistant")


class Asked(NamedTuple):
    """A request, and the form of its answer: texts to end at, whether it streams, whether usage is reported."""

    request: Request
    stops: tuple[str, ...]
    stream: bool
    usage: bool


def parse(raw: bytes, chat: bool, texts: Texts, limits: Limits, *, model: str, remembers: bool) -> Asked:
    """Parses the body of a request.

    Raises:
        ConfigError: a body that is not a JSON object, a field that is out of bounds, and an unknown one.
    """
    try:
        body = json.loads(raw, parse_constant=lambda word: word)  # NaN becomes a text, which number fields refuse
    except (ValueError, RecursionError):
        raise ConfigError("the body is no JSON in UTF-8") from None
    if not isinstance(body, dict):
        raise ConfigError("the body must be a JSON object")
    for name, value in body.items():
        nothing = value is None or any(
            type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, _NOTHING)
        )
        if name not in _KNOWN and not nothing:
            raise ConfigError(f"{shorten(name)} is not served.{did_you_mean(name, _KNOWN)} Leave it out")
    if body.get("model") not in (None, model):
        raise ConfigError(f"the model {shorten(body['model'])} is not served; {model} is")
    tokens = _tokens(body, chat, texts)
    if not 0 < len(tokens) <= limits.prompt:
        raise ConfigError(f"a prompt must have 1 to {limits.prompt} tokens, this one has {len(tokens)}")
    stops = () if body.get("stop") in (None, "") else body["stop"]
    stops = (stops,) if isinstance(stops, str) else stops
    if not isinstance(stops, list | tuple) or len(stops) > limits.stops or not all(map(_is_text, stops)):
        raise ConfigError(f"stop must be a text or at most {limits.stops} of them, none of them empty")
    user = body.get("user")
    if user is not None and (not _is_text(user) or len(user) > limits.user):
        raise ConfigError(f"user must be a text of 1 to {limits.user} characters")
    if user is not None:
        _whole(user)  # a URL to delete the memory could not contain a lone surrogate
    if user is not None and not remembers:
        raise ConfigError("this server keeps no memories; start it with --memories FOLDER, or leave user out")
    if user is not None and stops:
        raise ConfigError("stop would end in the middle of what is remembered; leave stop or user out")
    counts = [name for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if len(counts) > 1:
        raise ConfigError("max_tokens and max_completion_tokens are names of one bound; leave one of them out")
    options = body.get("stream_options") or {}
    request = Request(
        tokens,
        int(_number(body, counts[0] if counts else "max_tokens", 1,
                    limits.max_tokens, min(256, limits.max_tokens), whole=True)),
        texts.ends,
        _number(body, "temperature", 0, 2, 1.0),
        None,
        _number(body, "top_p", 0, 1, 1.0),
        int(_number(body, "seed", -(1 << 63), (1 << 63) - 1, secrets.randbits(63), whole=True)),
        user,
        time.monotonic() + limits.seconds,
    )  # fmt: skip
    known = isinstance(options, dict) and options.keys() <= {"include_usage"}
    flags = body.get("stream"), options.get("include_usage") if known else "no"
    if not all(isinstance(flag, bool | None) for flag in flags):
        raise ConfigError("stream must be true or false, and stream_options {include_usage: true or false}")
    return Asked(request, tuple(stops), *map(bool, flags))


def _tokens(body: dict[str, Any], chat: bool, texts: Texts) -> list[int]:
    """Tokens of a prompt or of messages."""
    prompt: Any = body.get("prompt")
    messages: Any = body.get("messages")
    if chat:
        if not isinstance(messages, list) or not messages or prompt is not None:
            raise ConfigError("messages must be a list of at least one {role, content}, without a prompt")
        for message in messages:
            fits = isinstance(message, dict) and message.get("role") in _ROLES
            fits = fits and isinstance(message.get("content"), str) and message.get("name") is None
            if not fits or message.keys() - {"role", "content", "name"}:
                roles = ", ".join(_ROLES)
                raise ConfigError(f"a message must be a role of {roles} and a content that is a text, and nothing else")
        asked = texts.chat([{key: _whole(m[key]) for key in ("role", "content")} for m in messages])
        return texts.encode(asked) if isinstance(asked, str) else asked
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    if not _is_text(prompt) or messages is not None:
        raise ConfigError("prompt must be one text that is not empty, or a list of tokens")
    return texts.encode(_whole(prompt))


def _whole(text: str) -> str:
    """The text; refuses lone surrogates, which JSON can escape but UTF-8 cannot encode."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError("the text has half of a surrogate pair, which is no character")
    return text


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _number(body: dict[str, Any], name: str, low: float, high: float, default: float, *, whole: bool = False) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in ((int,) if whole else (int, float)) or not low <= value <= high:
        raise ConfigError(f"{name} must be a {'whole ' if whole else ''}number in {low}..{high}, got {shorten(value)}")
    return value


class Reply(NamedTuple):
    """The fixed fields of an answer."""

    id: str
    model: str
    created: int
    chat: bool

    def body(self, text: str, finish: str | None, *, whole: bool, **more: Any) -> dict[str, Any]:
        """An answer as a dict, or with whole=False a piece of a streamed answer."""
        kind = ("chat.completion" + ("" if whole else ".chunk")) if self.chat else "text_completion"
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if self.chat:
            choice["message" if whole else "delta"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        frame = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**frame, "choices": [choice], **more}


def usage(request: Request, completion: int) -> dict[str, Any]:
    """The field `usage` of an answer of so many tokens."""
    prompt = len(request.tokens)
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}}


def problem(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """An error in the format of OpenAI's clients."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


class Cutter:
    """Incremental decoder of tokens: yields complete characters only, and ends before the first of `stops`.

    Fields:
        ended: True once a stop was found.
        count: number of tokens so far, also those that end the text.
    """

    def __init__(self, texts: Texts, stops: Sequence[str]) -> None:
        self._texts, self._stops = texts, stops
        self._tokens: list[int] = []
        self._settled = self._shown = ""  # the former is the text of tokens before `_tokens`
        self.ended, self.count = False, 0

    def add(self, token: int | None) -> str:
        """New text after one more token, or with None after the last."""
        self.count += token is not None
        if token is not None and token not in self._texts.ends:
            self._tokens.append(token)
        text = self._decoded()
        places = [place for place in map(text.find, self._stops) if place >= 0]
        if places:
            self.ended, text = True, text[: min(places)]
        elif token is not None:
            for _ in range(3):  # a character whose last bytes may follow, for some tokenizers each of them one of these
                text = text.removesuffix("\ufffd")
            tail = text[len(self._shown) :]  # what was shown before begins no stop
            overlaps = (
                n for stop in self._stops for n in range(1, min(len(stop), len(tail) + 1)) if tail.endswith(stop[:n])
            )
            text = text[: len(text) - max(overlaps, default=0)]
        if not text.startswith(self._shown):  # shown text cannot be taken back
            text = self._shown
        fresh, self._shown = text[len(self._shown) :], text
        return fresh

    def _decoded(self) -> str:
        """The text of all tokens. Now and then most of `_tokens` are settled, if their text does not depend on what
        follows, so that a token is decoded some `WINDOW` times at most, however long the text."""
        text, last = self._texts.decode(self._tokens), WINDOW // 2
        whole = self._settled + text
        if self._tokens and len(self._tokens) % WINDOW == 0:
            early, late = map(self._texts.decode, (self._tokens[:-last], self._tokens[-last:]))
            if early + late == text:
                self._settled, self._tokens = self._settled + early, self._tokens[-last:]
        return whole
