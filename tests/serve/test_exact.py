"""`exact`: a row has the bits that it has alone, whatever is asked beside it, before it or after it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import hecate
from hecate import states
from hecate.errors import ConfigError
from hecate.models import Hope, HopeConfig, LanguageModel
from hecate.nn.blocks import rms_norm, swiglu
from hecate.rule import RULES
from hecate.serve import PrefixCache, Request, Scheduler
from hecate.tape import steady
from tests.serve.common import LEVELS, drawn, run

ATTENTION = {"window": 6, "persistent": 3, "kv_heads": 1}
# By the way that it goes: kernels, kernels of layers, the token loop, layers token by token, attention.
KINDS: dict[str, dict[str, Any]] = {
    "gated_delta": {"memory": "gated_delta"},
    "titans": {"memory": "titans"},
    "levels": {"levels": LEVELS},
    "rwkv7": {"memory": "rwkv7"},
    "carry": {"levels": [{"name": "all"}], "composition": "carry"},
    "features": {"memory": {"feature_map": {"kind": "favor", "num_features": 16}, "key_norm": "l2"}},
    "window": {"attention": {"kind": "mal", **ATTENTION}},
    "segments": {"attention": {"kind": "mac", "segment": 5}},
    "softmax": {"attention": {"kind": "attention", "conv_kernel": 4, "output_gate": True}},
    "self": {"self_reference": {}},
}
forms: Any = import_module("hecate.tape.exact")  # the module, behind the function
FAST = ["gated_delta", "titans", "levels", "rwkv7", "features", "window", "self"]


@cache  # with and without it one model is asked, whose programs and plans are kept
def made(kind: str, **fields: Any) -> LanguageModel:
    """A model in float32 of widths that leave a rest everywhere, its gates drawn too."""
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 36, "layers": 1, "heads": 3, "tie_embeddings": False} | fields
    draws = torch.Generator().manual_seed(0)
    if kind == "hope":
        model: LanguageModel = Hope(HopeConfig(**sizes), generator=draws)
    else:
        model = LanguageModel(sizes | KINDS.get(kind, {"memory": kind}), generator=draws)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "gates" in name:
                weight.add_(torch.randn(weight.shape, generator=draws) / 10)
    return model.eval().float()


def cut(model: LanguageModel, tokens: Tensor, sizes: Sequence[int], state: Any = None) -> tuple[Tensor, Any]:
    """Logits and the last state of tokens `[B, T]` in calls of these sizes."""
    parts = []
    for part in tokens[:, : sum(sizes)].split(list(sizes), 1):
        logits, state = model(part, state)
        parts.append(logits)
    return torch.cat(parts, 1), state


def differs(found: tuple[Tensor, Any], wanted: tuple[Tensor, Any], row: int = 0) -> list[str]:
    """What of a row is not, to the bit, what it is of one row."""
    (y, state), (own, alone) = found, wanted
    names = [] if torch.equal(y[row], own[0]) else ["logits"]
    held = states.leaves(states.rows(state, [row]))
    return names + [name for name, leaf in states.leaves(alone).items() if not torch.equal(leaf, held[name])]


def check(kind: str) -> list[Any]:
    """Where a kind of model has other bits: cuts of 1 to 16 tokens and whole, batches of 2 to 16, both ends of them."""
    model = made(kind)
    tokens = torch.randint(0, 64, (16, 44), generator=torch.Generator().manual_seed(1))
    wanted, early = cut(model, tokens[:1], [1] * 44), cut(model, tokens[:1], [1] * 25)
    cuts: list[list[int]] = [[44], [23, 1, 4, 16], [1, 16, 2, 3, 5, 11, 6]]
    found: list[Any] = [(sizes, names) for sizes in cuts if (names := differs(cut(model, tokens[:1], sizes), wanted))]
    for count, row in ((2, 1), (5, 0), (16, 15)):
        batch = tokens[:count].clone()
        batch[[0, row]] = batch[[row, 0]]
        if names := differs(cut(model, batch, [17, 1, 5, 2]), early, row):
            found.append((count, row, names))
    return found


@pytest.mark.parametrize(
    "kind", [k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in [*KINDS, "hope"]]
)
@pytest.mark.spec("TAPE-EXACT-D1")
def test_bits_are_those_of_a_token_alone(kind):
    if kind in ("titans", "window"):
        with torch.no_grad():
            assert len(check(kind)) > 2  # without it
    with hecate.exact():
        assert check(kind) == []


@pytest.mark.spec("TAPE-EXACT-D1")
def test_blocks_of_many_numbers_are_those_of_few():
    x = torch.randn(4, 200, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    with hecate.exact():
        for block in (swiglu, lambda x: rms_norm(x, None)):
            assert torch.equal(block(x)[1:2, :5], block(x[1:2, :5]))


def differing() -> list[str]:
    """What of torch's attention and sums of products has other bits beside other rows, in float32."""
    draws, found, sdpa = torch.Generator().manual_seed(0), [], torch.nn.functional.scaled_dot_product_attention
    q, k, v = (torch.randn(2, 3, 300, 20, generator=draws, dtype=torch.float32) for _ in range(3))
    ages = torch.arange(300).unsqueeze(-1) - torch.arange(300)
    for name, seen in (("causal", ages >= 0), ("window", (ages >= 0) & (ages < 9))):
        y = sdpa(q, k, v, is_causal=True) if name == "causal" else sdpa(q, k, v, attn_mask=seen)
        own = [sdpa(q[:1, :, t : t + 1], k[:1, :, seen[t]], v[:1, :, seen[t]]) for t in range(0, 300, 7)]
        found += [] if torch.equal(y[:1, :, ::7], torch.cat(own, 2)) else [name]
    shapes = (9, 3, 37), (37, 19), (3, 19, 37)
    x, weight, state = (torch.randn(shape, generator=draws, dtype=torch.float32) for shape in shapes)
    functional = torch.nn.functional
    forms: dict[str, Any] = {
        "einsum": lambda x: torch.einsum("bhk,hvk->bhv", x, state),
        "linear": lambda x: functional.linear(x, weight.mT),
        "matmul": lambda x: torch.matmul(x.unsqueeze(-2), state.mT),
        "@": lambda x: x @ weight,
        "bmm": lambda x: torch.bmm(x.transpose(0, 1), state.mT).transpose(0, 1),
        "baddbmm": lambda x: torch.baddbmm(state[:, :1, :19], x.transpose(0, 1), state.mT).transpose(0, 1),
        "pow": lambda x: x.abs() ** 0.3,
        "silu of torch": torch._C._nn.silu,
    }
    forms |= {name: getattr(functional, name) for name in ("silu", "softplus", "logsigmoid", "gelu", "mish", "elu")}
    forms |= {name: getattr(torch, name) for name in "sigmoid tanh exp expm1 sin cos sinh cosh erf".split()}
    forms |= {name: lambda x, name=name: getattr(x.abs(), name)() for name in ("log", "log1p", "rsqrt")}
    for name, form in forms.items():
        found += [] if torch.equal(form(x), torch.cat([form(row) for row in x.split(1)])) else [name]
    return found


