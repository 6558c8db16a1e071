"""Additions of training to the optimisers by kind: torch's own, and a fallback for what a kind does not train.

They train the parameters of a model, not its memories. Learning rate and weight decay are those of `OptimConfig`,
whatever the kind.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from hecate import optim
from hecate.errors import ConfigError
from hecate.optim.options import Group, Named, OptimizerKind, Positive, Share
from hecate.variant import Conflicts


class AdamW(OptimizerKind):
    r"""adamw: w <- (1 - lr weight_decay) w - lr m^ / (sqrt(v^) + eps).

    m and v average gradients and their squares at the rates `betas`; ^ divides by 1 - beta^t. On a CPU torch's fused
    form steps, in a quarter of the time.

    Formula: $m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t,\quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2$
    $w_t = (1 - \eta \lambda) w_{t-1} - \eta\, \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \varepsilon}$
    References: Loshchilov and Hutter, Decoupled weight decay regularization, 2019, arXiv 1711.05101. [TRAIN-OPTIM-D1]
    """

    kind: Literal["adamw"] = "adamw"
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.95)
    eps: Positive = 1e-8
    factory = torch.optim.AdamW

    def build(self, model: nn.Module, groups: list[Group], lr: float) -> torch.optim.Optimizer:
        """The optimiser of these groups of a model, fused where all are whole tensors on a CPU."""
        every = [p for group in groups for p in group["params"]]
        fused = all(p.is_cpu and p.is_floating_point() and not hasattr(p, "device_mesh") for p in every)
        return torch.optim.AdamW(groups, lr=lr, betas=self.betas, eps=self.eps, fused=True if fused and every else None)


class SGD(OptimizerKind):
    r"""sgd: m <- momentum m + g + weight_decay w, w <- w - lr m.

    `torch.optim.SGD`, whose decay passes through the momentum. `nesterov` moves by g + momentum m.

    Formula: $m_t = \mu m_{t-1} + g_t + \lambda w_{t-1},\quad w_t = w_{t-1} - \eta m_t$
    References: B. Polyak, Some methods of speeding up the convergence of iteration methods, 1964. [TRAIN-OPTIM-D2]
    """

    kind: Literal["sgd"] = "sgd"
    momentum: Share = 0.9
    nesterov: bool = False
    factory = torch.optim.SGD

    def conflicts(self) -> Conflicts:
        """Nesterov's step without momentum."""
        if self.nesterov and not self.momentum:
            yield ("nesterov",), "needs momentum above 0; give one or leave it out"


class PartialKind(OptimizerKind):
    """An optimiser of some parameters; every other is trained by `fallback`, at the same lr."""

    fallback: OptimizerKind
    about: ClassVar[str]  # the parameters that it trains

    @field_validator("fallback")
    @classmethod
    def _takes_any_parameter(cls, fallback: OptimizerKind) -> OptimizerKind:
        if isinstance(fallback, PartialKind):
            given = f"{fallback.kind!r}, which trains {fallback.about}"
            raise ConfigError(f"must be a kind for any parameter, got {given}; take adamw")
        return fallback


