"""Small models of the families whose layers are delta rules or Mamba-2, over kernels of transformers in plain torch."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import nn

BASE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 48, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
MIXED, INDEXED = ["linear_attention", "full_attention"], ["linear_attention", "indexed_attention"]
GDN = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "layer_types": MIXED,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MLA = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
}  # fmt: skip
KDA = {"linear_head_dim": 16, "linear_num_heads": 2}
SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
BUILT: dict[str, tuple[str, str, dict[str, Any]]] = {
    # family: (config, model, what it has beside BASE)
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**MOE, **GDN}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", GDN),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**MOE, **GDN}),
    "qwen4_exp": (
        "Qwen4ExpTextConfig", "Qwen4ExpForCausalLM",
        {**MOE, **GDN, "layer_types": INDEXED, "hc_count": 2, "hc_lowrank": 4,
         "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 2048,
         "indexer_compress_ratio": 16},
    ),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {**GDN, "linear_num_key_heads": 4}),
    "kimi_linear": (
        "KimiLinearConfig", "KimiLinearForCausalLM", {**MLA, **KDA, "num_local_experts": 4, "layer_types": MIXED}
    ),
    "bailing_hybrid": (
        "BailingHybridConfig", "BailingHybridForCausalLM",
        {**MLA, "q_lora_rank": 16, "num_local_experts": 8, "n_group": 2, "topk_group": 1, "layer_group_size": 2,
         "num_mtp_layers": 0},
    ),
    "glm5_next": (
        "Glm5NextTextConfig", "Glm5NextForConditionalGeneration",
        {**MLA, **KDA, "q_lora_rank": 16, "qk_rope_head_dim": 0, "head_dim": 0, "qk_nope_head_dim": 16,
         "layer_types": INDEXED, "n_routed_experts": 4, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 2048},
    ),
    "mamba2": (
        "Mamba2Config", "Mamba2ForCausalLM",
        {"state_size": 8, "head_dim": 16, "num_heads": 4, "expand": 2, "n_groups": 2, "chunk_size": 16},
    ),
    "bamba": ("BambaConfig", "BambaForCausalLM", {**SSM, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", {**SSM, "mamba_d_ssm": 64}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
        {**SSM, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
         "shared_intermediate_size": 16},
    ),
    "nemotron_h": (
        "NemotronHConfig", "NemotronHForCausalLM",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
         "n_groups": 2, "chunk_size": 16},
    ),
    "zamba2": (
        "Zamba2Config", "Zamba2ForCausalLM",
        {"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 16,
         "mamba_ngroups": 2, "chunk_size": 16, "num_mem_blocks": 1, "hybrid_layer_ids": [1]},
    ),
}  # fmt: skip
_ACCELERATED = ("fla", "causal_conv1d", "mamba_ssm")


def modeling(family: str) -> Any:
    """A family's modeling module over kernels in torch: it settles at import which ones it takes, and those of other
    packages run on no CPU."""
    name = f"transformers.models.{family}.modeling_{family}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "_in_torch", False):
        return known
    before = {package: sys.modules.get(package) for package in _ACCELERATED}
    sys.modules.pop(name, None)
    try:
        sys.modules.update(dict.fromkeys(_ACCELERATED))  # type: ignore[arg-type]
        module: Any = importlib.import_module(name)
    finally:
        for package, found in before.items():
            if found is None:
                del sys.modules[package]
            else:
                sys.modules[package] = found
    module._in_torch = True
    return module


def built(family: str, **over: Any) -> Any:
    """An evaluated model in float32, the same at every call, whose decays and answers differ from token to token."""
    config, name, own = BUILT[family]
    configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            given = {k: v for k, v in {**BASE, **own, **over}.items() if not (k == "layer_types" and v is None)}
            made = getattr(configs, config)(**given)
            if name.endswith("ForConditionalGeneration"):
                vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
                vision["out_hidden_size"] = made.hidden_size
                made = configs.Glm5NextConfig(text_config=made.to_dict(), vision_config=vision)
            model = getattr(modeling(family), name)(made).eval()
            _spread(model)
    finally:
        torch.set_default_dtype(before)
    return model


@torch.no_grad()
def _spread(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.uniform_(-5, -1)
        elif name.endswith("A_log"):
            parameter.uniform_(0, 2)
        elif parameter.isnan().any() or (parameter.abs() > 1e4).any():
            parameter.normal_(0, 0.02)
        elif parameter.dim() > 1 and not name.endswith("conv1d.weight"):
            parameter.mul_(4)  # of 0.02 answers of so narrow a model hardly differ
