"""The optimisers of a training run, by kind: fields are hyperparameters, `build` the optimiser.

They train the parameters of a model, not its memories. Learning rate and weight decay are those of `OptimConfig`,
whatever the kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import nn

from hecate import optim
from hecate.errors import ConfigError
from hecate.phi import FeatureMap, Identity
from hecate.sizes import Count, Size
from hecate.train.optimiser_kind import Group, Named, OptimizerKind, PartialKind, is_vector, outer_layers

Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
View = Literal["flatten", "last"]
Scale = Literal["none", "rms", "unit"]
Polynomial = Literal["quintic", "cubic"]
AdjustLr = Literal["original", "match_rms_adamw", "none"]
Precision = Literal["bfloat16", "float16", "float32", "float64"]


class AdamW(OptimizerKind):
    """adamw: w <- (1 - lr weight_decay) w - lr m^ / (sqrt(v^) + eps).

    m and v average gradients and their squares at the rates `betas`; ^ divides by 1 - beta^t.

    References: Loshchilov and Hutter, Decoupled weight decay regularization, 2019, arXiv 1711.05101. [TRAIN-OPTIM-D1]
    """

    kind: Literal["adamw"] = "adamw"
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.95)
    eps: Positive = 1e-8
    factory: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.AdamW


class SGD(OptimizerKind):
    """sgd: m <- momentum m + g + weight_decay w, w <- w - lr m.

    `torch.optim.SGD`, whose decay passes through the momentum. `nesterov` moves by g + momentum m.

    References: B. Polyak, Some methods of speeding up the convergence of iteration methods, 1964. [TRAIN-OPTIM-D2]
    """

    kind: Literal["sgd"] = "sgd"
    momentum: Share = 0.9
    nesterov: bool = False
    factory: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.SGD

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ConfigError("needs momentum above 0; give one or leave it out", ("nesterov",))
        return self


class PhiMomentum(OptimizerKind):
    """phi_momentum: m <- momentum m + P phi~(g), w <- (1 - lr weight_decay) w - lr m.

    `hecate.optim.PhiMomentum`, which says what its options mean.

    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 51. [OPT-PHI-D1]
    """

    kind: Literal["phi_momentum"] = "phi_momentum"
    momentum: Share = 0.9
    feature_map: FeatureMap = Identity()
    lift: Literal["auto", "identity", "vjp", "pinv", "learned", "prefix"] = "auto"
    center: bool = True
    odd: bool | None = None
    form: Literal["torch", "hope"] = "torch"
    space: Literal["weight", "phi"] = "weight"
    input_scale: Scale | Literal["auto"] = "auto"
    precondition: Literal["diagonal", "kronecker"] | None = None
    orthogonalize: bool = False
    guard: Literal["none", "skip", "flip"] = "none"
    nesterov: bool = False
    dampening: Share = 0.0
    decoupled: bool = True
    phi_lr: NonNegative = 0.0
    forget: Share = 0.99
    ridge: NonNegative | None = None
    max_decode_error: NonNegative = 0.8
    retain: Share = 0.99
    eps: Positive = 1e-8
    seed: int = Field(0, ge=0, lt=1 << 63)
    matrix: View = "flatten"
    factory: ClassVar[Callable[..., torch.optim.Optimizer]] = optim.PhiMomentum


class KernelMomentum(OptimizerKind):
    """kernel_momentum: S <- momentum S + sum_j g_j phi~(g_j)^T, w_j <- w_j - lr S phi~(g_j).

    `hecate.optim.KernelMomentum`, which says what its options mean.

    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eqs. 50 and 51. [OPT-KERNEL-D1]
    """

    kind: Literal["kernel_momentum"] = "kernel_momentum"
    momentum: Share = 0.9
    feature_map: FeatureMap = Identity()
    center: bool = True
    keys: Literal["columns", "rows"] = "columns"
    odd: bool | None = None
    input_scale: Literal["none", "rms", "unit"] = "unit"
    seed: int = Field(0, ge=0, lt=1 << 63)
    matrix: View = "flatten"
    factory: ClassVar[Callable[..., torch.optim.Optimizer]] = optim.KernelMomentum


class DeltaMomentum(OptimizerKind):
    """delta_momentum: m <- m (momentum I - c g^T g) + g, w <- (1 - lr weight_decay) w - lr m.

    `hecate.optim.DeltaMomentum`, which says what its options mean.

    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eqs. 48 and 49. [TRAIN-OPTIM-D2]
    """

    kind: Literal["delta_momentum"] = "delta_momentum"
    momentum: Share = 0.9
    erase: NonNegative | Literal["lr"] = 1.0
    reading: Literal["matrix", "rows", "scalar"] = "matrix"
    form: Literal["stable", "hope"] = "stable"
    beyond: Literal["raise", "warn"] = "raise"
    orthogonalize: bool = False
    matrix: View = "flatten"
    factory: ClassVar[Callable[..., torch.optim.Optimizer]] = optim.DeltaMomentum


class DeepMomentum(OptimizerKind):
    """deep_momentum: w <- (1 - lr weight_decay) w + lr NS m(g), m <- momentum m - c grad ell(m; g).

    `hecate.optim.DeepMomentum`, which says what its options mean.

    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 50.
    [TRAIN-OPTIM-D2]
    """

    kind: Literal["deep_momentum"] = "deep_momentum"
    momentum: Share = 0.9
    width: Size = Field(32, ge=1)
    rate: NonNegative = 0.1
    shared: bool = False
    objective: Literal["descent", "paper"] = "descent"
    input_scale: Literal["rms", "none"] | None = None
    orthogonalize: bool | None = None
    matrix: View = "flatten"
    factory: ClassVar[Callable[..., torch.optim.Optimizer]] = optim.DeepMomentum


class DGD(PartialKind):
    """dgd: w <- w ((1 - lr weight_decay) I - c x x^T) - c g x^T, c = lr / (1 + lr |x|^2).

    `hecate.optim.DGD`, attached to the model, for the weights of Linear layers that nothing else uses, but for the
    output layer; `fallback` is what it documents for others, plain descent. Samples follow clipping.

    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 57. [TRAIN-OPTIM-D6]"""

    kind: Literal["dgd"] = "dgd"
    fallback: OptimizerKind = SGD(momentum=0.0)
    batch: Literal["mean", "sequential"] = "mean"
    reduction: Literal["mean", "sum"] = "mean"
    factory: ClassVar[Callable[..., torch.optim.Optimizer]] = optim.DGD
    about: ClassVar[str] = "the weights of Linear layers"

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
    ns_coefficients: Polynomial = "quintic"
    ns_steps: int = Field(5, ge=1, le=99)
    ns_dtype: Precision | None = None
    eps: Positive = 1e-7
    adjust_lr_fn: AdjustLr = "match_rms_adamw"
    matrix: View = "flatten"
    about: ClassVar[str] = "matrices between the embedding and the output layer"

    def trains(self, model: nn.Module) -> Named:
        """What is neither a vector nor an outer layer."""
        named, outer = super().trains(model), outer_layers(model)
        return [(n, p) for n, p in named if not (is_vector(n, p) or id(p) in outer)]


class M3(MatrixKind):
    """m3: w <- (1 - lr weight_decay) w - lr a (NS(m1) + slow NS(m2)), m2 moved once a slow_period.

    `hecate.optim.M3`, which says what its options mean.

    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Algorithm 1. [TRAIN-OPTIM-D3]
    """

    kind: Literal["m3"] = "m3"
    momentum: Share = 0.95
    slow_momentum: Share = 0.9
    slow: NonNegative = 0.5
    slow_period: Count = Field(8, ge=1)
    accumulate: Literal["sum", "ema_mean", "ema_last"] = "ema_mean"
    second_moment: Literal["none", "before", "after"] = "none"
    retain: Share = 0.99
    factory: ClassVar[Callable[..., torch.optim.Optimizer]] = optim.M3


class Muon(MatrixKind):
    """muon: m <- momentum m + (1 - momentum) g, w <- (1 - lr weight_decay) w - lr a NS(u).

    `hecate.optim.Muon`, which says what its options mean.

    References: Muon (Jordan et al., 2024); Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 42.
    [TRAIN-OPTIM-D3]
    """

    kind: Literal["muon"] = "muon"
    momentum: Share = 0.95
    nesterov: bool = True
    factory: ClassVar[Callable[..., torch.optim.Optimizer]] = optim.Muon