class DGD(PartialKind, optim.DGD.Options):
    r"""dgd: w <- w ((1 - lr weight_decay) I - c x x^T) - c g x^T, c = lr / (1 + lr |x|^2).

    `hecate.optim.DGD`, attached to the model, for the weights of Linear layers that nothing else uses, but for the
    output layer; `fallback` is what it documents for others, plain descent. Samples follow clipping.

    Formula: $w_t = w_{t-1} \left((1 - \eta \lambda) I - c\, x x^\top\right) - c\, g x^\top,\quad c = \frac{\eta}{1 +
    \eta \Vert x \Vert^2}$
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 57. [TRAIN-OPTIM-D6]
    """

    kind: Literal["dgd"] = "dgd"
    fallback: OptimizerKind = SGD(momentum=0.0)
    factory = optim.DGD
    windowed = False
    about = "the weights of Linear layers"

    def trains(self, model: nn.Module) -> Named:
        """Weights of Linear layers that no other module has."""
        users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
        layers = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
        named, outer = super().trains(model), outer_layers(model)
        inner = [(n, p) for n, p in named if id(p) in layers and id(p) not in outer]
        return [(n, p) for n, p in inner if users[id(p)] == 1]

    def build(self, model: nn.Module, groups: list[Group], lr: float) -> torch.optim.Optimizer:
        """Attached to the model; a period is refused."""
        for group in groups:
            if group.get("period", 1) > 1:
                raise ConfigError(
                    "'dgd' steps by the samples of one backward pass, and optim.periods collects "
                    f"those of {group['period']} for {group['param_names'][0]!r}; leave it at 1"
                )
        bare = [{k: v for k, v in group.items() if k != "period"} for group in groups]
        made = optim.DGD(bare, lr, rescaled="follow", **self.options())
        made.attach(model)
        return made


class MatrixKind(PartialKind):
    """An optimiser of matrices between the embedding, with what is tied to it, and `head.*`.

    `match_rms_adamw` makes steps as long as AdamW's, so that one lr serves both.
    """

    fallback: OptimizerKind = AdamW()
    adjust_lr_fn: Literal["original", "match_rms_adamw", "none"] = "match_rms_adamw"
    about = "matrices between the embedding and the output layer"

    def trains(self, model: nn.Module) -> Named:
        """The parameters that are neither vectors nor of outer layers, by name."""
        named, outer = super().trains(model), outer_layers(model)
        return [(n, p) for n, p in named if not (is_vector(n, p) or id(p) in outer)]


class M3(MatrixKind, optim.M3.Options):
    r"""m3: w <- (1 - lr weight_decay) w - lr a (NS(m1) + slow NS(m2)), m2 moved once a slow_period.

    `hecate.optim.M3`, which says what its options mean, for what `MatrixKind` trains.

    Formula: $m_t = \mu m_{t-1} + (1 - \mu) g_t,\quad n_T = \mu_s n_{T-1} + (1 - \mu_s)\, \mathrm{mean}(g) \ \text{once
    a slow period}$
    $w_t = (1 - \eta \lambda) w_{t-1} - \eta\, a \left(\mathrm{NS}(m_t) + \mathrm{slow}\, \mathrm{NS}(n_T)\right)$
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Algorithm 1. [TRAIN-OPTIM-D3]
    """

    kind: Literal["m3"] = "m3"
    factory = optim.M3


class Muon(MatrixKind, optim.Muon.Options):
    r"""muon: m <- momentum m + (1 - momentum) g, w <- (1 - lr weight_decay) w - lr a NS(u).

    `hecate.optim.Muon`, which says what its options mean, for what `MatrixKind` trains.

    Formula: $m_t = \mu m_{t-1} + (1 - \mu) g_t,\quad w_t = (1 - \eta \lambda) w_{t-1} - \eta\, a\, \mathrm{NS}(\mu m_t
    + (1 - \mu) g_t)$
    References: Muon (Jordan et al., 2024); Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 42.
    [TRAIN-OPTIM-D3]
    """

    kind: Literal["muon"] = "muon"
    factory = optim.Muon


def is_vector(name: str, p: Tensor) -> bool:
    """True if a parameter is a vector by shape, or by name: norms and biases per head are matrices."""
    return p.dim() < 2 or name.rsplit(".", 1)[-1] in ("norm", "bias")


def outer_layers(model: nn.Module) -> set[int]:
    """Embeddings with what is tied to them, and the output layer, by identity."""
    found = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    # A model of transformers, which may lie within another module, tells its own.
    parts: list[Any] = [m for m in model.modules() if hasattr(m, "get_output_embeddings")]
    heads = [part.get_output_embeddings() for part in parts]
    found |= {id(p) for head in heads if isinstance(head, nn.Module) for p in head.parameters()}
    return found | {id(p) for n, p in model.named_parameters() if n.startswith("head.")}
