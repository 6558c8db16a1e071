"""A run's model and tokenizer in a folder that transformers loads, and tokenizers of hecate as transformers has them,
with the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hecate.data.tokenizer import BYTES, END, Bytes, FileTokenizer, Tokenizer
from hecate.errors import CheckpointError, ConfigError, shorten
from hecate.files import expect_free, written_folder
from hecate.hf.model import HecateForCausalLM
from hecate.models import LanguageModel
from hecate.train.trained import open_model


class Exported(NamedTuple):
    """Where a model was written, the step it is of, and whether its tokenizer lies beside it."""

    folder: Path
    step: int
    has_tokenizer: bool


def export_run(run: Path | str, out: Path | str, which: str = "best") -> Exported:
    """Writes the model of a run, or of a checkpoint folder, into the new folder `out`, complete or not at all:
    `config.json`, `model.safetensors`, `generation_config.json`, the file for remote code, and the tokenizer of the run
    if it was trained on text. [HF-EXPORT-D1]

    Raises:
        CheckpointError: `run` is none, or `out` cannot be written.
        ConfigError: what the run has trained is no language model.
    """
    out = Path(out)
    expect_free(out, "choose another --out")
    trained = open_model(run, which, "cpu")
    if not isinstance(trained.model, LanguageModel):
        raise ConfigError(
            f"{run} has trained a {type(trained.model).__name__}; transformers is given language models alone"
        )
    model = HecateForCausalLM.of(trained.model)
    tokenizer = None if trained.tokenizer is None else tokenizer_of(trained.tokenizer)
    if tokenizer is not None:
        ends, pads = tokenizer.eos_token_id, tokenizer.pad_token_id
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends, pads
    with written_folder(out, "choose another --out") as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return Exported(out, trained.step, tokenizer is not None)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte of UTF-8 is a token whose id it is; the padding is byte 0. [HF-BYTES-D1]

    Any text comes back from its ids. It has no token that ends a text.
    """
    # GPT-2's characters for bytes: printable ones stand for themselves, the others are numbered from 256 on.
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(BYTES) if byte not in plain]
    names = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    own = Backend(models.BPE({names[byte]: byte for byte in range(BYTES)}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.decoder = decoders.ByteLevel()
    return _fast(own, pad_token=names[0])


def file_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a `tokenizer.json`, with the ids that `hecate train` reads: templates add no tokens, and special
    ones are not looked for in text. `<|endoftext|>`, where it is there, ends a text and is the padding. [HF-FILE-D1]"""
    description = json.loads(text) | {"truncation": None, "padding": None, "post_processor": None}
    own = Backend.from_str(json.dumps(description))
    end = {} if own.token_to_id(END) is None else {"eos_token": END, "pad_token": END}
    return _fast(own, **end)


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer that lies beside a model of transformers in a folder; None where there is none. No code of the
    folder runs.

    Raises:
        CheckpointError: one that transformers does not open.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} has a tokenizer that transformers does not open: {shorten(str(error))}"
        ) from None


def tokenizer_of(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer for transformers."""
    if isinstance(tokenizer, FileTokenizer):
        return file_tokenizer(tokenizer.text)
    if not isinstance(tokenizer, Bytes):
        raise TypeError(f"{type(tokenizer).__name__} has no form in transformers")
    return byte_tokenizer()


def _fast(own: Backend, **tokens: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=own,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        **tokens,
    )
