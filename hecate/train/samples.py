"""What samples.txt shows: generated text, or one solved example of a task."""

from __future__ import annotations

import torch

from hecate.data import IGNORED
from hecate.train.generate import generate
from hecate.train.trainer import Trainer


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
        lines.append(
            f"position {position}: after {token} answer {answer}, label {target}: {verdict}"
        )
    return "\n".join(lines)
