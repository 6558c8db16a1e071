"""whole, adopt: language models as a user trains and runs them, beside a plain transformer and other people's models;
and models of transformers on hecate's kernels, beside their own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from hecate.models import LanguageModel
from studies.costs.harness import Call, Function, cpu_times, medians
from studies.study import Cell, Result, Run, Study, bars, progress
from tests.hf import families

WIDTH, LAYERS, HEADS, VOCABULARY, BATCH, HIDDEN = 256, 4, 4, 256, 2, 512
TRANSFORMER = "transformer (SDPA)"
SLOW = {"memory": {"kind": "delta", "algorithm": {"kind": "gd", "lr": 0.3}}, "period": 64, "name": "slow"}
OURS: dict[str, dict[str, Any]] = {
    **{rule: {"memory": rule} for rule in ("delta", "gated_delta", "kda", "titans_linear", "mesa")},
    "two levels of delta": {"levels": [{"memory": "delta", "name": "fast"}, SLOW]},
    "titans, chunks of 64": {"memory": {"kind": "titans", "chunk": 64}},
}
PEERS = ("Llama (transformers)", "Qwen3-Next (transformers)", "Mamba-2 (transformers)")


class Block(nn.Module):
    """Causal attention of HEADS heads with rotary positions, over a cache of keys and values if there is one, and a
    gated MLP, both behind RMS norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.middle = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], cache: list[Tensor] | None) -> Tensor:
        """x `[B, T, WIDTH]`; the cache `[k, v]` of `[B, HEADS, T, WIDTH / HEADS]` grows in place."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, *turn), rotated(k, *turn)
        if cache is not None:
            k, v = (torch.cat((old, new), 2) for old, new in zip(cache, (k, v), strict=True)) if cache else (k, v)
            cache[:] = k, v
        y = scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        a, b = self.up(self.middle(x)).chunk(2, -1)
        return x + self.down(silu(a) * b)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of a head's channels turned by their position."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Transformer(nn.Module):
    """LAYERS blocks; the output shares the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        """Logits `[B, T, VOCABULARY]`."""
        x, width = self.embedding(tokens), WIDTH // HEADS
        past = caches[0][0].shape[2] if caches and caches[0] else 0
        speeds = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(past, past + tokens.shape[1]).float(), speeds)
        turn = angles.cos(), angles.sin()
        for at, block in enumerate(self.blocks):
            x = block(x, turn, caches and caches[at])
        return self.norm(x) @ self.embedding.weight.T


def built(name: str) -> tuple[nn.Module, Function, Callable[[Tensor], Call]]:
    """A model, its logits, and what reads a prompt `[1, T]` and returns a function that decodes the next token."""
    torch.manual_seed(0)
    if name == TRANSFORMER:
        plain = Transformer()

        def cached(prompt: Tensor) -> Call:
            caches: list[list[Tensor]] = [[] for _ in range(LAYERS)]
            plain(prompt, caches)
            return lambda: plain(prompt[:, :1], [list(cache) for cache in caches])

        return plain, plain, cached
    if name in OURS:
        sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "layers": LAYERS, "heads": HEADS}
        ours = LanguageModel({**sizes, **OURS[name]}, generator=torch.Generator().manual_seed(0))
        return ours, lambda tokens: ours(tokens)[0], lambda prompt: partial(ours, prompt[:, :1], ours(prompt)[1])
    model = peer(name)
    # The cache grows by a token a call, which over some hundred of them is less than its first thousand.
    return (
        model,
        lambda tokens: model(input_ids=tokens, use_cache=False).logits,
        lambda prompt: partial(model, input_ids=prompt[:, :1], **reading(model, prompt)),
    )


def peer(name: str) -> Any:
    """A model of transformers of the same width and depth, in plain torch."""
    each = WIDTH // HEADS
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": each, "intermediate_size": HIDDEN}
    if name.startswith("Mamba-2"):
        return families.built("mamba2", **sizes, **WIDE["mamba2"])
    if name.startswith("Qwen3-Next"):
        linear = {"linear_num_value_heads": HEADS, "linear_num_key_heads": HEADS, "num_experts": 0}
        linear |= {"linear_key_head_dim": each, "linear_value_head_dim": each}
        kinds = ["linear_attention"] * (LAYERS - 1) + ["full_attention"]
        return families.built("qwen3_next", **sizes, **heads, **linear, layer_types=kinds)
    from transformers import LlamaConfig, LlamaForCausalLM

    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends, tie_word_embeddings=True))


