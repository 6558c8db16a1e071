"""Memories that forget towards their start, and steps normalised by what writes do to one another: every engine against
the token loop, the token loop against a few lines of torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan, memory_step, named_rule, stepper
from hecate.engine import exact_engines
from hecate.errors import ConfigError

B, T, H, WIDTH = 2, 40, 2, 4
DEEP: dict[str, Any] = {
    "structure": {"kind": "mlp", "activation": "tanh", "last": 0.1},
    "step": "normalized",
    "retention": "decay",
    "state_dtype": "float64",
}
NORMED = {"kind": "mlp", "bias": True, "norm": "layer", "residual": True}
MOMENTUM = {"kind": "momentum", "dampening": True}
CASES: dict[str, dict[str, Any]] = {
    "gd": DEEP,
    "momentum": {**DEEP, "algorithm": MOMENTUM},
    "before the gradient": {**DEEP, "decay_order": "before_gradient"},
    "towards zero": {**DEEP, "retention": {"kind": "decay", "towards": "zero"}},
    "norm and bias": {**DEEP, "structure": NORMED},
    "gated": {**DEEP, "structure": "gated_mlp", "read": "before"},
    "raw": {**DEEP, "step": "raw", "algorithm": {"kind": "gd", "lr": 0.1}},
    "chunk": {**DEEP, "chunk": 8, "algorithm": MOMENTUM},
    "chunk, norm": {**DEEP, "chunk": 8, "structure": NORMED, "read": "before"},
    "longer than a block": {**DEEP, "chunk": 100},
    "one step a chunk": {**DEEP, "chunk": 6, "commit": "chunk", "algorithm": MOMENTUM},
    "one step a long chunk": {**DEEP, "chunk": 100, "commit": "chunk"},
    "built": {**DEEP, "chunk": 5, "retention": "l2", "bias": "huber"},
    "mirror": {**DEEP, "chunk": 5, "retention": "lq"},
    "linear": {"step": "normalized", "chunk": 8, "retention": "decay", "state_dtype": "float64"},
    "linear towards the start": {"retention": {"kind": "decay", "towards": "start"}, "state_dtype": "float64"},
}


class Inputs:
    """Tensors of one draw; masks where asked for."""

    def __init__(self, config: MemoryConfig, *, masked: bool, length: int = T) -> None:
        source = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source, dtype=torch.float64)

        def gate() -> Tensor:
            return torch.rand(B, length, H, generator=source, dtype=torch.float64)

        self.config, self.length = config, length
        self.tokens = [draw(B, length, H, WIDTH).requires_grad_() for _ in range(3)]
        lr, retain, momentum = gate(), 0.8 + 0.2 * gate(), gate()
        lr = 0.1 * lr if config.step == "raw" else lr
        used = (True, config.retention.uses_retain, config.algorithm.uses_momentum)
        self.gates = [
            item.requires_grad_() if own else None for item, own in zip((lr, retain, momentum), used, strict=True)
        ]
        shapes = config.structure.shapes(WIDTH, WIDTH)
        self.initial = {name: (0.5 * draw(H, *shape)).requires_grad_() for name, shape in shapes.items()}
        self.masks = {}
        if masked:
            self.masks["write_mask"] = torch.rand(B, length, generator=source) > 0.3
            self.masks["reset_mask"] = torch.rand(B, length, generator=source) > 0.9
        self.source = source

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.tokens, *[gate for gate in self.gates if gate is not None], *self.initial.values()]

    def run(self, cuts: tuple[int, ...] = (), **how: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and states, and gradients of a fixed sum of them."""
        state, outputs, borders = None, [], (0, *cuts, self.length)
        for at, end in pairwise(borders):
            q, k, v = (item[:, at:end] for item in self.tokens)
            gates = Gates(*(None if gate is None else gate[:, at:end] for gate in self.gates))
            masks = {name: mask[:, at:end] for name, mask in self.masks.items()}
            y, state = memory_scan(self.config, q, k, v, gates, state=state, initial=self.initial, **masks, **how)
            outputs.append(y)
        made = [torch.cat(outputs, 1), *state.memory.values(), *state.slots.values(), *state.pending.values()]
        source = torch.Generator().manual_seed(3)
        total = sum((x * torch.randn(x.shape, generator=source, dtype=x.dtype)).sum() for x in made)
        return made, list(torch.autograd.grad(total, self.leaves))