@pytest.mark.spec("TAPE-EXACT-D1")
def test_attention_and_sums_of_products_are_those_of_a_row_alone():
    assert {"causal", "window", "einsum", "bmm"} <= set(differing())  # without it
    with hecate.exact():
        assert differing() == [] and steady()
    assert not steady()


@pytest.mark.spec("TAPE-EXACT-D1")
def test_products_go_in_whole_tiles_and_functions_in_whole_vectors(monkeypatch):
    """What other machines take other kernels for, whether or not this one does."""
    asked: list[tuple[int, ...]] = []

    def product(tile: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        asked.append((*tile.shape, tile.is_contiguous()))
        return tile @ weight.mT

    def function(*given: Tensor) -> Tensor:
        asked.extend((x.numel(), x.is_contiguous()) for x in given)
        return sum(given).exp()

    draws = torch.Generator().manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", product)
        for rows, width in ((1, 32), (5, 36), (8, 5), (70, 64)):
            x, weight = torch.randn(rows, width, generator=draws), torch.randn(7, width, generator=draws)
            y = forms._linear(x.T.contiguous().T, weight)
            assert (y - x @ weight.T).abs().max() < 1e-12
    assert len(asked) == 1 + 1 + 1 + 9
    assert all((rows, width % 32, whole) == (8, 0, True) for rows, width, whole in asked)
    asked.clear()
    for shape in ((3, 5), (64,), (64, 65), (2, 64, 300)):
        x, y = torch.randn(shape, generator=draws), torch.randn(shape[-1], generator=draws)
        assert torch.equal(forms._flat(function, x.mT.contiguous().mT if x.dim() > 1 else x, y), (x + y).exp())
    assert len(asked) == 2 * (1 + 1 + 1 + 3)
    assert all(count % 64 == 0 and count <= 1 << 14 and whole for count, whole in asked)
    held = {form.args[0] for form in forms._OF.values() if getattr(form, "func", None) is forms._flat}
    names = "sigmoid tanh exp expm1 log log1p sin cos sinh cosh erf pow rsqrt".split()
    assert {getattr(home, name) for home in (torch, Tensor) for name in names if hasattr(home, name)} <= held
    asked.clear()
    plain, x = Tensor.sum, torch.randn(6, 5, 4, generator=draws).permute(2, 1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "sum", lambda x, *axes: asked.append((x.is_contiguous(),)) or plain(x, *axes))
        assert not (x * x).is_contiguous() and torch.equal(forms._total(x, x), plain((x * x).contiguous(), -1))
    assert asked == [(True,)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.spec("TAPE-EXACT-D1")
def test_bits_of_every_named_rule(rule):
    with hecate.exact():
        assert check(rule) == []


@pytest.mark.parametrize("kind", ["gated_delta", "window"])
@pytest.mark.spec("TAPE-EXACT-D1")
def test_noise_in_one_row_reaches_no_other(kind):
    model = made(kind)
    tokens = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(2))
    with hecate.exact():
        _, state = cut(model, tokens, [14])
        for scale in (1.0, 1e6, 1e15):
            noise = states.each_row(state, lambda leaf, by=scale: _spoilt(leaf, by))
            found = cut(model, tokens[:, 14:], [1, 5], noise)
            assert differs(found, cut(model, tokens[1:2, 14:], [6], states.rows(state, [1])), 1) == []


def _spoilt(leaf: Tensor, scale: float) -> Tensor:
    if not leaf.is_floating_point():
        return leaf
    draws = torch.Generator().manual_seed(3)
    noise = scale * torch.randn(leaf.shape, generator=draws, dtype=leaf.dtype)
    return torch.cat([noise[:1], leaf[1:2], noise[2:]])


@pytest.mark.parametrize("kind", ["gated_delta", pytest.param("window", marks=pytest.mark.slow)])
@pytest.mark.spec("SERVE-EXACT-D1")
def test_requests_have_the_bits_that_they_have_alone(kind, monkeypatch):
    model, prompts = made(kind), drawn(4, 19, 5, 33, 8)
    prompts = [[token % 64 for token in prompt] for prompt in prompts]
    prompts.append([*prompts[2][:20], 1, 2, 3])  # begins as another
    heard: dict[Request, list[Tensor]] = {}

    def listening(self: Request, logits: Tensor) -> int:
        heard.setdefault(self, []).append(logits.clone())
        return int(logits.argmax())

    monkeypatch.setattr(Request, "pick", listening)

    def answers(order: Sequence[int], **how: Any) -> dict[int, Tensor]:
        scheduler = Scheduler(model, max_batch=4, exact=True, **how)
        asked = {number: scheduler.submit(Request(prompts[number], 6, temperature=1.0)) for number in order}
        run(scheduler)
        return {number: torch.stack(heard[request]) for number, request in asked.items()}

    alone = {number: answers([number])[number] for number in range(5)}
    for order, how in (
        ((0, 1, 2, 3, 4), {}), ((4, 3, 2, 1, 0), {"piece": 7}),
        ((2, 4, 0, 1, 3), {"prefixes": PrefixCache(block=4, exact=True)}),
    ):  # fmt: skip
        found = answers(order, **how)
        assert all(torch.equal(found[number], alone[number]) for number in order)
    assert how["prefixes"].tokens_saved >= 20


@pytest.mark.spec("SERVE-EXACT-D1", "TAPE-EXACT-D1")
def test_what_exact_refuses():
    with hecate.exact(), pytest.raises(ConfigError, match="engine='parallel' takes tokens in blocks, and exact"):
        hecate.memory_scan(hecate.MemoryConfig(), *torch.ones(3, 1, 4, 1, 2), engine="parallel")
    softmax, mask = made("softmax"), torch.ones(1, 4, dtype=torch.bool)
    with hecate.exact(), pytest.raises(ConfigError, match="exact and window=None: padding"):
        softmax(torch.zeros(1, 4, dtype=torch.int64), write_mask=mask)
    with pytest.raises(ConfigError, match="exact=True, and parked_dtype='float16'"):
        Scheduler(made("gated_delta"), exact=True, prefixes=PrefixCache(parked_dtype="float16", exact=True))
    with pytest.raises(ConfigError, match="exact=True, and the PrefixCache has exact=False"):
        Scheduler(made("gated_delta"), exact=True, prefixes=PrefixCache())

    class Centred(LanguageModel):
        def forward(self, *args: Any, **masks: Any) -> Any:
            logits, state = super().forward(*args, **masks)
            return logits - logits.mean(), state  # over all rows

    centred = Centred(made("gated_delta").config).float()
    Scheduler(centred)
    with pytest.raises(ConfigError, match="exact=True, and a Centred on this machine answers"):
        Scheduler(centred, exact=True)
