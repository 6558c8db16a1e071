"""adopt: models of transformers on hecate's kernels, beside their own."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from studies.pictures import bars
from studies.study import Cell, Result, Run, Study, progress
from studies.timing import Call, cpu_times
from tests.hf.families import built

PROMPT, TOKENS = 64, 40
SIZES = {  # that times are quoted for
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 512,
}  # fmt: skip
_GDN = {
    "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}  # fmt: skip
_KDA = {
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_key_value_heads": 4,
    "moe_intermediate_size": 128, "linear_head_dim": 64, "linear_num_heads": 8,
}  # fmt: skip
WIDE: dict[str, dict[str, Any]] = {
    "qwen3_next": _GDN, "qwen3_5": _GDN, "qwen3_5_moe": _GDN,
    "qwen4_exp": {**_GDN, "layer_types": None, "hc_lowrank": 16, "indexer_n_heads": 4, "indexer_head_dim": 64},
    "olmo_hybrid": {**_GDN, "linear_num_key_heads": 8},
    "kimi_linear": {**_KDA, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "bailing_hybrid": {**_KDA, "q_lora_rank": 64, "layer_group_size": 4},
    "glm5_next": {
        **_KDA, "q_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 0, "head_dim": 0,
        "index_n_heads": 4, "index_head_dim": 32, "layer_types": None,
    },
    "mamba2": {"state_size": 64, "head_dim": 64, "num_heads": 8, "chunk_size": 64, "n_groups": 1},
    "bamba": {
        "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_chunk_size": 64,
        "attn_layer_indices": [3],
    },
}  # fmt: skip


def adopted(run: Run) -> Result:
    """Two models of the same weights of every family, one of them adopted, three ways through each."""
    import transformers

    length, rounds = (128, 1) if run.quick else (1024, 4)
    rows: list[list[Cell]] = []
    ratios: dict[str, list[float]] = {}
    for family in progress(["qwen3_5", "kimi_linear"] if run.quick else list(WIDE), "families"):
        rule, error, times = measured(family, length, rounds, run.seeds[0])
        ratios[family] = [own / theirs for theirs, own in times]
        cells = [cell for (theirs, own) in times for cell in (theirs, own / theirs)]
        rows.append([family, rule, error, *cells])
    columns = ["family", "rule", "logits (relative)"]
    columns += [text for way in WAYS for text in (f"{way}, transformers (ms)", "ours / theirs")]
    notes = [
        f"process CPU time, the least of {rounds} rounds in turn, {torch.get_num_threads()} thread(s), float32; "
        f"batch 1; transformers {transformers.__version__} in torch",
        "random weights, 4 layers of width 256, 3 of them linear with 8 heads of 64; all 4 of mamba2",
        f"prefill and forward + backward of {length} tokens; a token after {PROMPT} to {PROMPT + TOKENS}",
    ]

    def draw(figure: Any) -> None:
        series = {way: [own[at] for own in ratios.values()] for at, way in enumerate(WAYS)}
        title, what = "models of transformers, adopted", "CPU time, ours / theirs"
        bars(figure, list(ratios), series, title, what, line=1, xscale="linear")

    return Result(columns, rows, notes, draw, data=ratios)


ADOPT = Study("adopt", "What does a model of transformers cost on hecate's kernels?", adopted)


def measured(family: str, length: int, rounds: int, seed: int) -> tuple[str, float, list[list[float]]]:
    """The rule, the relative error of logits, and milliseconds of transformers and hecate for each way."""
    from hecate.hf import adopt

    plain, own = (built(family, **{**SIZES, **WIDE[family]}) for _ in range(2))
    rule = ", ".join(dict.fromkeys(adopt(own).adopted.values()))
    ids = torch.randint(1, 512, (1, length), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        theirs, ours = (model(input_ids=ids, use_cache=False).logits for model in (plain, own))
    times = []
    for way, tokens in WAYS.values():
        taken = cpu_times({"theirs": way(plain, ids), "ours": way(own, ids)}, rounds)
        times.append([float(each.min()) / tokens for each in taken.values()])
    return rule, ((ours - theirs).norm() / theirs.norm()).item(), times


def prefill(model: Any, ids: torch.Tensor) -> Call:
    """A pass over all tokens."""
    return torch.no_grad()(lambda: model(input_ids=ids, use_cache=False))


def both(model: Any, ids: torch.Tensor) -> Call:
    """A pass there and back."""

    def run() -> None:
        model.train().zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.eval()

    return run


@torch.no_grad()
def token(model: Any, ids: torch.Tensor) -> Call:
    """TOKENS behind a prompt, each time from a copy of the cache that it left."""
    held = reading(model, ids[:, :PROMPT])

    @torch.no_grad()
    def run() -> None:
        given = deepcopy(held)
        for _ in range(TOKENS):
            model(input_ids=ids[:, :1], **given)

    return run


def reading(model: Any, prompt: torch.Tensor) -> dict[str, Any]:
    """What a model of transformers is given beside its next token once it has read a prompt."""
    from transformers import DynamicCache

    name = "cache_params" if "Mamba2" in type(model).__name__ else "past_key_values"
    given = {name: DynamicCache(config=model.config.get_text_config()), "use_cache": True}
    model(input_ids=prompt, **given)
    return given


WAYS = {"prefill": (prefill, 1), "forward + backward": (both, 1), "token": (token, TOKENS)}
