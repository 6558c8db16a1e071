"""The command `hecate serve`: a run, or what `export --to hf` wrote, behind OpenAI's protocol."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from hecate.errors import ConfigError
from hecate.terminal import echo

KEY = "HECATE_API_KEY"


def serve(
    folder: Annotated[Path, typer.Argument(
        metavar="FOLDER", show_default=False, help="A run, a checkpoint, or a folder of export --to hf.",
    )],
    host: Annotated[str, typer.Option(help=f"Address; one beyond this machine needs a key in {KEY}.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port.")] = 8000,
    memories: Annotated[Path | None, typer.Option(help="Folder with a memory for each `user` of requests.")] = None,
    prefixes: Annotated[Path | None, typer.Option(
        help="Folder that states of shared beginnings are read from and, at the end, written to.",
    )] = None,
    prefix_mib: Annotated[int, typer.Option(min=0, max=1 << 20, help="Room for these states, in MiB.")] = 256,
    parked_dtype: Annotated[str | None, typer.Option(
        help="float16: memories and beginnings are kept in half the bytes; refused where a rule does not bear it.",
    )] = None,
    exact: Annotated[bool, typer.Option(
        "--exact", help="Answers have the same bits in any company; a token alone takes up to four times as long.",
    )] = False,
    max_batch: Annotated[int, typer.Option(min=1, max=256, help="Requests at once, a power of two.")] = 16,
    max_queue: Annotated[int, typer.Option(min=1, max=1 << 16, help="Requests that may wait.")] = 64,
    name: Annotated[str | None, typer.Option(help="The model's for clients; that of the folder if left out.")] = None,
    checkpoint: Annotated[str, typer.Option(help="best or newest, of a run.")] = "best",
) -> None:  # fmt: skip
    """Answer OpenAI's clients: /v1/completions, /v1/chat/completions, /v1/models, /v1/memories, /health, /metrics."""
    try:
        from hecate.serve import server
    except ImportError as error:
        raise ConfigError(str(error)) from None
    from hecate import states
    from hecate.checks import readable
    from hecate.serve import Memories, PrefixCache, Scheduler

    key = os.environ.get(KEY) or None
    server.check_host(host, key)
    model, texts = _exported(folder) if (folder / "config.json").is_file() else _of_run(folder, checkpoint)
    mark = states.fingerprint(model)
    how: dict[str, Any] = {"parked_dtype": parked_dtype}
    room = prefix_mib << 20
    shared: dict[str, Any] = {"model": mark, "exact": exact, **how}
    tree = PrefixCache.open(prefixes, room, **shared) if prefixes else PrefixCache(room, **shared)
    kept = None if memories is None else Memories(memories, mark, **how)
    scheduler = Scheduler(model, max_batch=max_batch, max_queue=max_queue, prefixes=tree, memories=kept, exact=exact)
    name = name or folder.resolve().name
    echo(f"{name} at http://{host}:{port}, {readable(scheduler.state_bytes)} a state" + ("" if key else "; no key"))
    server.serve(server.application(scheduler, texts, name=name, key=key), host, port, key=key)
    if kept is not None:
        kept.close()
    if prefixes is not None:
        tree.save(prefixes)


def _of_run(folder: Path, checkpoint: str) -> tuple[Any, Any]:
    """A run's language model and its texts."""
    from hecate.models import LanguageModel
    from hecate.serve import Texts, plain_chat
    from hecate.train.trained import open_model, reads_text

    trained = open_model(folder, checkpoint)
    if not isinstance(trained.model, LanguageModel):
        raise ConfigError(f"{folder} has trained a {type(trained.model).__name__}; language models alone are served")
    tokenizer = reads_text(trained, str(folder))
    return trained.model, Texts(lambda text: tokenizer.encode([text])[0].tolist(), tokenizer.decode, plain_chat)


def _exported(folder: Path) -> tuple[Any, Any]:
    """The model of a folder of transformers and its texts, with the chat template of its tokenizer if it has one."""
    from hecate.serve import Texts, plain_chat

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder has all of it
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from hecate.hf import HecateForCausalLM
    except ImportError as error:
        raise ConfigError(str(error)) from None
    try:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is no model with a tokenizer: {error}") from None
    if not isinstance(model, HecateForCausalLM):
        raise ConfigError(f"{folder} has a {type(model).__name__}; models of hecate alone are served")

    def chat(messages: list[dict[str, str]]) -> str:
        if not tokenizer.chat_template:
            return plain_chat(messages)
        try:
            return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # templates raise what they like
            raise ConfigError(f"the chat template of the model refuses these messages: {error}") from None

    ends = model.generation_config.eos_token_id
    stops = frozenset([ends] if isinstance(ends, int) else ends or ())
    encode, decode = (lambda text: tokenizer(text)["input_ids"]), (lambda ids: tokenizer.decode(ids))
    return model.model.lm, Texts(encode, decode, chat, stops)
