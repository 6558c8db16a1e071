"""Momentum that is a small network of its own."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate import algorithm
from hecate.checks import Size
from hecate.optim.base import MatrixOptimizer, State, put
from hecate.optim.muon import orthogonalised, settings
from hecate.optim.options import Group, MatrixView, NonNegative, OptimizerKind, Share
from hecate.optim.tensors import Bulk, as_matrix, grouped, largest, outline, state_dtype, together

CHANGE, OUT = "w_in", "w_out"


class DeepMomentum(MatrixOptimizer):
    """deep_momentum: w <- (1 - lr weight_decay) w + lr NS m(g), m <- momentum m - c grad ell(m; g).

    The momentum is the network m(u) = W_2 tanh(W_1 u) of the memories' `deep_momentum`, on rows of the gradient,
    trained by one explicit step before it is read: `objective="descent"` teaches it -g with c = rate / (1 + rate B), B
    a bound of its curvature, so that no gradient makes it overshoot; `"paper"` is the printed ell = <m(g), 1> with c =
    rate, whose direction does not depend on the sign of g. It starts at a fixed draw for W_1 and at W_2 = 0; `momentum`
    decays the distance from there. The loss is the sum over rows.

    input_scale: `rms` (the default of `descent`) divides the gradient by the root mean square of its rows that are not
    zero (`shared`: of all of them). A gradient of length s teaches m only s^2 as fast and is answered s times as long:
    without it steps shrink like s^3, and a model whose gradients are small stands still. With it B is of the order of
    rows times width, c close to 1/B.
    orthogonalize: Newton-Schulz on m'(g), eq. 52 (the default of `descent`); True, False, or fields of its algorithm.
    Of a direction that has the share v of the rows' power m answers less than about v / (v + 1 - momentum), so without
    it only the strongest direction moves. Steps are as long as those of `Muon` with adjust_lr_fn="none", lr alike.
    shared: one network for all rows of one width in a group, trained on those of this step together; every parameter of
    that width keeps a copy, also without a gradient. Else one each.
    width: hidden units, and the most directions that an answer has. rate: step size of the network.

    Shapes: gradient `[r, c]`; state W_1 minus its start `[width, c]`, W_2 `[c, width]`.
    Cost: 10 r c width. Sharded parameters are gathered.
    Warning: eq. 50 alone, `objective="paper"`, or `descent` with `input_scale="none"` and `orthogonalize=False`, trains
    slowly or not at all.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 50. [OPT-DEEP-D1]
    """

    class Options(OptimizerKind):
        """Fields of a file, and arguments of the constructor."""

        kind: Literal["deep_momentum"] = "deep_momentum"
        momentum: Share = 0.9
        width: Size = Field(32, ge=1)
        rate: NonNegative = 0.1
        shared: bool = False
        objective: Literal["descent", "paper"] = "descent"
        input_scale: Literal["rms", "none"] | None = None
        orthogonalize: bool | None = None
        matrix: MatrixView = "flatten"

    class Extras(MatrixOptimizer.Extras):
        """Arguments of the constructor alone, or of wider types there."""

        orthogonalize: Any = None

    positional = ("lr", "momentum", "width", "rate")
    structural: ClassVar[tuple[str, ...]] = (*MatrixOptimizer.structural, "shared", "width", "input_scale")

    def check(self, group: Group) -> None:
        """Resolves what the objective decides, and refuses options that mean nothing."""
        taught = group["objective"] == "descent"
        if group["input_scale"] is None:
            group["input_scale"] = "rms" if taught else "none"
        if group["orthogonalize"] is None:
            group["orthogonalize"] = taught
        group["orthogonalize"] = settings(group["orthogonalize"]) or False
        super().check(group)
        self._network(group)

    def fresh_state(self, p: Tensor, group: Group) -> State:
        """A network at its start."""
        columns = as_matrix(outline(p), group["matrix"]).shape[-1]
        dtype, width = state_dtype(p, group["state_dtype"]), group["width"]
        shapes = {CHANGE: (width, columns), OUT: (columns, width)}
        return {k: torch.zeros(s, dtype=dtype, device=p.device) for k, s in shapes.items()}

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """Trains each network on its rows, reads it there, and moves the weights."""
        bulk = Bulk(group, [states[0][OUT]])
        rows = [as_matrix(g, group["matrix"]).to(state[OUT]) for g, state in zip(grads, states, strict=True)]
        found = dict[int, Tensor]()
        for members in grouped(x.shape[-1] for x in rows) if group["shared"] else together(rows, group):
            if group["shared"]:
                joined = torch.cat([rows[i] for i in members])[None]
                network = [states[members[0]][key][None] for key in (CHANGE, OUT)]
            else:
                joined = torch.stack([rows[i] for i in members])
                network = [torch.stack([states[i][key] for i in members]) for key in (CHANGE, OUT)]
            answers, *network = self._answers(group, joined, network)
            if group["shared"]:
                parts = answers[0].split([len(rows[i]) for i in members])
            else:
                parts = answers.unbind()
            found.update(zip(members, parts, strict=True))
            for i, owner in self._owners(group, states, members):
                for key, value in zip((CHANGE, OUT), network, strict=True):
                    put(group, [owner], key, [value[i]])
        updates = [-orthogonalised(found[i].reshape(p.shape), group) for i, p in enumerate(params)]
        bulk.move(params, updates, bulk.number(group["lr"]), group["weight_decay"])

    def _answers(self, group: Group, rows: Tensor, network: list[Tensor]) -> tuple[Tensor, ...]:
        """What networks `[n, ...]` answer to rows `[n, r, c]` that train them, and they then."""
        scale = _length(rows) if group["input_scale"] == "rms" else rows.new_ones(1, 1, 1)
        one = rows.new_ones(len(rows))
        momentum = one * group["momentum"]
        step, *network = self._network(group).direction(rows / scale, one, momentum, *network)
        options = group["orthogonalize"]
        if options and not options["rescale"]:  # forgets lengths, but for those below its eps
            return step, *network
        return scale * step, *network

    def _network(self, group: Group) -> algorithm.DeepMomentum:
        names = ("width", "rate", "objective")
        return algorithm.DeepMomentum(**{name: group[name] for name in names})

    def _owners(self, group: Group, states: list[State], members: list[int]) -> list[tuple[int, State]]:
        """The states that hold the networks of these gradients, and which of them."""
        if not group["shared"]:
            return [(place, states[i]) for place, i in enumerate(members)]
        like = states[members[0]][OUT]
        every = [self.state[p] for p in group["params"] if p.numel()]
        return [(0, s) for s in every if s[OUT].shape == like.shape and s[OUT].dtype == like.dtype
                and s[OUT].device == like.device]  # fmt: skip


def _length(rows: Tensor) -> Tensor:
    """By matrix, the root mean square of rows that are not zero; 1 if all are. `[n, 1, 1]`."""
    moved = (rows != 0).any(-1, keepdim=True).sum(-2, keepdim=True) * rows.shape[-1]
    size = largest(rows, (-2, -1))  # squares of what is left lie within the dtype
    power = (rows / size).square().sum((-2, -1), keepdim=True) / moved.clamp(min=1)
    return size * torch.where(power > 0, power, 1).sqrt()
