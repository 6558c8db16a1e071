"""The server over loopback: OpenAI's own client, limits, disconnections, and memories that survive being killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import httpx

from hecate import states
from hecate.errors import ConfigError
from hecate.serve import Limits, Memories, PrefixCache, Scheduler, application
from hecate.serve.protocol import WINDOW, Cutter, parse
from hecate.serve.server import serve
from tests import forked
from tests.serve.common import TEXTS, alone, listening, made, said

COUNT = 10
HOW: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0}


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """A scheduler and its address, without a key."""
    memories = Memories(tmp_path_factory.mktemp("users"), states.fingerprint(model))
    scheduler = Scheduler(model, max_batch=4, max_queue=4, prefixes=PrefixCache(block=8), memories=memories)
    limits = Limits(max_tokens=2000, prompt=200, seconds=20)
    with listening(application(scheduler, TEXTS, name="tiny", limits=limits)) as url:
        yield scheduler, url
    memories.close()


def post(url: str, path: str = "completions", **body: Any) -> Any:
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=60)


def wait_for(condition: Any, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.spec("SERVE-HTTP-D1")
def test_openai_s_client_is_answered(server, model):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server[1]}/v1", api_key="none", max_retries=0)
    assert [one.id for one in client.models.list()] == ["tiny"]
    wanted = said(model, ["hello"], COUNT)[0]
    found = client.completions.create(model="tiny", prompt="hello", **HOW)
    assert found.choices[0].text == wanted and found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (5, COUNT, 15)
    pieces = list(client.completions.create(model="tiny", prompt="hello", stream=True, **HOW))
    assert (
        "".join(piece.choices[0].text for piece in pieces) == wanted and pieces[-1].choices[0].finish_reason == "length"
    )
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "\u00e9?"}]
    wanted = said(model, ["system: be brief\nuser: \u00e9?\nassistant:"], COUNT)[0]
    talk = client.chat.completions.create(model="tiny", messages=messages, **HOW)
    assert (talk.choices[0].message.role, talk.choices[0].message.content) == ("assistant", wanted)
    how = {"stream": True, "stream_options": {"include_usage": True}}
    pieces = list(client.chat.completions.create(model="tiny", messages=messages, **how, **HOW))
    assert "".join(piece.choices[0].delta.content for piece in pieces if piece.choices) == wanted
    assert pieces[-1].choices == [] and pieces[-1].usage.completion_tokens == COUNT
    with pytest.raises(openai.BadRequestError, match="'tools' is not served. Leave it out"):
        client.chat.completions.create(model="tiny", messages=messages, tools=[{"type": "function"}])
    with pytest.raises(openai.BadRequestError, match="the model 'large' is not served; tiny is"):
        client.completions.create(model="large", prompt="x")


@pytest.mark.spec("SERVE-HTTP-D1")
def test_the_events_of_a_stream(server, model):
    with httpx.stream("POST", f"{server[1]}/v1/completions", json={"prompt": "a", "stream": True, **HOW}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    assert text == said(model, ["a"], COUNT)[0]


@pytest.mark.spec("SERVE-HTTP-D1")
def test_draws_and_stops(server, model):
    _, url = server
    drawn = [post(url, prompt="ab", temperature=1.0, seed=seed, max_tokens=20).json()["choices"][0]["text"]
             for seed in (1, 1, 2)]  # fmt: skip
    assert drawn[0] == drawn[1] != drawn[2]
    greedy = said(model, ["ab"], 20)[0]
    for how in ({"top_p": 0}, {"temperature": 1e-300}, {"temperature": 1e-40}):
        answer = post(url, prompt="ab", max_tokens=20, **{"temperature": 1.0, **how})
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == greedy
    whole = said(model, ["stop here"], 30)[0]
    assert post(url, prompt=list(b"stop here"), temperature=0, max_tokens=30).json()["choices"][0]["text"] == whole
    stop = whole[8:10]
    for stream in (False, True):
        answer = post(url, prompt="stop here", temperature=0, max_tokens=30, stop=["zzz", stop], stream=stream)
        events = [json.loads(x[6:]) for x in answer.text.splitlines() if x and "DONE" not in x] if stream else []
        found = "".join(event["choices"][0]["text"] for event in events) if stream else None
        choice = events[-1]["choices"][0] if stream else answer.json()["choices"][0]
        assert (found if stream else choice["text"]) == whole[: whole.find(stop)] and choice["finish_reason"] == "stop"
    tokens = alone(model, [list(b"stop here")], 30)[0]
    last = next(n for n in range(30) if stop in TEXTS.decode(tokens[:n]))  # of the tokens asked for
    answers = [post(url, prompt="stop here", temperature=0, max_tokens=last + n, stop=stop).json() for n in range(4)]
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"stop"}
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {last}  # however many were made meanwhile


@pytest.mark.spec("SERVE-HTTP-D1")
def test_what_may_become_a_stop_or_a_character_is_held_back():
    cutter = Cutter(TEXTS, ("end", "dot"))
    assert [cutter.add(token) for token in "\u00e9 ene".encode()] == ["", "\u00e9", " ", "", "", "en"]
    assert [cutter.add(token) for token in b"nd!"] == ["", "", ""] and cutter.ended
    cutter = Cutter(TEXTS, ("end",))
    assert [cutter.add(token) for token in (*b"aen", 0xE2, None)] == ["a", "", "", "", "en\ufffd"]


@pytest.mark.spec("SERVE-HTTP-D1")
def test_a_long_text_comes_in_pieces_that_are_decoded_a_few_times_each():
    text, asked = "h\u00e9, \u6f22\u5b57 and \U0001f600 then " * 60, []
    counting = replace(TEXTS, decode=lambda tokens: asked.append(len(tokens)) or TEXTS.decode(tokens))
    cutter, tokens = Cutter(counting, ("stop",)), [*text.encode(), *b"sto"]
    pieces = [cutter.add(token) for token in [*tokens, None]]
    assert "".join(pieces) == text + "sto" and pieces.count(" ") == text.count(" ")  # each at once
    assert sum(asked) < 3 * WINDOW * len(tokens) / 2
    cutter = Cutter(TEXTS, ("stop",))
    assert "".join(cutter.add(token) for token in [*tokens, *b"p, not this"]) == text and cutter.ended


@pytest.mark.spec("SERVE-HTTP-D1")
def test_characters_of_tokenizers_that_fall_back_to_bytes():
    """They decode an incomplete character to as many U+FFFD as it has bytes, and those after which it comes, too."""

    def decode(tokens: Any) -> str:
        try:
            return bytes(tokens).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(tokens)

    cutter = Cutter(replace(TEXTS, decode=decode), ())
    text = "\u6f22\u5b57\U0001f600"
    assert "".join(map(cutter.add, [*text.encode(), None])) == text
    cutter = Cutter(TEXTS, ())
    assert "".join(map(cutter.add, [*b"a", *[0xFF] * 9, *b"b", None])) == "a" + "\ufffd" * 9 + "b"


@pytest.mark.timeout(60)
@pytest.mark.spec("SERVE-HTTP-D1")
def test_a_long_stop_costs_no_more_than_the_text():
    cutter = Cutter(TEXTS, ("a" * 3_000_000,))  # by its own length squared it would take a quarter of an hour
    assert "".join(map(cutter.add, [*b"aab" * 20, None])) == "aab" * 20


BODIES = [
    ({}, "prompt must be one text"), ({"prompt": ""}, "prompt must be"), ({"prompt": ["a", "b"]}, "prompt must be"),
    ({"prompt": [1, True]}, "prompt must be"), ({"prompt": [999]}, "tokens must be in 0..255"),
    ({"prompt": "a", "messages": []}, "prompt must be"), ({"prompt": "x" * 201}, "1 to 200 tokens, this one has 201"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens must be a whole number in 1..2000"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"), ({"prompt": "a", "max_tokens": 2001}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 5, "max_completion_tokens": 5}, "leave one of them out"),
    ({"prompt": "a", "max_tokens": 5.0}, "max_tokens"), ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature must be a number in 0..2, got 'hot'"),
    ({"prompt": "a", "top_p": 1.1}, "top_p"), ({"prompt": "a", "seed": 1 << 70}, "seed"),
    ({"prompt": "a", "stop": ["a"] * 5}, "stop must be"), ({"prompt": "a", "stop": ""}, None),
    ({"prompt": "a", "stop": [""]}, "stop must be"), ({"prompt": "a", "stream": 1}, "stream must be"),
    ({"prompt": "a", "stream_options": 3}, "stream_options"), ({"prompt": "a", "user": "u" * 257}, "user must be"),
    ({"prompt": "a", "user": 3}, "user must be"), ({"prompt": "a", "user": "u", "stop": "x"}, "leave stop or user out"),
    ({"prompt": "a", "logprobs": 3}, "'logprobs' is not served"), ({"prompt": "a", "n": 2}, "'n' is not served"),
    ({"prompt": "a", "max_completion_tokens": None}, None),
    ({"prompt": "a", "frequency_penalty": 0.0, "n": None}, None),
    ({"prompt": "a", "n": 0}, "'n' is not served"), ({"prompt": "a", "n": True}, "'n' is not served"),
    ({"prompt": "a", "logprobs": 0}, "'logprobs' is not served"), ({"prompt": "a", "logprobs": False}, None),
    ({"prompt": "a", "stream_options": {"include_usage": True, "else": 1}}, "stream_options {include_usage"),
    ({"prompt": "a", "n": 1, "suffix": "", "best_of": 1, "logit_bias": {}, "echo": False}, None),
    ({"prompt": "a", "tempreature": 1}, "'tempreature' is not served. Did you mean 'temperature'? Leave it out"),
    ({"prompt": "\ud83d"}, "half of a surrogate"),
    ({"prompt": "a", "user": "\ud83d"}, "half of a surrogate"),
    ({"prompt": [-1, 5]}, "the vocabulary, got -1"), ({"prompt": "a", "stop": 0}, "stop must be"),
]  # fmt: skip
MESSAGES = [
    None, [], {}, [1], [{"role": "user"}], [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user", "content": "x", "name": "ada"}], [{"role": "user", "content": "x", "tool_calls": []}],
]  # fmt: skip


@pytest.mark.spec("SERVE-HTTP-D2")
def test_bad_fields_and_messages_are_refused_by_a_sentence(server):
    for body, match in BODIES:
        raw = json.dumps(body if match else {**body, "max_tokens": 1}).encode()
        answer = httpx.post(f"{server[1]}/v1/completions", content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == (400 if match else 200), (body, answer.text)
        assert match or answer.json()["usage"]["completion_tokens"] == 1
        assert match is None or match in answer.json()["error"]["message"], (body, answer.text)
    for messages in MESSAGES:
        answer = post(server[1], "chat/completions", messages=messages)
        assert answer.status_code == 400 and "message" in answer.json()["error"]["message"], messages


@pytest.mark.spec("SERVE-HTTP-D2")
def test_bad_bodies_hosts_and_routes(server):
    scheduler, url = server
    kind = {"content-type": "application/json"}

    def code(content: Any, headers: dict[str, str] = kind, path: str = "completions") -> int:
        return httpx.post(f"{url}/v1/{path}", content=content, headers=headers).status_code

    large = b'{"prompt": "' + b"x" * (1 << 20) + b'"}'
    assert code(large) == 413
    assert code(iter([large[:1000], large[1000:]])) == 413  # in pieces, without a length
    assert len(large) > 1 << 20 > len(large) - 20 and code(large[:12] + large[40:]) == 400  # fits; too many tokens
    for raw in (b"{", b"\xff\xfe", b"[]", b"3", b"[" * 100_000, b'{"prompt": "a", "max_tokens": 1e99}',
                b'{"prompt": "a", "temperature": NaN}',
                b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}"):  # fmt: skip
        assert code(raw) == 400, raw[:40]
    assert code(b'{"prompt": "a", "max_tokens": 1}', {"content-type": "text/plain"}) == 415
    for host in ("evil.example", "[", "[::1"):
        assert code(b'{"prompt": "a", "max_tokens": 1}', {**kind, "host": host}) == 403
    unknown, wrong = httpx.post(f"{url}/v1/embeddings"), httpx.get(f"{url}/v1/completions")
    assert (unknown.status_code, wrong.status_code, wrong.headers["allow"]) == (404, 405, "POST")
    assert unknown.json()["error"]["message"].startswith("POST '/v1/embeddings' is not served")
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert scheduler.running == scheduler.waiting == 0
    rows = dict(line.split() for line in httpx.get(f"{url}/metrics").text.splitlines())
    assert int(rows["hecate_tokens_total"]) == scheduler.counts["tokens"] and rows["hecate_waiting"] == "0"


@pytest.mark.spec("SERVE-HTTP-D2")
def test_a_refusal_needs_no_readable_address(server):
    sent: list[Any] = []
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"\xff", "headers": []}

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(application(server[0], TEXTS)(scope, receive, send))
    assert sent[0]["status"] == 403 and b"names of this machine" in sent[1]["body"]


@pytest.mark.spec("SERVE-HTTP-D2")
def test_a_full_queue_and_clients_that_leave(server):
    scheduler, url = server
    body = {"prompt": "x", "max_tokens": 2000, "temperature": 0, "stream": True}
    with httpx.Client() as client:
        streams = [client.stream("POST", f"{url}/v1/completions", json=body) for _ in range(8)]
        answers = [stream.__enter__() for stream in streams[:4]]
        wait_for(lambda: scheduler.running == 4)
        answers += [stream.__enter__() for stream in streams[4:]]
        assert scheduler.waiting == 4
        full = post(url, prompt="x", max_tokens=1)
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        assert "4 requests wait already" in full.json()["error"]["message"]
        steps, made_before = scheduler.counts["steps"], scheduler.counts["requests"]
        for stream, answer in zip(streams, answers, strict=True):
            answer.close()
            stream.__exit__(None, None, None)
    wait_for(lambda: scheduler.running == scheduler.waiting == 0)
    assert scheduler.counts["requests"] == made_before + 8 and scheduler.counts["steps"] < steps + 1500
    # A client that leaves before a whole answer has come.
    host, port = url.removeprefix("http://").split(":")
    raw = json.dumps(body | {"stream": False}).encode()
    with socket.create_connection((host, int(port))) as line:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        line.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        wait_for(lambda: scheduler.running == 1)
    steps = scheduler.counts["steps"]
    wait_for(lambda: scheduler.running == 0)
    assert scheduler.counts["steps"] < steps + 1500


async def _endless(_: Any) -> Any:
    from starlette.responses import StreamingResponse

    async def pieces() -> Any:
        while True:
            await asyncio.sleep(0)
            yield b"x" * (1 << 16)

    return StreamingResponse(pieces())


@pytest.mark.spec("SERVE-HTTP-D2")
def test_connections_of_silent_clients_are_ended_and_used_ones_kept(monkeypatch):
    from starlette.applications import Starlette
    from starlette.routing import Route

    from hecate.serve import server as module

    monkeypatch.setattr(module, "QUIET", 1.0)
    head = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
    routes = [Route("/", _endless), Route("/health", lambda _: module.Response())]
    with listening(Starlette(routes=routes)) as url, httpx.Client() as client:
        host, port = url.removeprefix("http://").split(":")
        lines = [socket.create_connection((host, int(port)), timeout=20) for _ in range(3)]
        lines[1].sendall(head)  # without its end
        lines[2].sendall(head + b"\r\n")  # and reads nothing
        for _ in range(12):
            assert client.get(f"{url}/health").status_code == 200  # one connection, often between two requests
            with contextlib.suppress(OSError):  # it has been ended
                lines[1].sendall(b"x: y\r\n")
            time.sleep(0.2)
        assert len(client._transport._pool.connections) == 1
        for line in lines:
            with line, contextlib.suppress(ConnectionResetError):
                while line.recv(1 << 20):
                    pass


@pytest.mark.spec("SERVE-HTTP-D1")
def test_many_at_once_are_answered_as_alone(server, model):
    prompts = [f"request {n} " * (1 + n % 3) for n in range(12)]
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        while (answer := post(server[1], prompt=prompts[number], **HOW)).status_code == 429:
            time.sleep(0.05)
        found[number] = answer.json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: said(model, [prompt], COUNT)[0] for number, prompt in enumerate(prompts)}


@pytest.mark.spec("SERVE-USER-D1")
def test_users_are_remembered_and_forgotten(server, model):
    _, url = server
    turns = ["I am Ada. ", "And then? ", "My name? "]

    def ask(turn: str, user: str, **how: Any) -> str:
        return post(url, prompt=turn, user=user, **HOW, **how).json()["choices"][0]["text"]

    name = "../../etc/ada \u00e9%2f"
    assert [ask(turn, name) for turn in turns] == said(model, turns, COUNT)
    assert ask(turns[1], "bob") == said(model, [turns[1]], COUNT)[0]
    path = f"{url}/v1/memories/" + "".join(f"%{byte:02x}" for byte in name.encode())
    gone = httpx.delete(path)
    assert gone.json() == {"id": name, "object": "memory.deleted", "deleted": True}
    assert httpx.delete(path).status_code == 404
    assert ask(turns[0], name) == said(model, turns, COUNT)[0]
    body = {"prompt": "a", "user": "bob", "stream": True, "max_tokens": 2000}
    with httpx.stream("POST", f"{url}/v1/completions", timeout=20, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert httpx.delete(f"{url}/v1/memories/bob").status_code == 409


@pytest.mark.spec("SERVE-HTTP-D2")
def test_keys_and_hosts(model, monkeypatch):
    app = application(Scheduler(model), TEXTS, key="secret \u00e9", limits=Limits(seconds=0.05))
    with pytest.raises(ConfigError, match=r"host 0\.0\.0\.0 is beyond this machine: set HECATE_API_KEY"):
        serve(app, "0.0.0.0")
    with listening(app) as url:
        for path in ("/v1/models", "/metrics"):
            assert httpx.get(url + path).status_code == 401
            wrong = {"authorization": "Bearer secret"}
            assert httpx.get(url + path, headers=wrong).status_code == 401
            right = {"authorization": "Bearer secret \u00e9".encode(), "host": "any.example"}
            assert httpx.get(url + path, headers=right).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        slow = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1024}, headers=right, timeout=30)
        assert slow.status_code == 504 and "took too long" in slow.json()["error"]["message"]
        user = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "user": "u"}, headers=right)
        assert user.status_code == 400 and "--memories" in user.json()["error"]["message"]
        assert httpx.delete(f"{url}/v1/memories/u", headers=right).status_code == 404


@pytest.mark.spec("SERVE-HTTP-D1", "SERVE-BATCH-D2")
def test_a_scheduler_that_has_failed_is_told(model, monkeypatch):
    scheduler = Scheduler(model)
    with listening(application(scheduler, TEXTS)) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        monkeypatch.setattr(scheduler, "_run", lambda *args: 1 / 0)
        failed = post(url, prompt="a")
        assert failed.status_code == 500 and "the scheduler has failed" in failed.json()["error"]["message"]
        wait_for(lambda: not scheduler.alive)
        assert httpx.get(f"{url}/health").status_code == 503 and post(url, prompt="a").status_code == 503


@pytest.mark.spec("SERVE-HTTP-D2")
def test_answers_that_are_cut_by_the_end_of_the_server_say_so(model):
    scheduler, found = Scheduler(model), dict[bool, Any]()
    body = {"prompt": "a", "max_tokens": 10**6, "temperature": 0}

    def ask(url: str, stream: bool) -> None:
        found[stream] = post(url, **body, stream=stream)

    with listening(application(scheduler, TEXTS, limits=Limits(max_tokens=10**6))) as url:
        threads = [threading.Thread(target=ask, args=(url, stream)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        wait_for(lambda: scheduler.running == 2)
    for thread in threads:
        thread.join(20)
    assert found[False].status_code == 504 and "server is stopping" in found[False].json()["error"]["message"]
    assert "server is stopping" in found[True].text and found[True].text.endswith("data: [DONE]\n\n")


SERVER = """
import sys
import torch
from hecate import states
from hecate.serve import Memories, Scheduler, application
from hecate.serve.server import serve
from tests.serve.common import TEXTS, made
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
model = made()
scheduler = Scheduler(model, memories=Memories(sys.argv[1], states.fingerprint(model)))
serve(application(scheduler, TEXTS), port=int(sys.argv[2]))
"""


@contextlib.contextmanager
def started(folder: Path, port: int) -> Iterator[forked.Forked]:
    """The process of a server that answers."""
    process = forked.Forked(SERVER, folder, port)

    def ready() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
        return False

    try:
        wait_for(ready, 120)
        yield process
    finally:
        process.kill()


@pytest.mark.spec("SERVE-USER-D1")
def test_a_memory_survives_a_server_that_is_killed(tmp_path, model):
    """In the middle of an answer."""
    turns = ["I am Ada. ", "And then? ", "My name? "]
    wanted = said(model, turns, COUNT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with started(tmp_path, port) as process:
        assert post(url, prompt=turns[0], user="ada", **HOW).json()["choices"][0]["text"] == wanted[0]
        body = {"prompt": "no", "user": "ada", "stream": True, "max_tokens": 1000}
        with httpx.stream("POST", f"{url}/v1/completions", timeout=20, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.kill()
        assert process.wait() == -signal.SIGKILL
    with started(tmp_path, port) as process:
        for turn, text in zip(turns[1:], wanted[1:], strict=True):
            assert post(url, prompt=turn, user="ada", **HOW).json()["choices"][0]["text"] == text
        process.kill(signal.SIGTERM)
        assert process.wait() == 0  # what comes after `serve` is done, such as saving a tree


@pytest.mark.spec("SERVE-CLI-D1")
def test_the_tokens_of_a_chat_are_those_of_its_template(tmp_path):
    """A tokenizer that begins every text with a token of its own does not add it to what a template has written."""
    hf = pytest.importorskip("hecate.hf")
    from tokenizers import processors

    from hecate.commands import _of_export

    tokenizer, messages = hf.byte_tokenizer(), [{"role": "user", "content": "hi"}]
    begin = processors.TemplateProcessing(single="\x01 $A", special_tokens=[("\x01", 1)])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.chat_template = "\x01{% for m in messages %}{{ m['content'] }}{% endfor %}"
    hf.HecateForCausalLM.of(made()).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = _of_export(tmp_path)[1]
    asked = parse(json.dumps({"messages": messages}).encode(), True, texts, Limits(), model="", remembers=False)
    assert texts.encode("hi") == [1, *b"hi"] == asked.request.tokens


@pytest.mark.spec("SERVE-CLI-D1")
def test_the_command_serves_what_was_exported(tmp_path, monkeypatch, hecate):
    hf = pytest.importorskip("hecate.hf")
    from hecate.serve import server as module

    own, folder = made(), tmp_path / "tiny"
    hf.HecateForCausalLM.of(own).save_pretrained(folder)
    tokenizer = hf.byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}!"
    tokenizer.save_pretrained(folder)
    monkeypatch.delenv("HECATE_API_KEY", raising=False)
    assert "set HECATE_API_KEY" in hecate("serve", folder, "--host", "0.0.0.0")[2]

    def answered(app: Any, host: str, port: int, *, key: str | None) -> None:
        assert (host, port, key) == ("127.0.0.1", 8123, None)
        with listening(app) as url:
            for prompt in ("one long enough prompt", "one long enough promise"):
                assert (
                    post(url, prompt=prompt, user=None, **HOW).json()["choices"][0]["text"]
                    == said(own, [prompt], COUNT)[0]
                )
            talk = post(url, "chat/completions", messages=[{"role": "user", "content": "hi"}], user="ada", **HOW).json()
            assert talk["model"] == "tiny" and talk["choices"][0]["message"]["content"] == said(own, ["uhi!"], COUNT)[0]

    monkeypatch.setattr(module, "serve", answered)
    both = ("--prefixes", tmp_path / "both", "--memories", tmp_path / "both")
    assert "memories and prefixes are both" in hecate("serve", folder, *both)[2] and not (tmp_path / "both").exists()
    more = ("--port", 8123, "--prefixes", tmp_path / "tree", "--memories", tmp_path / "users")
    for exact in ((), (), ("--exact",)):
        if exact:  # states of the other kind are of another model
            assert "another model" in hecate("serve", folder, *more, *exact)[2]
            shutil.rmtree(tmp_path / "tree")
        code, out, _ = hecate("serve", folder, *more, *exact)
        assert code == 0 and "tiny at http://127.0.0.1:8123" in out
        assert len(list((tmp_path / "tree").iterdir())) == 2
        (next((tmp_path / "users").glob("*.safetensors"))).unlink()
    assert "tree" in hecate("serve", tmp_path / "tree")[2]


STOPPED_TWICE = """
import os, signal, threading, time
from contextlib import asynccontextmanager
from starlette.applications import Starlette
from hecate.serve import server