def same(found: tuple[list[Tensor], list[Tensor]], wanted: tuple[list[Tensor], list[Tensor]]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a - b).abs().max() <= 1e-10 * (1 + b.abs().max())


@pytest.mark.spec("RULE-STEP-D3", "RET-START-D2")
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("name", CASES)
def test_engines_and_pieces_agree_with_the_token_loop(name: str, masked: bool):
    config = MemoryConfig.model_validate(CASES[name])
    given = Inputs(config, masked=masked)
    wanted = given.run(engine="sequential", autodiff="torch")
    assert max(g.abs().max() for g in wanted[1]) > 1e-3
    assert all(torch.isfinite(item).all() for item in wanted[0])
    cuts = (3, 4, 20, 37)
    same(given.run(engine="sequential", autodiff="tape"), wanted)
    same(given.run(cuts, engine="sequential", autodiff="torch"), wanted)
    for engine in exact_engines(config, length=T, masked=masked):
        for autodiff in ("torch", "tape"):
            same(given.run(engine=engine, autodiff=autodiff), wanted)
        same(given.run(cuts, engine=engine), wanted)


@pytest.mark.spec("RULE-STEP-D3", "RET-START-D2", "ALG-MOM-D2")
def test_the_token_loop_is_the_formula():
    config = MemoryConfig.model_validate(CASES["momentum"])
    given = Inputs(config, masked=False, length=12)
    (y, w1_end, w2_end, *_), grads = given.run(engine="sequential", autodiff="torch")
    q, k, v = given.tokens
    lr, retain, momentum = given.gates
    start = [w.unsqueeze(0).expand(B, *w.shape) for w in given.initial.values()]
    (w1, w2), s1, s2, outputs = start, 0.0, 0.0, []
    for t in range(12):
        key, x = k[:, t].unsqueeze(-1), v[:, t].unsqueeze(-1)
        h = torch.tanh(w1 @ key)
        u = w2 @ h - x
        d1 = (1 - h.square()) * (w2.mT @ u)
        b1 = ((1 - h.square()).square().squeeze(-1) * w2.square().sum(-2)).sum(-1)
        bound = (b1 + 1e-6) * key.square().sum((-1, -2)) + (1 + 1e-6) * h.square().sum((-1, -2))
        m, r = momentum[:, t, :, None, None], retain[:, t, :, None, None]
        step = (lr[:, t] * (1 - momentum[:, t]) / (1e-2 + bound))[..., None, None]
        s1, s2 = m * s1 - step * d1 @ key.mT, m * s2 - step * u @ h.mT
        w1, w2 = start[0] + r * (w1 - start[0]) + s1, start[1] + r * (w2 - start[1]) + s2
        outputs.append((w2 @ torch.tanh(w1 @ q[:, t].unsqueeze(-1))).squeeze(-1))
    plain = torch.stack(outputs, 1)
    assert (y - plain).abs().max() <= 1e-12 * plain.abs().max()
    assert (w1_end - w1).abs().max() <= 1e-12
    assert (w2_end - w2).abs().max() <= 1e-12
    source = torch.Generator().manual_seed(3)
    made = (plain, w1, w2, s1, s2)
    total = sum((x * torch.randn(x.shape, generator=source, dtype=x.dtype)).sum() for x in made)
    for mine, theirs in zip(grads, torch.autograd.grad(total, given.leaves), strict=True):
        assert (mine - theirs).abs().max() <= 1e-10 * theirs.abs().max()


