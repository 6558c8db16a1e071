"""A bias of one's own in the kernels of the compiled engine: printed from its torch formula, with the token loop's
numbers, derivatives by hand or not."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan
from hecate.activation import Activation
from hecate.bias import Bias
from hecate.engine import Plan, choose, explain
from hecate.errors import ConfigError
from hecate.formula import bias_formula
from hecate.structure import MLP
from tests.engine.own_biases import Least, LossAlone, Mean, Pinball, Sorted, Together

pytest.importorskip("numba")
rows = pytest.importorskip("hecate.engine.cpu.rows")


class Softsign(Activation):
    """printed_softsign: act(x) = a x / (1 + |x|), and nothing else."""

    kind: Literal["printed_softsign"] = "printed_softsign"
    a: float = 1.5

    def value(self, x: Tensor) -> Tensor:
        return self.a * x / (1 + x.abs())


class Mixed(Activation):
    """printed_mixed: x less its mean, which is no function of a coordinate."""

    kind: Literal["printed_mixed"] = "printed_mixed"

    def value(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


# They are passed as values: tests of all known kinds need not know them.
for act in (Softsign, Mixed):
    del Activation._registry[act.model_fields["kind"].default]


def scanned(config: MemoryConfig, engine: str, width: int = 6, keys: int = 3) -> list[Tensor]:
    """Outputs, final weights and gradients, with masks and resets."""
    source = torch.Generator().manual_seed(0)
    shape = (2, 70, 2)
    leaves = [torch.randn(*shape, size, generator=source, dtype=torch.float64) for size in (keys, keys, width)]
    leaves += [0.6 * torch.rand(shape, generator=source, dtype=torch.float64) for _ in range(2)]
    leaves = [item.requires_grad_() for item in leaves]
    q, k, v, lr, retain = leaves
    momentum = {"momentum": torch.full(shape, 0.4, dtype=torch.float64)} if config.algorithm.uses_momentum else {}
    masks = {
        name: torch.rand(2, 70, generator=source) < share for name, share in (("write_mask", 0.8), ("reset_mask", 0.05))
    }
    y, state = memory_scan(config, q, k, v, Gates(lr, 0.6 + 0.6 * retain, **momentum), engine=engine, **masks)
    outputs = [y, *state.memory.values()]
    total = sum((item * torch.randn(item.shape, generator=source, dtype=item.dtype)).sum() for item in outputs)
    return [*outputs, *torch.autograd.grad(total, leaves)]


OWN = [LossAlone(), LossAlone(scale=0.2), Pinball(), Together(), Mean(), Least()]


def config_of(bias: Bias, **fields: Any) -> MemoryConfig:
    return MemoryConfig(bias=bias, retention="decay", key_norm="l2", state_dtype="float64", **fields)


@pytest.mark.parametrize(("engine", "structure"), [("compiled", "matrix"), ("compiled_layers", "gated_mlp")])
@pytest.mark.parametrize("at", range(len(OWN)), ids=[str(bias) for bias in OWN])
@pytest.mark.spec("ENG-FORMULA-D1")
def test_an_own_bias_has_the_numbers_of_the_token_loop(at, engine, structure):
    bias, algorithm = OWN[at], ("gd", "momentum")[(at + (engine == "compiled")) % 2]
    config = config_of(bias, algorithm=algorithm, structure=structure)
    assert choose(Plan.sketch(config, length=64)).name == engine
    for found, expected in zip(scanned(config, engine), scanned(config, "sequential"), strict=True):
        # 70 tokens, each of which may amplify a rounding a few times
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.spec("ENG-FORMULA-D1")
def test_what_cannot_be_printed_is_refused_in_a_sentence_and_runs_in_torch():
    reason = r"'printed_sorted' as configured has no kernel: aten\.sort has no kernel form"
    for engine, structure in (("compiled", "matrix"), ("compiled_layers", "gated_mlp")):
        config = config_of(Sorted(), structure=structure)
        with pytest.raises(ConfigError, match=reason):
            choose(Plan.sketch(config, length=64), engine)
        assert explain(Plan.sketch(config, length=64))[0] != engine
    assert all(bool(item.isfinite().all()) for item in scanned(config, "auto"))


@pytest.mark.spec("ENG-FORMULA-D1")
def test_an_own_activation_has_the_numbers_of_the_token_loop():
    config = config_of(LossAlone(), structure=MLP(expansion=2, activation=Softsign()))
    assert choose(Plan.sketch(config, length=64)).name == "compiled_layers"
    for found, expected in zip(scanned(config, "compiled_layers"), scanned(config, "sequential"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    with pytest.raises(ConfigError, match="structure: activation 'printed_mixed': .*needs the whole row"):
        config_of(LossAlone(), structure=MLP(expansion=2, activation=Mixed()))


@pytest.mark.spec("ENG-FORMULA-D2")
def test_another_number_is_the_same_part():
    (one, first, *_), (other, second, *_) = (rows.part(bias_formula(LossAlone(scale=a))) for a in (0.2, 3.0))
    assert one == other
    assert first != second
    assert rows.part(bias_formula(Pinball()))[0] != one
