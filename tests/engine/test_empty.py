"""No tokens, no sequences, no heads: gradients of 0 and states of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hecate import Gates, MemoryConfig, memory_scan, memory_step
from hecate.cms import CMS, CMSConfig, SelfReferenceConfig, SelfReferential
from hecate.models import LanguageModel, LanguageModelConfig
from hecate.nn import Composed, LinearAttention, Memory, PerformerAttention, SlidingAttention

CONFIGS = {
    "delta": {},
    "titans": {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"},
    "normalised": {"bias": "dot", "feature_map": "elu", "normalizer": "sum"},
    "chunk": {"chunk": 3, "commit": "chunk", "retention": "decay"},
    "deep": {"structure": "mlp"},
    "mapped": {"feature_map": {"kind": "linear", "d_phi": 4}},
    "placed": {"feature_map": {"kind": "cosformer", "max_length": 9}},
}
LEVELS = [{"name": "a", "period": 1}, {"name": "b", "period": 4}]
LAYERS = {
    "memory": lambda: Memory(8, 2),
    "features": lambda: Memory(8, 2, feature_memory=MemoryConfig()),
    "chunk": lambda: Memory(8, 2, MemoryConfig(**CONFIGS["chunk"]), conv_kernel=0),
    "sequential levels": lambda: CMS(8, 2, CMSConfig(levels=LEVELS)),
    "nested levels": lambda: CMS(8, 2, CMSConfig(levels=LEVELS, composition="nested")),
    "self-referential": lambda: SelfReferential(8, 2),
    "boxes in chunks": lambda: SelfReferential(8, 2, SelfReferenceConfig(chunk=2)),
    "boxes of two passes": lambda: SelfReferential(8, 2, SelfReferenceConfig(memory="trellis")),
    "angles": lambda: Memory(8, 2, "mamba3"),
    "solved": lambda: Memory(8, 2, "gated_mesa"),
    "slots": lambda: Memory(8, 2, "gsa"),
    "projected": lambda: Memory(8, 2, query_projection="orthogonal"),
    "a tree of levels": lambda: CMS(8, 2, CMSConfig(levels=LEVELS[:1], composition="carry")),
    "segments": lambda: Composed(8, 2, {"kind": "mac", "segment": 3}, Memory(8, 2, "gated_delta")),
    "linear": lambda: LinearAttention(8, 2),
    "both sides": lambda: LinearAttention(8, 2, causal=False),
    "performer": lambda: PerformerAttention(8, 2),
    "sliding": lambda: SlidingAttention(8, 2, window=4, persistent=2),
}


def tensors(state: object) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(state)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]


def same_and_apart(state: object, after: object) -> None:
    for given, returned in zip(tensors(state), tensors(after), strict=True):
        assert torch.equal(given, returned)
        assert given.untyped_storage().data_ptr() != returned.untyped_storage().data_ptr()


@pytest.mark.spec("ENG-SCAN-I2")
@pytest.mark.parametrize("autodiff", ["tape", "torch"])
@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 4, 3), (2, 4, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_scan_of_nothing(name, shape, autodiff):
    config = MemoryConfig(**CONFIGS[name])
    q, k, v = (torch.randn(*shape, 4).requires_grad_() for _ in range(3))
    lr = torch.rand(shape).requires_grad_()
    params = config.feature_map.init(4, heads=max(shape[2], 1), generator=torch.Generator())
    learned = [tensor.requires_grad_() for tensor in params["learned"].values()]
    width = config.feature_map.output_dim(4)
    weights = config.structure.init(width, 4, heads=shape[2], generator=torch.Generator())
    weights = {n: w.double().detach().requires_grad_() for n, w in weights.items()}
    leaves = [q, k, v, lr, *learned, *weights.values()]
    how = {"phi_params": params, "initial": weights, "autodiff": autodiff}
    y, state = memory_scan(config, q, k, v, Gates(lr), **how)
    assert y.shape == v.shape
    for grad in torch.autograd.grad(y.sum(), leaves, retain_graph=True):
        assert not grad.any()
    if shape[1] == 0:
        _, after = memory_scan(config, q, k, v, Gates(lr), **how, state=state)
        same_and_apart(state, after)
        # What the state holds is a function of where it started.
        held = sum(item.sum() for item in state.memory.values())
        torch.autograd.grad(held, list(weights.values()))


@pytest.mark.spec("ENG-SCAN-I2")
def test_keys_of_no_numbers():
    keys = torch.zeros(1, 20, 1, 0)
    y, _ = memory_scan(MemoryConfig(bias="huber"), keys, keys, torch.randn(1, 20, 1, 3))
    assert not y.any()


@pytest.mark.spec("ENG-SCAN-I2")
def test_a_step_of_no_sequences():
    x = torch.randn(0, 2, 3).requires_grad_()
    for fields in CONFIGS.values():
        config = MemoryConfig(**fields)
        if config.feature_map.kind != "identity":
            continue
        y, state = memory_step(config, x, x, x, Gates(torch.ones(0, 2)))
        _, after = memory_step(config, x, x, x, state=state)
        assert y.shape == x.shape and after.position.shape == (0, 2)
        assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@pytest.mark.spec("ENG-SCAN-I2")
@pytest.mark.filterwarnings("ignore::hecate.errors.StabilityWarning")
@pytest.mark.parametrize("shape", [(2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_over_nothing(name, shape):
    layer = LAYERS[name]()
    x = torch.randn(*shape, 8).requires_grad_()
    y, state = layer(x)
    y.sum().backward()
    trained(layer)
    assert x.grad is not None
    if shape[1] == 0:
        same_and_apart(state, layer(x, state)[1])
        _, state = layer(torch.randn(2, 4, 8))
        same_and_apart(state, layer(x, state)[1])


def test_a_language_model_over_nothing():
    model = LanguageModel(LanguageModelConfig(vocab_size=7, d_model=8, heads=2, layers=1))
    for shape in ((2, 0), (0, 3)):
        model.zero_grad()
        logits, state = model(torch.zeros(shape, dtype=torch.int64))
        logits.sum().backward()
        trained(model)
        if shape[1] == 0:
            same_and_apart(state, model(torch.zeros(shape, dtype=torch.int64), state)[1])


def trained(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_a_segment_that_goes_on_has_a_start_of_its_own():
    layer = LAYERS["segments"]()
    _, state = layer(torch.randn(2, 1, 8))
    _, after = layer(torch.randn(2, 1, 8), state)
    for given, returned in zip(tensors(state.start), tensors(after.start), strict=True):
        assert torch.equal(given, returned)
        assert given.untyped_storage().data_ptr() != returned.untyped_storage().data_ptr()


@pytest.mark.parametrize("commit", ["token", "chunk"])
def test_what_no_token_has_changed_is_a_copy(commit):
    """The anchor of an unfinished chunk, and the memory before the chunk's commit."""
    config = MemoryConfig(chunk=4, commit=commit, retention="decay", state_dtype="float64")
    x = torch.ones(1, 1, 2, 3)
    _, state = memory_scan(config, x, x, x)
    for engine in ("sequential", "chunk"):
        _, later = memory_scan(config, x, x, x, state=state, engine=engine)
        before = {item.untyped_storage().data_ptr() for item in (*state.memory.values(), *state.anchor.values())}
        for item in (*later.memory.values(), *later.anchor.values(), *later.pending.values()):
            assert item.untyped_storage().data_ptr() not in before