@pytest.mark.parametrize("name", ["momentum", "chunk", "one step a chunk", "linear"])
def test_one_token_at_a_time(name: str):
    config = MemoryConfig.model_validate(CASES[name])
    given = Inputs(config, masked=False)
    with torch.no_grad():
        wanted, end = memory_scan(
            config, *given.tokens, Gates(*given.gates), initial=given.initial, engine="sequential"
        )
        walk, held = None, stepper(config, initial=given.initial)
        for t in range(T):
            q, k, v = (item[:, t] for item in given.tokens)
            gates = Gates(*(None if gate is None else gate[:, t] for gate in given.gates))
            y, walk = memory_step(config, q, k, v, gates, state=walk, initial=given.initial)
            assert (y - wanted[:, t]).abs().max() <= 1e-12
            assert torch.equal(held(q, k, v, gates), y)
    for name, weight in end.memory.items():
        assert (weight - walk.memory[name]).abs().max() <= 1e-12


@pytest.mark.spec("RET-START-D2")
def test_all_forgotten_is_the_start():
    config = MemoryConfig.model_validate(DEEP)
    given = Inputs(config, masked=False)
    with torch.no_grad():
        _, state = memory_scan(config, *given.tokens, Gates(lr=0.0, retain=0.0), initial=given.initial)
        for name, weight in state.memory.items():
            assert torch.equal(weight, given.initial[name].expand_as(weight))
        _, state = memory_scan(config, *given.tokens, Gates(lr=0.5, retain=0.0), initial=given.initial)
    zero = config.model_copy(update={"retention": config.retention.model_copy(update={"towards": "zero"})})
    _, empty = memory_scan(zero, *given.tokens, Gates(lr=0.0, retain=0.0), initial=given.initial)
    assert all(not weight.any() for weight in empty.memory.values())


