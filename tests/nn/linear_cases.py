"""Feature maps and positions of linear attention beside what the reference takes for them."""

import math

import torch

from hecate.nn import linear_attention
from hecate.nn.positions import Position
from hecate.phi import FeatureMap
from tests.nn.attentions import masks_of
from tests.nn.layers import near, seeded
from tests.reference import linear_attention as reference

D_KEY, D_VALUE = 5, 3

MAPS = {
    "elu": "elu",
    "relu": "relu",  # has dead queries
    "identity": "identity",
    "cosformer": {"kind": "cosformer", "max_length": 50},
    "favor": {"kind": "favor", "num_features": 6},
    "t2r": {"kind": "t2r", "d_phi": 7},
}


def phis(feature_map, params, groups):
    """The reference's phi for every key head, from parameters of the library's."""

    def favor(w):
        def phi(x, place):
            x = x * len(x) ** -0.25
            return (x @ w - x.square().sum() / 2).exp() / math.sqrt(w.shape[-1])

        return phi

    def t2r(weight, bias):
        return lambda x, place: (x @ weight + bias).clamp(min=0)

    if feature_map.kind == "favor":
        return [favor(w) for w in params["frozen"]["w"].expand(groups, -1, -1)]
    if feature_map.kind == "t2r":
        return [t2r(*pair) for pair in zip(*params["learned"].values(), strict=True)]
    kind = feature_map.kind
    return [reference.cosformer(50) if kind == "cosformer" else getattr(reference, kind)] * groups


class Case:
    """One call of `linear_attention` and what the reference says of it."""

    def __init__(
        self,
        feature_map="elu",
        *,
        batch=2,
        length=6,
        keys=None,
        heads=4,
        groups=2,
        positions="none",
        masks=(),
        **options,
    ):
        options.setdefault("causal", True)
        self.map = FeatureMap.model_validate(MAPS[feature_map])
        self.positions = Position.model_validate(positions)
        self.options, self.groups = options, groups
        generator = seeded()
        keys = length if keys is None else keys
        shapes = ((length, heads, D_KEY), (keys, groups, D_KEY), (keys, groups, D_VALUE))
        self.qkv = [torch.randn(batch, *shape, generator=generator, requires_grad=True) for shape in shapes]
        self.params = self.map.init(D_KEY, heads=groups, generator=generator, dtype=torch.float64)
        width = self.map.output_dim(D_KEY) if self.positions.turns_features else D_KEY
        start = self.positions.init(width, heads=groups, causal=options["causal"], dtype=torch.float64)
        self.turns = {name: item + 0.3 * torch.randn(item.shape, generator=generator) for name, item in start.items()}
        self.learned = [*self.params["learned"].values(), *self.turns.values()]
        for item in self.learned:
            item.requires_grad_()
        self.masks = {n: m for n, m in masks_of(batch, keys).items() if n.split("_")[0] in masks}

    def run(self, q=None, k=None, v=None, **options):
        q, k, v = (a if b is None else b for a, b in zip(self.qkv, (q, k, v), strict=True))
        given = {"positions": self.positions, "position_params": self.turns}
        given |= self.masks | self.options | options
        return linear_attention(q, k, v, self.map, self.params, **given)

    def expected(self):
        kind, options = self.positions, dict(self.options)
        turn = turn_key = factor = None
        if kind.kind == "rotary":
            turn = [lambda x, i: reference.rotary(x, i, kind.base)] * self.groups
        elif kind.kind == "circulant_string":
            turn = [reference.string(column) for column in self.turns["circulant"]]
        elif kind.kind == "polar":
            turn = [lambda x, i: reference.polar(x, i, kind.base)] * self.groups
            turn_key = [lambda x, i, b=b: reference.polar(x, i, kind.base, b) for b in self.turns["offset"]]
        elif kind.kind == "relative" and kind.form == "table":
            factor = [reference.table(b, options["causal"]) for b in self.turns["bias"]]
        elif kind.kind == "relative":
            factor = [reference.linear(logit) for logit in self.turns["logit"]]
        return reference.attention(
            *self.qkv,
            phis(self.map, self.params, self.groups),
            causal=options["causal"],
            normalised=options.get("normalizer", "sum") == "sum",
            eps=options.get("eps", 0.0),
            write=self.masks.get("write_mask"),
            reset=self.masks.get("reset_mask"),
            turn=turn,
            turn_key=turn_key,
            where="numerator" if kind.turns_features else "before",
            factor=factor,
        )

    def check(self, tolerance=1e-10, engines=("auto",)):
        """Outputs and all gradients agree with the reference's."""
        truth, wanted = self.expected(), [*self.qkv, *self.learned]
        weight = torch.randn(truth.shape, generator=seeded(9))

        def slopes(y):
            y = y + 0.0 * self.qkv[0].sum()  # of no keys nothing depends on anything
            return torch.autograd.grad((y * weight).sum(), wanted, materialize_grads=True)

        expected = slopes(truth)
        for engine in engines:
            y = self.run(engine=engine)[0]
            near(y, truth, tolerance, f"y of {engine}")
            near(slopes(y), expected, tolerance, f"gradients of {engine}")
