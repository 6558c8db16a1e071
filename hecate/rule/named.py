"""Rules of the literature as values of the knobs; fields that are left out are those of `MemoryConfig()`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from hecate import readout, retention
from hecate.activation import Tanh
from hecate.algorithm import GD, RLS, DeepMomentum, DeltaMomentum, Momentum, NewtonSchulz, Omega
from hecate.bias import Dot, Lp, Yaad
from hecate.gating import (
    ABC,
    GSA,
    MLSTM,
    RWKV7,
    Comba,
    Complement,
    Curvature,
    Head,
    Heads,
    Hypergradient,
    KalmaNet,
    LargeChunk,
    Mamba2,
    Mamba3,
    Mesa,
    MomentumDeltaGates,
    Raven,
    TargetConv,
)
from hecate.phi import ELU, GLU, Concat, Identity, Linear, Normalise, Polynomial
from hecate.retention import KL, Decay, Lq, Sphere
from hecate.rule.config import RULES, Difference, MemoryConfig, NamedRule
from hecate.structure import MLP, GatedMLP, Matrix, Slots, TwoPass

_UNGATED = Heads(lr=False)  # no lr gate: lr is 1 at every token
_CONSTANT = Heads(lr=False, retain=False)
_HAS = {
    "bounded": "lr over a bound of the curvature that a write meets",
    "dampened": "lr times 1 - momentum",
    "towards": "what is forgotten gives way to the start, not to zero",
    "values": "values of one length",
    "answers": "answers without SiLU ahead of their norm",
    "bonus": "no bonus for the token's own value",
    "conv": "a short convolution",
    "decay": "the retain sigmoid(w.x + b), from .99, in place of exp(-A softplus(w.x + b))",
    "diagonal": "the whole I - c k k^T in place of its diagonal",
    "gelu_gate": "SiLU of the output gate in place of GELU",
    "head_gate": "an output gate of each channel in place of one of each head",
    "gate_ahead": "a norm of each head and the gate behind it, in place of one norm of all behind the gate",
    "lengths": "keys and queries of unit length in place of their own, with a step divided by their width",
    "mean": "the sum of a block's steps in place of their mean",
    "layer_norm": "a root mean square in place of a layer norm",
    "norm": "a norm of each head",
    "one_key": "queries that are not the keys",
    "output_gate": "an output gate",
    "post_norm": "a root mean square of each head in place of a layer norm of all",
    "residual": "no residual and layer norm in the memory",
    "sigmoid_gate": "SiLU of the output gate in place of a sigmoid",
    "skip": "no skip d v",
    "skip_start": "a skip d v that starts at 0 in place of 1",
    "turned": "queries and keys that no position turns",
    "unit_erase": "c k, of length c, in what is erased, in place of k",
    "units": "keys and queries of unit length in place of their own",
    "v_conv": "values behind the convolution",
    "whole_norm": "a norm of each head in place of one of all",
}


def _differs(**by: float) -> tuple[Difference, ...]:
    """Differences of a default layer from the published one, each with how far it moves the output of a fresh layer."""
    return tuple([Difference(name, _HAS[name], number) for name, number in by.items()])


_CODES = 16
_KDA = Decay(channels=True, rank="head", gate="softplus")


def _sum(**fields: Any) -> MemoryConfig:
    """A sum of writes, in a layer that does nothing to q, k and v after the projections."""
    return MemoryConfig(**{"bias": Dot(), "layer_qk_norm": "none", "layer_activation": "none", **fields})


def _gated(**fields: Any) -> MemoryConfig:
    """A gated delta rule: the value at a unit key is erased from the decayed memory."""
    shared = {"retention": Decay(gate="softplus"), "decay_order": "before_gradient", "key_norm": "l2"}
    return MemoryConfig(**{**shared, **fields})


def _ttt(layers: int) -> MemoryConfig:
    """A network p + LN(f(p)) whose gradients are taken at the start of chunks of 16 tokens."""
    structure = MLP(layers=layers, residual=True, norm="layer", bias=True)
    return MemoryConfig(
        structure=structure, algorithm=GD(lr=0.1), chunk=16, layer_activation="none", layer_v_norm="rms"
    )


def _miras(**fields: Any) -> MemoryConfig:
    """A network p + LN(f(p)) of two layers, for values of one size."""
    structure = MLP(layers=2, residual=True, norm="layer")
    return MemoryConfig(structure=structure, key_norm="l2", layer_v_norm="rms", **fields)


def _window(**fields: Any) -> MemoryConfig:
    """A linear layer on quadratic features of keys, whose step descends the loss of the last four tokens."""
    phi, algorithm = Polynomial(degree=2), Omega(window=4, decay=0.9, **fields)
    return MemoryConfig(retention=Decay(), algorithm=algorithm, feature_map=phi, key_norm="l2")


_LITERATURE: dict[str, Callable[[], NamedRule]] = {
    "hebbian": lambda: NamedRule(
        _sum(gating=_UNGATED),
        "Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021, arXiv 2102.11174), the sum "
        "rule",
        _differs(conv=0.06, norm=0.97, output_gate=0.97),
    ),
    "linear_attention": lambda: NamedRule(
        _sum(feature_map=ELU(), gating=_UNGATED, normalizer="sum"),
        "Transformers are RNNs (Katharopoulos et al., 2020, arXiv 2006.16236): a layer leaves q and k their lengths, "
        "features of vectors of unit length are too alike to tell keys apart",
        _differs(conv=0.04, norm=2.36, output_gate=0.96),
    ),
    "retnet": lambda: NamedRule(
        _sum(retention=Decay(retain="retnet"), gating=_CONSTANT, query_scale="key_dim"),
        "Retentive Network (Sun et al., 2023, arXiv 2307.08621): one retain per head, 1 - 2^(-5-h), without a gate",
        _differs(conv=0.06, turned=0.86),
    ),
    "gla": lambda: NamedRule(
        _sum(
            retention=Decay(retain=2 ** (-1 / 16), channels=True, rank=16, gate="root"),
            gating=_UNGATED,
            query_scale="key_dim",
        ),
        "Gated Linear Attention (Yang et al., 2024, arXiv 2312.06635): retain per phi channel, gates.retain [B, T, H, "
        "P], in a layer sigmoid(W_2 W_1 x + b)^(1/16) of rank 16",
        _differs(conv=0.06),
    ),
    "mamba2": lambda: NamedRule(
        MemoryConfig(bias=Dot(), retention=Decay(retain=0.95), gating=Mamba2(), layer_qk_norm="none"),
        "Transformers are SSMs (Dao and Gu, 2024, arXiv 2405.21060): lr is dt, retain exp(-A dt), d x is added; keys "
        "and queries are per head, the convolution has no bias",
        _differs(skip_start=1.19, gate_ahead=0.60),
    ),
    "delta": lambda: NamedRule(
        MemoryConfig(key_norm="l2"),
        "Parallelizing Linear Transformers with the Delta Rule (Yang et al., 2024, arXiv 2406.06484)",
        _differs(output_gate=0.97),
    ),
    "gated_delta": lambda: NamedRule(
        _gated(retention=Decay()), "Gated Delta Networks (Yang et al., 2024, arXiv 2412.06464)", _differs(decay=0.62)
    ),
    "kda": lambda: NamedRule(
        _gated(retention=_KDA),
        "Kimi Linear (Kimi Team, 2025, arXiv 2510.26692): the gated delta rule with retain per phi channel, "
        "gates.retain [B, T, H, P], in a layer exp(-A softplus(W_2 W_1 x + b))",
        _differs(sigmoid_gate=0.90),
    ),
    "gated_delta_2": lambda: NamedRule(
        _gated(
            retention=_KDA,
            gating=Heads(erase=Head(channels=True, bias=False), value=Head(channels=True, bias=False), lr=False),
        ),
        "Gated DeltaNet-2 (2026, arXiv 2605.22791): kda with a gate per channel on the erased key and one on the "
        "value; lr is 1",
    ),
    "delta_product": lambda: NamedRule(
        _gated(algorithm=GD(lr=2.0), writes=2),
        "DeltaProduct (Siems et al., 2025, arXiv 2502.10297), gated, of two writes with lr up to 2, whose products are "
        "rotations; set writes for another number",
    ),
    "rwkv7": lambda: NamedRule(
        MemoryConfig(
            retention=Decay(channels=True), writes=2, gating=RWKV7(), layer_qk_norm="none", layer_activation="none"
        ),
        "RWKV-7 (Peng et al., 2025, arXiv 2503.14456), the recurrence and its gates; without token shift, value "
        "residual, and with an output gate of full rank",
        _differs(conv=0.07, layer_norm=0.25, bonus=0.08),
    ),
    "comba": lambda: NamedRule(
        _gated(layer_qk_norm="none", gating=Comba()),
        "Comba (Hu et al., 2025, arXiv 2506.02475): a layer corrects q by k as both come and brings them to unit "
        "length then, as the released one",
        _differs(sigmoid_gate=0.91, unit_erase=0.06),
    ),
    "efla": lambda: NamedRule(
        MemoryConfig(step="flow", layer_qk_norm="none"),
        "Error-Free Linear Attention (Lei et al., 2025, arXiv 2512.12602): the delta rule's gradient flow solved over "
        "a time lr, in DeltaNet's layer; a layer leaves keys their length, of length 1 it is lr = 1 - exp(-lr)",
        _differs(output_gate=0.96),
    ),
    "momentum_delta": lambda: NamedRule(
        _gated(
            retention=Decay(),
            algorithm=Momentum(bounded=False),
            layer_qk_norm="none",
            gating=MomentumDeltaGates(correction=True),
        ),
        "Momentum DeltaNet (Huang et al., 2026, arXiv 2605.05838); a layer corrects q by k ahead of their norm",
    ),
    "mamba3": lambda: NamedRule(
        MemoryConfig(
            bias=Dot(), retention=Decay(), writes=2, gating=Mamba3(), layer_qk_norm="none", layer_conv_kernel=0
        ),
        "Mamba-3 (Lahoti et al., 2026, arXiv 2603.15569), one input and one output",
        _differs(norm=0.64),
    ),
    "pgdn": lambda: NamedRule(
        _gated(gating=Curvature(gate="softplus")),
        "Preconditioned DeltaNet (Tumma et al., 2026, arXiv 2604.21100): gated_delta with a preconditioned written key",
    ),
    "pkda": lambda: NamedRule(
        _gated(retention=_KDA, gating=Curvature(gate="softplus")),
        "Preconditioned DeltaNet (Tumma et al., 2026, arXiv 2604.21100): kda with a preconditioned written key, and an "
        "output gate of full rank",
        _differs(sigmoid_gate=0.89),
    ),
    "osdn": lambda: NamedRule(
        MemoryConfig(key_norm="l2", gating=Hypergradient()),
        "Online Scaled DeltaNet (Zhou et al., 2026, arXiv 2605.13473) by its authors' programs: delta with a factor on "
        "the channels of the written key, 1 at first, that follows its hypergradient and is forgotten by a gate",
        _differs(output_gate=0.97),
    ),
    "oja": lambda: NamedRule(
        MemoryConfig(
            structure=Matrix(learns="key"),
            retention=Decay(retain=1.0),
            decay_order="before_gradient",
            gating=Heads(retain_value=Head(channels=True, start=0.99), retain=False, unit_values=True),
        ),
        "Gated Oja rule of flash-linear-attention (no paper): the key is predicted from the value, whose channels "
        "decay; a layer brings values to unit length, to a scan they come so; its gates are ours",
    ),
    "mlstm": lambda: NamedRule(
        MemoryConfig(
            bias=Dot(), retention=Decay(), normalizer="max", query_scale="key_dim", gating=MLSTM(), layer_qk_norm="none"
        ),
        "xLSTM (Beck et al., 2024, arXiv 2405.04517), the matrix memory with exponential gates, stabilised; "
        "its gates hear x, the published ones q, k and v, which they start deaf to; without the skip around the memory",
        _differs(v_conv=0.72, layer_norm=0.63),
    ),
    "hgrn2": lambda: NamedRule(
        _sum(retention=Decay(retain=0.9, channels=True), gating=Complement(lr=False, query="silu")),
        "HGRN2 (Qin et al., 2024, arXiv 2404.07904): what is not kept is written; in a layer the key is the logit of "
        "retain, as in the released one; without the lower bounds of retain that grow over layers",
        _differs(conv=0.06, whole_norm=0.48, output_gate=0.97),
    ),
    "longhorn": lambda: NamedRule(
        MemoryConfig(step="implicit", layer_qk_norm="none"),
        "Longhorn (Liu et al., 2024, arXiv 2407.14207): the proximal step, exact; a layer leaves keys their "
        "length, and has one lr a head",
        _differs(diagonal=0.48, skip=0.88, norm=1.35),
    ),
    "dgd": lambda: NamedRule(
        MemoryConfig(retention=Decay(), step="implicit", layer_qk_norm="none"),
        "Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Eq 57 for the dot loss, whose descent direction is "
        "v, with the retain of Eq 88; the constant is lr/(1 + lr |k|^2), the printed lr/(1 + lr) holds for |k| = 1; "
        "no layer of it alone was published, ours leaves keys their length",
    ),
    "mesa": lambda: NamedRule(
        MemoryConfig(algorithm=RLS(), key_norm="l2", step="weighted"),
        "MesaNet (von Oswald et al., 2025, arXiv 2506.05233): the ridge optimum of tokens weighed by lr, the paper's "
        "beta, with its gamma at 1 and one ridge for all channels",
        _differs(v_conv=0.65, output_gate=0.97),
    ),
    "gated_mesa": lambda: NamedRule(
        MemoryConfig(
            bias=Dot(), retention=Decay(), key_norm="l2", readout=readout.Ridge(solver="exact"), gating=Mesa()
        ),
        "MesaNet (von Oswald et al., 2025, arXiv 2506.05233) with its gates gamma and beta, and a ridge per head and "
        "channel that does not fade; solved exactly, set readout.solver for the paper's conjugate gradients",
        _differs(v_conv=0.65, output_gate=0.97),
    ),
    "gated_kalmanet": lambda: NamedRule(
        MemoryConfig(
            bias=Dot(),
            retention=Decay(gate="softplus"),
            key_norm="l2",
            query_scale="key_dim",
            readout=readout.Ridge(ridge=0.0, relative=0.02),
            gating=KalmaNet(),
        ),
        "Gated KalmaNet (Peng et al., 2025, arXiv 2511.21016): the ridge is 0.02 |H|_F and a gate mixes query and "
        "solution; solved exactly, set readout.solver for the paper's 30 steps of Chebyshev's iteration",
    ),
    "gsa": lambda: NamedRule(
        _sum(retention=Decay(channels=True), layer_activation="silu", readout=readout.Slots(), gating=GSA()),
        "Gated Slot Attention (Zhang et al., 2024, arXiv 2409.07146): as many slots as a key is wide, whose scores are "
        "not scaled, as released; a layer leaves q and k their lengths, a softmax of what unit vectors score is nearly "
        "even",
        _differs(conv=0.03, answers=0.05, whole_norm=0.15, output_gate=0.97),
    ),
    "abc": lambda: NamedRule(
        _sum(retention=Decay(channels=True), query_scale="key_dim", readout=readout.Slots(), gating=ABC()),
        "ABC: Attention with Bounded-memory Control (Peng et al., 2021, arXiv 2110.02488), with learned control: as "
        "many slots as a key is wide",
        _differs(conv=0.04, turned=0.08),
    ),
    "raven": lambda: NamedRule(
        MemoryConfig(
            bias=Dot(),
            retention=Decay(channels=True),
            layer_qk_norm="rms",
            layer_conv_kernel=0,
            layer_activation="silu",
            readout=readout.Slots(),
            gating=Raven(),
        ),
        "Raven (Afzal, Bick et al., 2026; no paper read), by its layer in flash-linear-attention: gsa with a router to "
        "32 slots a token; as many slots as a key is wide, without noise in training",
        _differs(answers=0.04, whole_norm=0.58, output_gate=0.96),
    ),
    "titans_linear": lambda: NamedRule(
        MemoryConfig(retention=Decay(), algorithm=Momentum(), key_norm="l2"),
        "Titans (Behrouz et al., 2025, arXiv 2501.00663), one linear layer",
    ),
    "titans": lambda: NamedRule(
        MemoryConfig(
            structure=MLP(layers=2, expansion=2, activation=Tanh(), last=0.1),
            retention=Decay(retain=0.9999, towards="start"),
            algorithm=Momentum(lr=2.0, dampening=True, lr_start=0.75),
            step="normalized",
            key_norm="l2",
            layer_v_norm="l2",
        ),
        "Titans (Behrouz et al., 2025, arXiv 2501.00663), a memory of two layers that forgets towards its start, where "
        "the paper's forgets towards zero, a point that it cannot be written at; lr is a share of the longest stable "
        "step, times (1 - momentum); tanh learns odd maps best, for even ones take activation gelu and bias. As "
        "printed: retention.towards zero, step raw, algorithm.dampening false, and lr .01",
        _differs(towards=0.0, bounded=1.15, dampened=1.32, values=0.63),
    ),
    "ttt_linear": lambda: NamedRule(
        MemoryConfig(key_norm="l2", chunk=16, layer_activation="none"),
        "Learning to (Learn at Test Time) (Sun et al., 2024, arXiv 2407.04620): gradients at the start of blocks of "
        "16; beside the layer of its Mamba backbone, whose q and k share a projection",
        _differs(residual=0.89, v_conv=0.03, lengths=0.21, turned=0.76, mean=0.49, post_norm=0.26, gelu_gate=0.15),
    ),
    "ttt_linear_norm": lambda: NamedRule(
        _ttt(layers=1),
        "Learning to (Learn at Test Time) (Sun et al., 2024, arXiv 2407.04620): x + LN(W x + b), without gain and "
        "offset of the norm; lr is eta of the released code, whose gate also divides by the head's width; beside the "
        "layer of its Mamba backbone, whose q and k share a projection",
        _differs(v_conv=0.04, lengths=1.18, turned=0.47, mean=0.96, post_norm=0.06, gelu_gate=0.15, values=0.17),
    ),
    "ttt_mlp": lambda: NamedRule(
        _ttt(layers=2),
        "Learning to (Learn at Test Time) (Sun et al., 2024, arXiv 2407.04620): x + LN(f(x)), f of two layers with "
        "gelu; norm, lr and layer as in ttt_linear_norm",
        _differs(v_conv=0.04, lengths=1.07, turned=0.49, mean=0.78, post_norm=0.06, gelu_gate=0.15, values=0.18),
    ),
    "large_chunk_ttt": lambda: NamedRule(
        MemoryConfig(
            structure=GatedMLP(expansion=1),
            bias=Dot(),
            retention=Sphere(slot="row", form="divide", pattern=False),
            algorithm=NewtonSchulz(momentum=0.5, polynomial="schedule"),
            key_norm="l2",
            layer_conv_kernel=0,
            layer_activation="silu",
            gating=LargeChunk(),
            chunk=32,
            commit="chunk",
            read="before",
        ),
        "Test-Time Training Done Right (Zhang et al., 2025, arXiv 2505.23884): rows are brought back to the length "
        "they start with; chunks of 32, not 2048 and more, so set chunk to a fraction of the sequence; lr, one for "
        "each matrix, weighs the tokens of a chunk; without the window attention that shares q, k and v with it, and "
        "the scale and offset of each channel of q and k, which start at 1 and 0",
        _differs(turned=1.14, head_gate=1.26),
    ),
    "in_place_ttt": lambda: NamedRule(
        MemoryConfig(
            bias=Dot(),
            algorithm=GD(lr=0.3),
            feature_map=GLU(),
            gating=TargetConv(),
            layer_activation="none",
            chunk=32,
            writes=3,
            commit="chunk",
            read="before",
        ),
        "In-Place Test-Time Training (2026, arXiv 2604.06169): the last layer of a gated MLP as the memory, targets by "
        "a convolution with two taps ahead; lr is the released code's, its paper's is 3; chunks of 32, not 4096 and "
        "more, so set chunk to a fraction of the sequence, and lr with it, which weighs a sum over the chunk; the "
        "published one is the MLP of a block that is trained already",
        _differs(one_key=1.31, units=0.68, conv=0.08, norm=49.68, output_gate=0.97),
    ),
    "moneta": lambda: NamedRule(
        _miras(bias=Lp(p=3.0), retention=Lq(q=4.0, eps=1e-3), algorithm=GD(lr=2e-3)),
        "It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Moneta, with the exact map of q = 4; the "
        "printed one, retention.form='paper', lacks the power of the coordinates",
        _differs(values=0.64),
    ),
    "yaad": lambda: NamedRule(
        _miras(
            bias=Yaad(delta=32.0, eps=1e-3), retention=retention.L2(penalty=1e-4, decoupled=True), algorithm=GD(lr=0.01)
        ),
        "It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Yaad, with one delta for all channels, several "
        "times the length of a value at the start: where delta is crossed the write jumps, and training that meets "
        "the jump stalls; the norm within undoes what is forgotten of the scale while gradients grow with it, so that "
        "little is forgotten",
        _differs(towards=0.0, values=0.21),
    ),
    "memora": lambda: NamedRule(
        _miras(retention=KL(scale=8.0), algorithm=GD(lr=0.05)),
        "It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Memora: rows of weights are distributions",
        _differs(values=0.44),
    ),
    "omeganet": lambda: NamedRule(
        _window(lr=0.4),
        "ATLAS (Behrouz et al., 2025, arXiv 2505.23735), OmegaNet with one linear layer; the window's weights are "
        "powers of a constant",
    ),
    "atlas": lambda: NamedRule(
        _window(inner=NewtonSchulz()),
        "ATLAS (Behrouz et al., 2025, arXiv 2505.23735) with one linear layer, as omeganet; it descends along NS(S)",
    ),
    "lattice": lambda: NamedRule(
        MemoryConfig(structure=Slots(), retention=Sphere(), key_norm="l2"),
        "Lattice (Karami and Mirrokni, 2025, arXiv 2504.05646): a slot for each coordinate of the key, each of unit "
        "length by itself",
    ),
    "trellis": lambda: NamedRule(
        MemoryConfig(
            structure=TwoPass(codes=_CODES),
            retention=Decay(),
            feature_map=Concat(maps=(Normalise(inner=Identity()), Normalise(inner=Linear(d_phi=_CODES)))),
        ),
        "Trellis (2025, arXiv 2512.23852): codes are a learned linear map of the key, of length 1; both passes share "
        "lr and retain",
    ),
    "delta_momentum": lambda: NamedRule(
        MemoryConfig(retention=Decay(), algorithm=DeltaMomentum(lr=0.5), key_norm="l2"),
        "Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Eq 49 as the algorithm of a linear memory, in its "
        "contracting form; the printed one lacks a factor",
    ),
    "deep_momentum": lambda: NamedRule(
        MemoryConfig(retention=Decay(), algorithm=DeepMomentum(lr=10.0), key_norm="l2"),
        "Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Eq 50 as the algorithm of a linear memory, taught "
        "descent; the printed objective ignores the gradient's sign",
    ),
}


@cache
def _equations() -> dict[str, str]:
    """The equations of every rule, as `hecate.variant.equation` gives them of a variant."""
    _, *entries = Path(__file__).with_name("equations.tex").read_text("ascii").strip().split("\n\n")
    return {name.removeprefix("% "): lines for name, _, lines in (entry.partition("\n") for entry in entries)}


def _with_equation(name: str) -> NamedRule:
    return _LITERATURE[name]()._replace(equation=_equations()[name])


RULES.data.update({name: partial(_with_equation, name) for name in _LITERATURE})