def test_what_is_left_out_and_what_is_refused():
    assert MemoryConfig(structure="mlp", retention="decay").retention.towards == "start"
    assert MemoryConfig(retention="decay").retention.towards is None
    assert not MemoryConfig(retention="decay").retention.anchored
    anchored = {"kind": "decay", "towards": "start"}
    for fields, sentence in (
        ({"bias": "dot", "feature_map": "elu", "normalizer": "sum"}, "no weighted sum"),
        ({"writes": 2}, "go back at each of them"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            MemoryConfig(retention=anchored, **fields)
    with pytest.raises(ConfigError, match="towards the start"):
        memory_scan(MemoryConfig(retention=anchored), *[torch.zeros(1, 2, 1, 4)] * 3, engine="parallel")
    with pytest.raises(ConfigError, match="dampening"):
        MemoryConfig(algorithm={"kind": "momentum", "dampening": True, "bounded": False})


@pytest.mark.spec("RULE-STEP-I3")
@pytest.mark.parametrize("stream", ["of many keys", "of one pair"])
@pytest.mark.parametrize("momentum", [None, 0.9], ids=["gd", "momentum"])
@pytest.mark.parametrize("chunk", [1, 16])
def test_no_stream_diverges(chunk: int, momentum: float | None, stream: str):
    """18 streams: keys of length .1, 1 and 6, values of .1, 1 and 20, starts of 1 and 5 times their draw. A raw step
    of .1 diverges in most of them. What the first chunk, which has no keys before it, may add to an error is lr times
    the sum of 1/t over its tokens; it must not grow beyond."""
    lr = 1.5
    algorithm = {"kind": "gd", "lr": lr}
    if momentum is not None:
        algorithm = {"kind": "momentum", "lr": lr, "momentum": momentum, "dampening": True}
    config = MemoryConfig(
        structure={"kind": "mlp", "activation": "tanh", "last": 0.1}, retention={"kind": "decay", "retain": 0.9999},
        algorithm=algorithm, step="normalized", chunk=chunk, on_nonfinite="propagate",
    )  # fmt: skip
    source = torch.Generator().manual_seed(0)
    unit = [torch.nn.functional.normalize(torch.randn(1, 600, 18, 16, generator=source), dim=-1) for _ in range(2)]
    if stream == "of one pair":
        unit = [item[:, :1].expand_as(item) for item in unit]
    sizes = torch.cartesian_prod(
        torch.tensor([0.1, 1.0, 6.0]), torch.tensor([0.1, 1.0, 20.0]), torch.tensor([1.0, 5.0])
    )
    k, v = unit[0] * sizes[:, :1], unit[1] * sizes[:, 1:2]
    initial = {name: w * sizes[:, 2, None, None] for name, w in config.structure.init(16, 16, heads=18).items()}
    with torch.no_grad():
        y, _ = memory_scan(config, k, k, v, initial=initial)
    error, before = (y - v).norm(dim=-1)[0, -100:].mean(0), (y - v).norm(dim=-1)[0, 0]
    transient = 1 + lr * sum(1 / t for t in range(1, chunk + 1))
    assert torch.isfinite(y).all()
    assert (error <= transient * torch.maximum(before, sizes[:, 1])).all()
    if stream == "of one pair":
        assert (error <= 0.5 * sizes[:, 1]).all()


@pytest.mark.spec("RULE-OLD-I1")
def test_configs_of_earlier_versions_keep_their_numbers():
    """As 0.2 wrote `titans` out, and a deep memory with step 'normalized'."""
    written = {
        "structure": {"kind": "mlp", "layers": 2, "expansion": 4, "activation": "silu", "residual": False,
                      "norm": "none", "norm_eps": 1e-6, "bias": False},
        "bias": {"kind": "l2"},
        "retention": {"kind": "decay", "retain": 0.99, "channels": False, "rank": None, "gate": "sigmoid"},
        "algorithm": {"lr": 0.01, "momentum": 0.9, "kind": "momentum", "nesterov": False, "bounded": True},
        "feature_map": {"kind": "identity"}, "gating": {"kind": "none"}, "readout": {"kind": "direct"},
        "chunk": 1, "writes": 1, "commit": "token", "read": "after", "decay_order": "with_step", "normalizer": "none",
        "key_norm": "l2", "query_scale": "none", "step": "raw", "state_dtype": "float32", "on_nonfinite": "raise",
    }  # fmt: skip
    config = MemoryConfig.model_validate(written)
    assert config.retention.towards == "zero"
    assert config.layer_v_norm == "none"
    assert not config.blocks
    assert not config.algorithm.dampens
    assert MemoryConfig.model_validate(config.model_dump()) == config
    old = MemoryConfig.model_validate({**written, "step": "normalized", "retention": {"kind": "none"}})
    assert old.step == "key_normalized"
    assert MemoryConfig.model_validate(old.model_dump()) == old
    # By hand, the recurrence of 0.2.
    given = Inputs(config.model_copy(update={"state_dtype": "float64"}), masked=False, length=6)
    (y, *_), _ = given.run(engine="sequential", autodiff="torch")
    q, k, v = given.tokens
    lr, retain, momentum = given.gates
    (w1, w2), s1, s2 = [w.unsqueeze(0).expand(B, *w.shape) for w in given.initial.values()], 0.0, 0.0
    for t in range(6):
        key, query = (torch.nn.functional.normalize(item[:, t], dim=-1).unsqueeze(-1) for item in (k, q))
        z = w1 @ key
        h, slope = torch.nn.functional.silu(z), torch.sigmoid(z) * (1 + z * (1 - torch.sigmoid(z)))
        u = w2 @ h - v[:, t].unsqueeze(-1)
        step, m, r = (item[:, t, :, None, None] for item in (lr, momentum, retain))
        s1, s2 = m * s1 - step * (slope * (w2.mT @ u)) @ key.mT, m * s2 - step * u @ h.mT
        w1, w2 = r * w1 + s1, r * w2 + s2
        answer = (w2 @ torch.nn.functional.silu(w1 @ query)).squeeze(-1)
        assert (y[:, t] - answer).abs().max() <= 1e-12
    new = named_rule("titans")
    assert MemoryConfig.model_validate(new.model_dump()) == new
    assert MemoryConfig.model_validate(new.model_dump(mode="json")) == new
