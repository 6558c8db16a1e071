"""The attention map that a memory computes without ever forming it.

Where every step is linear in the values, the answer is y_t = sum_s A[t, s] v_s + what is left of the start, with A
fixed by queries, keys and gates. A is read off by scanning one-hot values beside values of 0, with the engine and the
conventions of the rule itself.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hecate.errors import ConfigError
from hecate.nn.rule import ScanArguments
from hecate.rule import MemoryConfig

Tree = TypeVar("Tree")
# What rounding may leave in float64, times the condition of a memory that still works.
AGREES = 1e-6


class Attention(NamedTuple):
    """y = A v + start, exactly. [SCOPE-ATT-D1]

    Fields:
        map: A `[B, H, T, S]`, or `[B, H, T, S, V]` for a diagonal memory, whose coordinates have
            a map each. Rows are tokens that read, columns tokens that were written.
        start: what the state before the first token adds to every answer, `[B, H, T, V]`.
    """

    map: Tensor
    start: Tensor

    def applied(self, v: Tensor) -> Tensor:
        """The memory's answers `[B, T, H, V]` to values `[B, T, H, V]`."""
        ends = "bhtsv" if self.map.dim() == 5 else "bhts"
        y = torch.einsum(f"{ends},bshv->bhtv", self.map, v.to(self.map.dtype)) + self.start
        return y.transpose(1, 2)


def nonlinearity(config: MemoryConfig) -> str | None:
    """The setting that makes answers non-linear in values, as declared; None if none does."""
    structure, bias, retention, algorithm = (config.structure, config.bias, config.retention, config.algorithm)
    if not structure.weighted_sum:
        return f"structure {structure.kind!r} is not linear in the weights that hold values"
    if not bias.linear:
        return f"bias {bias.kind!r} has a gradient that is not linear in prediction and value"
    if not retention.weighted_sum:
        return f"retention {retention.kind!r} does not keep a weighted sum of what was written"
    if not algorithm.weighted_sum:
        return f"algorithm {algorithm.kind!r} takes steps that are not linear in gradients"
    return None


def implicit_attention(asked: ScanArguments) -> Attention:
    """The attention map of a scan, and what the start adds.

    Cost: a scan of ceil(T / V) + 1 times as many sequences; for a diagonal memory of T + 1 times as many.

    Raises:
        ConfigError: a rule that is not linear in its values, with the setting at fault; or one
            that says it is and is not.
    """
    reason = nonlinearity(asked.config)
    if reason is not None:
        raise ConfigError(
            f"there is no attention map: {reason}, so the answers are no weighted sum of values; "
            "norms, ranks, gates and recall do not need one"
        )
    asked = in_double(asked)
    batch, length, heads, width = asked.v.shape
    # Copy n of the sequences has ones in the values of tokens n * own, n * own + 1, ..., each in a coordinate of its
    # own, or in all of them where coordinates do not mix; the last copy has none.
    diagonal = asked.config.structure.diagonal
    own = 1 if diagonal else width
    copies = -(-length // own)
    ones = torch.eye(copies * own, dtype=asked.v.dtype, device=asked.v.device)[:, :length]
    values = torch.cat([ones.unflatten(0, (copies, own)).mT, ones.new_zeros(1, length, own)])
    values = values[:, None, :, None].expand(-1, batch, -1, heads, width).flatten(0, 1)
    y, _ = _repeated(asked, copies + 1)._replace(v=values).scan()
    y = y.unflatten(0, (copies + 1, batch)).transpose(2, 3)
    found, start = y[:-1] - y[-1], y[-1]
    found = found.movedim(0, 3) if diagonal else found.movedim(0, 3).flatten(3)[..., :length]
    # What rounding leaves of a weight of 0, such as that of a token to come, is 0.
    noise = 16 * torch.finfo(y.dtype).eps * start.flatten(2).norm(dim=2)
    found = torch.where(found.abs() > noise.reshape(batch, heads, *[1] * (found.dim() - 2)), found, 0.0)
    attention = Attention(found, start)
    if length:
        _check(asked, attention)
    return attention


def _repeated(asked: ScanArguments, times: int) -> ScanArguments:
    """So many copies of all sequences, one after the other."""
    rule, initial, (batch, _, heads, width) = asked.config, asked.initial, asked.v.shape
    if initial is not None:  # it may be shared by all sequences
        shapes = rule.structure.shapes(rule.feature_map.output_dim(asked.k.shape[-1]), width)
        initial = {name: item.expand(batch, heads, *shapes[name]) for name, item in initial.items()}
    given = asked._replace(phi_params=None, initial=initial)
    copied = pytree.tree_map_only(Tensor, lambda x: x.repeat(times, *[1] * (x.dim() - 1)), given)
    return copied._replace(phi_params=asked.phi_params)


def _check(asked: ScanArguments, attention: Attention) -> None:
    """Holds A v + start against the token loop: a declaration may be wrong."""
    answers, _ = asked.scan(engine="sequential")
    v = asked.v
    if asked.write_mask is not None:  # the value of a token that is not written may be anything
        v = torch.where(asked.write_mask[..., None, None], v, 0.0)
    summed = attention.applied(v)
    scale = max(float(answers.abs().max()), 1e-300)
    if not float((summed - answers).abs().max()) <= AGREES * scale:
        raise ConfigError(
            "the rule says that it is linear in its values, but a sum over one-hot values differs from its answers; a "
            "knob declares `linear` or `weighted_sum` wrongly, or on_nonfinite='skip' has left tokens out"
        )


def in_double(tree: Tree) -> Tree:
    """A pytree with its numbers in float64, cut off from any graph."""
    return pytree.tree_map_only(Tensor, lambda x: (x.double() if x.is_floating_point() else x).detach(), tree)