def saved(logits: Function, model: nn.Module, tokens: Tensor) -> float:
    """Kilobytes that the forward pass keeps for the backward, per token and layer, parameters aside."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits(tokens)
    size = sum(storage.nbytes() for place, storage in storages.items() if place not in weights)
    return size / (tokens.numel() * LAYERS * 1024)


def whole(run: Run) -> Result:
    """A training step, memory, and a decoded token of whole models: steps in turn, then tokens in turn."""
    length, rounds, contexts = (64, 1, (16,)) if run.quick else (512, 9, (64, 1024))
    names = [TRANSFORMER, *(["gated_delta"] if run.quick else [*OURS, *PEERS])]
    g = torch.Generator().manual_seed(run.seeds[0])
    tokens = torch.randint(1, VOCABULARY, (BATCH, length + 1), generator=g)
    prompt = torch.randint(1, VOCABULARY, (1, max(contexts)), generator=g)
    models = {name: built(name) for name in progress(names, "models")}
    memory = {name: saved(logits, model, tokens[:, :-1]) for name, (model, logits, _) in models.items()}
    steps = {name: trained(model, logits, tokens) for name, (model, logits, _) in models.items()}
    low = {name: torch.autocast("cpu", torch.bfloat16)(step) for name, step in steps.items()}
    taken, lower = cpu_times(steps, rounds), cpu_times(low, rounds)
    gc.collect()
    decoded = []
    with torch.no_grad():
        for n in contexts:
            calls = {name: reads(prompt[:, :n]) for name, (*_, reads) in models.items()}
            decoded.append(medians(calls, 5 * rounds))
    rows: list[list[Cell]] = []
    ratios: dict[str, float] = {}
    for name, (model, *_) in models.items():
        ratios[name], low_ratio = (median((times[name] / times[TRANSFORMER]).tolist()) for times in (taken, lower))
        parameters = sum(p.numel() for p in model.parameters()) / 1e6
        tokens_of = (times[name] for times in decoded)
        rows.append([name, parameters, memory[name], median(taken[name].tolist()), ratios[name], low_ratio, *tokens_of])
    columns = ["model", "parameters (M)", "kept for the backward (kB a token and layer)", "step (ms)"]
    columns += ["step / transformer", "the same, bfloat16", *(f"a token after {n} (ms)" for n in contexts)]
    notes = [
        f"width {WIDTH}, {LAYERS} layers, {HEADS} heads, {BATCH} sequences of {length} tokens; process CPU time, "
        f"{torch.get_num_threads()} thread(s), medians of {rounds} rounds in turn, of ratios within a round"
    ]
    series, what = {"": list(ratios.values())}, "CPU time over that of a plain transformer"
    title = "a training step of a whole model"
    draw = partial(bars, rows=names, series=series, title=title, xlabel=what, line=1, xscale="linear")
    return Result(columns, rows, notes, draw, data=ratios)


WHOLE = Study("whole", "What does a whole language model cost on a CPU, to train and to decode?", whole)


def trained(model: nn.Module, logits: Function, tokens: Tensor) -> Call:
    """A step of training on these tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


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


WAYS = {"prefill": 1, "forward + backward": 1, "token": TOKENS}


def adopted(run: Run) -> Result:
    """Two models of the same weights of every family, one of them adopted: the rule, the relative error of logits, and
    three ways through each."""
    import transformers

    from hecate.hf import adopt

    length, rounds = (128, 1) if run.quick else (1024, 4)
    ids = torch.randint(1, 512, (1, length), generator=torch.Generator().manual_seed(run.seeds[0]))
    rows: list[list[Cell]] = []
    ratios: dict[str, list[float]] = {}
    for family in progress(["qwen3_5", "kimi_linear"] if run.quick else list(WIDE), "families"):
        plain, adoptee = (families.built(family, **{**SIZES, **WIDE[family]}) for _ in range(2))
        rule = ", ".join(dict.fromkeys(adopt(adoptee).adopted.values()))
        with torch.no_grad():
            theirs, ours = (model(input_ids=ids, use_cache=False).logits for model in (plain, adoptee))
        cells: list[Cell] = [family, rule, ((ours - theirs).norm() / theirs.norm()).item()]
        for way, tokens in WAYS.items():
            calls = {name: through(model, ids)[way] for name, model in (("theirs", plain), ("ours", adoptee))}
            before, after = (float(each.min()) / tokens for each in cpu_times(calls, rounds).values())
            cells += [before, after / before]
        rows.append(cells)
        ratios[family] = [ratio for ratio in cells[4::2] if isinstance(ratio, float)]
    columns = ["family", "rule", "logits (relative)"]
    columns += [text for way in WAYS for text in (f"{way}, transformers (ms)", f"{way}, ours / theirs")]
    notes = [
        f"process CPU time, the least of {rounds} rounds in turn, {torch.get_num_threads()} thread(s); transformers "
        f"{transformers.__version__} in torch; {length} tokens, and a token after {PROMPT} to {PROMPT + TOKENS}"
    ]
    series = dict(zip(WAYS, zip(*ratios.values(), strict=True), strict=True))
    title, what = "models of transformers, adopted", "CPU time, ours / theirs"
    draw = partial(bars, rows=list(ratios), series=series, title=title, xlabel=what, line=1, xscale="linear")
    return Result(columns, rows, notes, draw, data=ratios)


ADOPT = Study("adopt", "What does a model of transformers cost on hecate's kernels?", adopted)


def through(model: Any, ids: Tensor) -> dict[str, Call]:
    """A pass over all tokens, one there and back, and TOKENS behind a prompt, each time from a copy of its cache."""

    @torch.no_grad()
    def prefill() -> None:
        model(input_ids=ids, use_cache=False)

    def train() -> None:
        model.train().zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.eval()

    @torch.no_grad()
    def decode() -> None:
        copied = deepcopy(cache)
        for _ in range(TOKENS):
            model(input_ids=ids[:, :1], **copied)

    with torch.no_grad():
        cache = reading(model, ids[:, :PROMPT])
    return dict(zip(WAYS, (prefill, train, decode), strict=True))


def reading(model: Any, prompt: Tensor) -> dict[str, Any]:
    """Arguments of a model of transformers beside its next token, once it has read a prompt."""
    from transformers import DynamicCache

    name = "cache_params" if "Mamba2" in type(model).__name__ else "past_key_values"
    options = {name: DynamicCache(config=model.config.get_text_config()), "use_cache": True}
    model(input_ids=prompt, **options)
    return options
