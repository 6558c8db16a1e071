"""What samples.txt shows: generated text, or one solved example of a task."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from hecate.data import IGNORED
from hecate.train.files import refusing, write_file
from hecate.train.generate import generate
from hecate.train.trainer import Trainer

_HEADER = re.compile(rb"^--- step (\d+)\n", re.MULTILINE)


def add_sample(path: Path, step: int, text: str) -> None:
    """Puts a sample behind those of earlier steps; others are of a run that was undone."""
    indented = _HEADER.sub(rb" \g<0>", text.encode() + b"\n")  # a model may write a header, too
    _replace(path, step - 1, b"--- step %d\n" % step + indented)


def rewind_samples(path: Path, step: int) -> None:
    """Drops samples after `step`, which a run that continues there draws again."""
    if path.exists():
        _replace(path, step, b"")


def _replace(path: Path, step: int, more: bytes) -> None:
    remedy = "free some space or make it writable, then continue with --resume"
    with refusing(f"write {path}", remedy):
        before = path.read_bytes() if path.exists() else b""
        _, *parts = _HEADER.split(before)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        kept = [b"--- step %s\n%s" % pair for pair in pairs if int(pair[0]) <= step]
        write_file(path, b"".join(kept) + more)


def sample_text(trainer: Trainer) -> str:
    """A sample from the model as it stands, drawn with the experiment's seed."""
    if trainer.source.metric == "bits_per_byte":
        return _text(trainer)
    return _example(trainer)


def _text(trainer: Trainer) -> str:
    sample = trainer.config.sample
    prompt = sample.prompt.encode() or b"\n"
    ids = generate(
        trainer.model, list(prompt), sample.tokens, temperature=sample.temperature,
        generator=torch.Generator().manual_seed(trainer.config.seed), device=trainer.device,
    )  # fmt: skip
    return (prompt + bytes(ids)).decode(errors="replace")


@torch.no_grad()
def _example(trainer: Trainer) -> str:
    batch = next(iter(trainer.source.validation_batches(1, trainer.config.seq_len, 1)))
    trainer.model.eval()
    logits, _ = trainer.model(batch.tokens.to(trainer.device))
    answers = logits[0].argmax(-1).cpu()
    tokens, targets = batch.tokens[0], batch.targets[0]
    lines = [f"tokens: {' '.join(map(str, tokens.tolist()))}"]
    for position in torch.nonzero(targets != IGNORED).flatten().tolist():
        token, target, answer = (int(t[position]) for t in (tokens, targets, answers))
        verdict = "right" if answer == target else "wrong"
        lines.append(f"position {position}: after {token} answer {answer}, label {target}: {verdict}")
    return "\n".join(lines)
