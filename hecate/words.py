"""Names used elsewhere, and what they are called here: for error messages alone."""

from __future__ import annotations

from collections.abc import Mapping

_HEADS = ("heads", "num_heads")
_WIDTH = ("d_model", "embed_dim", "hidden_size")
_LAYERS = ("layers", "num_layers")
_KEY = ("d_head", "d_key")
_STATE = ("state",)

MEANT: Mapping[str, tuple[str, ...]] = {
    # sizes
    **dict.fromkeys(("n_heads", "num_heads", "n_head", "nhead", "num_attention_heads"), _HEADS),
    **dict.fromkeys(("dim", "embed_dim", "hidden_size", "hidden_dim", "n_embd", "d_embed"), _WIDTH),
    **dict.fromkeys(("n_layers", "num_layers", "n_layer", "depth", "num_hidden_layers"), _LAYERS),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "key_dim", "head_k_dim"), _KEY),
    **dict.fromkeys(("value_dim", "head_v_dim"), ("d_value",)),
    **dict.fromkeys(("num_features", "n_features", "nb_features"), ("d_phi", "num_features")),
    **dict.fromkeys(("chunk_size", "chunk_len"), ("chunk",)),
    # arguments
    **dict.fromkeys(("phi", "kernel", "kernel_fn", "feature_fn"), ("feature_map",)),
    **dict.fromkeys(("rule", "cfg", "memory_config"), ("config",)),
    **dict.fromkeys(("past_key_values", "cache", "initial_state", "hidden_state", "memory_state"), _STATE),
    **dict.fromkeys(("input_ids", "ids"), ("tokens",)),
    **dict.fromkeys(("hidden_states", "inputs", "input"), ("x",)),
    **dict.fromkeys(("alpha", "forget", "forget_gate"), ("retain", "decay")),
    **dict.fromkeys(("learning_rate", "step_size", "eta", "theta"), ("lr",)),
    **dict.fromkeys(("betas", "mu"), ("momentum",)),
    **dict.fromkeys(("lr", "erase"), ("gates",)),
    "retain": ("gates", "decay"),
    "momentum": ("gates",),
    # kinds and rules
    **dict.fromkeys(("rff", "fourier", "random_features"), ("random_fourier",)),
    **dict.fromkeys(("mse", "squared", "l2_loss"), ("l2",)),
    **dict.fromkeys(("deltanet", "delta_rule", "delta_net"), ("delta", "l2")),
    **dict.fromkeys(("gated_deltanet", "gdn"), ("gated_delta",)),
    **dict.fromkeys(("feature_map", "feature_maps", "map", "maps"), ("phi",)),
    "linear": ("matrix",),
    "muon": ("newton_schulz",),
    "performer": ("favor",),
    "linear_transformer": ("linear_attention",),
    "mamba": ("mamba2",),
    "rwkv": ("rwkv7",),
    "lact": ("large_chunk_ttt",),
}
"""By a word from elsewhere, ours; the first that exists where it was written is meant."""

_MASK = "Padding is write_mask, bool [B, T], True for tokens that are written: attention_mask.bool()."
_LOSS = (
    "A model gives logits; the loss is torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "
    "labels shifted by one."
)
_LAYER = "Heads and widths are the layer's: Memory(d_model, heads, config)."
ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("attention_mask", "mask", "padding_mask", "key_padding_mask", "attn_mask"), _MASK),
    **dict.fromkeys(("labels", "targets"), _LOSS),
    **dict.fromkeys(("heads", "d_model"), _LAYER),
    "engine": "hecate takes the fastest engine that is exact; `hecate show FILE --engine` says which and why.",
    "batch_first": "x is [B, T, d_model], batch first, in every layer.",
    "dropout": "Memories drop nothing; put nn.Dropout around the layer.",
    "beta": "What papers call beta is lr in a rule and momentum in an optimiser.",
}
"""By a word that has no name of ours, what to write instead."""
