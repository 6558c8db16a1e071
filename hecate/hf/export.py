"""A run's model and tokenizer in a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hecate.errors import CheckpointError, ConfigError
from hecate.files import by_library, make_folder, new_folder, refusing
from hecate.hf.model import HecateForCausalLM
from hecate.hf.tokenizer import tokenizer_of
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
    if out.exists():
        raise CheckpointError(f"{out} exists already; choose another --out")
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
    with refusing(f"write {out}", "choose another --out"), by_library():
        make_folder(out.parent)
        with new_folder(out) as folder:
            model.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    return Exported(out, trained.step, tokenizer is not None)
