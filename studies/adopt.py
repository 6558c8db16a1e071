"""adopt: models of transformers on hecate's kernels, beside their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from hecate.figure import COLOURS, GREY, finish, one_legend
from studies.families import WIDE, wide
from studies.study import Cell, Progress, Result, Study

PROMPT, TOKENS = 64, 40
WAYS = ("prefill", "forward + backward", "token")


class Adopt(Study):
    """The same model, adopted and released in turn."""

    name: ClassVar[str] = "adopt"
    about: ClassVar[str] = "What does a model of transformers cost on hecate's kernels?"
    count: ClassVar[int] = 1
    timed: ClassVar[bool] = True

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Three ways through a model of every family; the least of some rounds each."""
        import transformers

        length, rounds = (128, 1) if quick else (1024, 4)
        rows: list[list[Cell]] = []
        ratios: dict[str, list[float]] = {}
        for family in progress(["qwen3_5", "kimi_linear"] if quick else list(WIDE), "families"):
            rule, error, times = measured(family, length, rounds, seeds[0])
            ratios[family] = [own / theirs for theirs, own in times]
            cells = [cell for (theirs, _), ratio in zip(times, ratios[family], strict=True) for cell in (theirs, ratio)]
            rows.append([family, rule, error, *cells])
        columns = ["family", "rule", "logits (relative)"]
        columns += [text for way in WAYS for text in (f"{way}, transformers (ms)", "ours / theirs")]
        notes = [
            f"process CPU time, the least of {rounds} rounds in turn, {torch.get_num_threads()} thread(s), float32; "
            f"batch 1; transformers {transformers.__version__} in torch",
            "random weights, 4 layers of width 256, 3 of them linear with 8 heads of 64; all 4 of mamba2",
            f"prefill and forward + backward of {length} tokens; a token after {PROMPT} to {PROMPT + TOKENS}",
        ]
        return Result(columns, rows, notes, lambda figure: draw(figure, ratios), data=ratios)


def measured(family: str, length: int, rounds: int, seed: int) -> tuple[str, float, list[tuple[float, float]]]:
    """The rule, the relative error of logits, and milliseconds of transformers and hecate for each way."""
    from hecate.hf import adopt, release

    model = wide(family)
    ids = torch.randint(1, 512, (1, length), generator=torch.Generator().manual_seed(seed))
    ways = through(model, family, ids)
    with torch.no_grad():
        theirs = model(input_ids=ids, use_cache=False).logits
        rule = ", ".join(dict.fromkeys(adopt(model).adopted.values()))
        error = ((model(input_ids=ids, use_cache=False).logits - theirs).norm() / theirs.norm()).item()
    release(model)
    times = []
    for way in ways:
        least = [float("inf"), float("inf")]
        for taken in range(rounds + 1):
            for side in (0, 1):
                if side:
                    adopt(model)
                spent = way()
                if side:
                    release(model)
                if taken:
                    least[side] = min(least[side], spent)
        times.append((least[0], least[1]))
    return rule, error, times


def through(model: Any, family: str, ids: torch.Tensor) -> list[Callable[[], float]]:
    """Milliseconds that each way takes."""
    from transformers import DynamicCache

    def prefill() -> float:
        start = time.process_time()
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        return 1e3 * (time.process_time() - start)

    def both() -> float:
        model.train().zero_grad()
        start = time.process_time()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        spent = 1e3 * (time.process_time() - start)
        model.eval().zero_grad()
        return spent

    def token() -> float:
        name = "cache_params" if family == "mamba2" else "past_key_values"
        given: dict[str, Any] = {name: DynamicCache(config=model.config.get_text_config()), "use_cache": True}
        with torch.no_grad():
            model(input_ids=ids[:, :PROMPT], **given)
            start = time.process_time()
            for _ in range(TOKENS):
                model(input_ids=ids[:, :1], **given)
        return 1e3 * (time.process_time() - start) / TOKENS

    return [prefill, both, token]


def draw(figure: Any, ratios: dict[str, list[float]]) -> None:
    """A group of bars a family."""
    axes = figure.subplots()
    for index, way in enumerate(WAYS):
        places = [place + 0.27 * (index - 1) for place in range(len(ratios))]
        axes.bar(places, [each[index] for each in ratios.values()], 0.25, color=COLOURS[index], label=way)
    axes.axhline(1, color=GREY, lw=0.8)
    axes.set_xticks(range(len(ratios)), list(ratios), rotation=30, ha="right")
    finish(axes, "models of transformers, adopted", "", "CPU time, ours / theirs", legend=False)
    one_legend(figure, axes, len(WAYS))
