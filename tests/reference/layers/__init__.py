"""The layers around memories as they were published: straight-line torch in float64, a function a rule.

`LAYERS[name](x, w)` is y for x `[B, T, d_model]`. `w` holds the weights by the names below, the layer's settings and
which differences are taken back:

    q.weight, k.weight, v.weight   [H D, d_model], k and v of n writes behind one another
    q_conv.weight, ...             [H D, taps], the oldest token's tap first, as torch's depthwise convolution has it
    o_norm.weight, g.weight        [H, V] and [H V, d_model]: the norm of every head, and the output gate
    o.weight                       [d_model, H V]
    lr.*, retain.*, momentum.*     heads of the gates: weight, bias; down and rate where there are such
    initial.*, phi.*, and the rest as the rule's gating names it

What is left out is not there in `w`. `w.published` names the differences between our layer and the published one that
a call takes back, so that a function is both: `w.published` empty is our layer, with all of the rule's it is the
published one. `eps` beside squares and the scale of queries ahead of a norm are ours in all of them.
"""

from importlib import import_module
from pkgutil import iter_modules

from tests.reference.layers.parts import Layer, Weights

LAYERS: dict[str, Layer] = {}
for module in iter_modules(__path__, f"{__name__}."):
    LAYERS |= getattr(import_module(module.name), "LAYERS", {})

__all__ = ["LAYERS", "Layer", "Weights"]