up = threading.Event()

@asynccontextmanager
async def running(_):
    up.set()
    yield
    print("stopped", flush=True)

def press():
    up.wait()
    time.sleep(1)  # uvicorn listens by then
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)

threading.Thread(target=press).start()
server.serve(Starlette(lifespan=running), port=0)
"""


def test_a_second_ctrl_c_stops_the_application_and_prints_no_traceback():
    ended = forked.run(STOPPED_TWICE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "stopped\n", "")


@pytest.mark.spec("SERVE-CLI-D1")
def test_without_the_extra_a_sentence_says_what_to_install(tmp_path, monkeypatch, hecate):
    import importlib

    from hecate import serve as package

    monkeypatch.delitem(sys.modules, "hecate.serve.server")
    monkeypatch.delattr(package, "server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ImportError, match=r'needs starlette and uvicorn: pip install -c constraints.txt "\.\[serve\]"'):
        importlib.import_module("hecate.serve").application  # noqa: B018
    assert 'pip install -c constraints.txt ".[serve]"' in hecate("serve", tmp_path)[2]


@pytest.mark.spec("SERVE-CLI-D1")
def test_the_command_serves_a_run(tmp_path, monkeypatch, hecate, float32):
    from hecate.serve import server as module
    from hecate.train import open_model
    from tests.train.common import text_run

    text_run(tmp_path, budget={"steps": 2, "seq_len": 8, "checkpoint_every": 2})
    own: Any = open_model(tmp_path / "run", "best").model

    def answered(app: Any, host: str, port: int, *, key: str | None) -> None:
        assert key == "secret" and host == "0.0.0.0"
        with listening(app) as url:
            head = {"authorization": "Bearer secret"}
            body = {"model": "mine", "prompt": "a te", **HOW}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=head, timeout=60).json()
            assert answer["choices"][0]["text"] == said(own, ["a te"], COUNT)[0]

    monkeypatch.setattr(module, "serve", answered)
    monkeypatch.setenv("HECATE_API_KEY", "secret")
    assert hecate("serve", tmp_path / "run", "--host", "0.0.0.0", "--name", "mine")[0] == 0
