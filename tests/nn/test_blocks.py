"""The blocks around a memory: their kernels against references, and where plain torch stands in for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from hecate.models import LanguageModel
from hecate.nn import ShortConv, blocks
from hecate.nn.conv import convolved
from hecate.nn.memory import LayerState
from tests.nn.layers import near, seeded

pytestmark = pytest.mark.spec("NN-BLOCK-D1")
BATCH, LENGTH = 2, 45


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels take tensors of any size here; the names of those that ran."""
    pytest.importorskip("numba")
    names: list[str] = []

    def counted(work: Any, *rest: Any) -> None:
        names.append(work.func.__name__)
        own(work, *rest)

    own = blocks.share_out
    monkeypatch.setattr(blocks, "share_out", counted)
    monkeypatch.setattr(blocks, "LEAST", 1)
    return names


# References, from the definitions.


def convolution(x, past, weight, segment=None, written=None, *, active):
    kept, length = len(weight) - 1, x.shape[1]
    shown = x if written is None else torch.where(written[..., None], x, 0.0)
    every = torch.cat([x.new_zeros(len(x), kept, x.shape[2]) if past is None else past, shown], 1)
    total = weight[0] * x
    for j in range(1, len(weight)):
        before = every[:, kept - j : kept - j + length]
        if segment is not None:
            same = segment[:, kept - j : kept - j + length] == segment[:, kept:]
            before = torch.where(same[..., None], before, 0.0)
        total = total + weight[j] * before
    return total * torch.sigmoid(total) if active else total


def units(*tensors, norm, eps=1e-6):
    sizes = [(x * x).sum(-1, keepdim=True) / (x.shape[-1] if norm == "rms" else 1) for x in tensors]
    return tuple(x / torch.sqrt(size + eps**2) for x, size in zip(tensors, sizes, strict=True))


def rms_norm(x, weight, eps=1e-6):
    unit = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return unit if weight is None else unit * weight


def readout(y, weight, gate, eps=1e-6):
    unit = torch.einsum("bthv,hv->bthv", rms_norm(y, None, eps), weight).flatten(-2)
    return unit if gate is None else unit * gate * torch.sigmoid(gate)


def swiglu(x):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return a * torch.sigmoid(a) * b


DOCUMENTS = torch.cat([torch.zeros(BATCH, 3, dtype=torch.int64), torch.arange(BATCH * LENGTH).view(BATCH, -1) // 7], 1)
WRITTEN = torch.arange(BATCH * LENGTH).view(BATCH, -1) % 5 > 0
CONV = (BATCH, LENGTH, 35), (BATCH, 3, 35), (4, 35)
# name: block, reference, shapes of inputs, other inputs, options
CASES: dict[str, tuple[Any, Any, list[Any], tuple[Any, ...], dict[str, Any]]] = {
    "conv": (blocks.convolution, convolution, [(BATCH, LENGTH, 48), None, (4, 48)], (None, None), {"active": True}),
    "conv sum": (blocks.convolution, convolution, [*CONV], (None, None), {"active": False}),
    "conv past": (blocks.convolution, convolution, [*CONV], (None, None), {"active": True}),
    "conv documents": (blocks.convolution, convolution, [*CONV], (DOCUMENTS, None), {"active": True}),
    "conv masks": (blocks.convolution, convolution, [*CONV], (DOCUMENTS, WRITTEN), {"active": True}),
    "conv wide": (
        blocks.convolution,
        convolution,
        [(1, 5, 300), (1, 8, 300), (9, 300)],
        (None, None),
        {"active": True},
    ),
    "conv long": (blocks.convolution, convolution, [(1, 1100, 16), None, (2, 16)], (None, None), {"active": True}),
    "units l2": (blocks.units, units, [(2, LENGTH, 3, 16), (2, LENGTH, 2, 3, 16)], (), {"norm": "l2"}),
    "units rms": (blocks.units, units, [(2, LENGTH, 3, 5), (2, LENGTH, 5)], (), {"norm": "rms"}),
    "units eps": (blocks.units, units, [(2, LENGTH, 3, 16)], (), {"norm": "l2", "eps": 0.5}),
    "rms": (blocks.rms_norm, rms_norm, [(7, LENGTH, 37), (37,)], (), {}),
    "rms bare": (blocks.rms_norm, rms_norm, [(150, 32), None], (), {}),
    "readout": (blocks.readout, readout, [(2, LENGTH, 3, 21), (3, 21), (2, LENGTH, 63)], (), {}),
    "readout bare": (blocks.readout, readout, [(2, LENGTH, 2, 16), (2, 16), None], (), {}),
    "readout eps": (blocks.readout, readout, [(2, LENGTH, 3, 21), (3, 21), (2, LENGTH, 63)], (), {"eps": 0.3}),
    "swiglu": (blocks.swiglu, swiglu, [(2, LENGTH, 2 * 37)], (), {}),
}
MIXED = {"conv past": (0, 1), "readout": (2,)}  # inputs in bfloat16 beside others in float32


def drawn(name: str, dtype: torch.dtype, length: int | None = None) -> tuple[Any, Any, list[Tensor | None]]:
    """Block and reference of a case as functions of its tensors, and these."""
    block, reference, shapes, rest, options = CASES[name]
    if length is not None:
        rest = tuple(None if item is None else item[:, : item.shape[1] - LENGTH + length] for item in rest)
        shapes = [shape and tuple(length if size == LENGTH else size for size in shape) for shape in shapes]
    source = seeded()
    tensors = [shape and torch.randn(shape, generator=source).to(dtype).requires_grad_() for shape in shapes]
    return (lambda *x: block(*x, *rest, **options)), (lambda *x: reference(*x, *rest, **options)), tensors


def flat(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple) else [found]


def with_gradients(function: Callable[..., Any], tensors: list[Tensor | None], seed: int = 1) -> tuple[Any, Any]:
    outputs, source = flat(function(*tensors)), seeded(seed)
    cotangents = [torch.randn(y.shape, generator=source).bfloat16().to(y.dtype) for y in outputs]
    return outputs, torch.autograd.grad(outputs, [x for x in tensors if x is not None], cotangents)


def exact(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.detach().double().requires_grad_() for x in tensors]


ROUNDED = ("conv past", "conv masks", "units l2", "rms", "readout", "swiglu")  # a case of every kernel


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in CASES), *product(ROUNDED, (torch.float32, torch.bfloat16))],
    ids=str,
)
def test_values_and_gradients(name: str, dtype: torch.dtype, launched: list[str]):
    block, reference, tensors = drawn(name, dtype)
    found, grads = with_gradients(block, tensors)
    expected, true = with_gradients(reference, exact(tensors))
    assert len(launched) == 2 * len(found) and {item.removesuffix("_back") for item in launched} <= set(NAMES)
    # Each number is a few operations, of sums of at most 40 terms that are as large as all together; bfloat16 adds
    # one rounding. Gradients of weights are sums over all tokens, whose roundings grow as the root of their number.
    wide = torch.finfo(torch.float32 if dtype == torch.bfloat16 else dtype).eps
    for own, other in zip([*found, *grads], [*expected, *true], strict=True):
        assert own.dtype == dtype and own.shape == other.shape
        scale = other.abs().max() + other.square().mean().sqrt()
        least = torch.finfo(dtype).eps / 2 * other.abs() if dtype == torch.bfloat16 else 0.0
        assert ((own.double() - other).abs() <= least + 40 * wide * scale).all()


NAMES = ("convolve", "norm", "swiglu")


@pytest.mark.parametrize("name", MIXED)
def test_bfloat16_beside_float32(name: str, launched: list[str]):
    block, reference, tensors = drawn(name, torch.float32)
    for at in MIXED[name]:
        tensors[at] = tensors[at].detach().bfloat16().requires_grad_()
    found, grads = with_gradients(block, tensors)
    expected, true = with_gradients(reference, exact(tensors))
    assert len(launched) == 2 and [y.dtype for y in found] == [torch.float32]
    for own, other, at in zip([*found, *grads], [*expected, *true], (None, *range(3)), strict=False):
        assert own.dtype == (torch.bfloat16 if at in MIXED[name] else torch.float32)
        near(own.double(), other, 2**-8 if at in MIXED[name] else 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_derivatives_of_second_order(name: str, launched: list[str]):
    block, _, tensors = drawn(name, torch.float64, length=3)
    assert gradcheck(block, tensors, fast_mode=True, check_batched_grad=True)
    assert launched
    assert gradgradcheck(block, tensors, fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_transforms_see_every_operation(name: str, launched: list[str]):
    block, reference, tensors = drawn(name, torch.float64)
    given = [None if x is None else x.detach() for x in tensors]
    at = [i for i, x in enumerate(given) if x is not None]

    def of(*varied: Tensor, function: Any = block) -> tuple[Tensor, ...]:
        filled: list[Tensor | None] = [None] * len(given)
        for i, x in zip(at, varied, strict=True):
            filled[i] = x
        return tuple(flat(function(*filled)))

    plain = [given[i] for i in at]
    expected = flat(reference(*given))
    pairs = [torch.stack([x, 2 * x]) for x in plain]
    for own, other in zip(torch.func.vmap(of)(*pairs), expected, strict=True):
        near(own[0], other)
    tangents = [torch.randn(x.shape, generator=seeded(2)) for x in plain]
    _, moved = torch.func.jvp(lambda *x: of(*x, function=reference), tuple(plain), tuple(tangents))
    _, ours = torch.func.jvp(of, tuple(plain), tuple(tangents))
    with forward_ad.dual_level():
        dual = of(*[forward_ad.make_dual(x, t) for x, t in zip(plain, tangents, strict=True)])
        near(list(ours), list(moved))
        near([forward_ad.unpack_dual(item).tangent for item in dual], list(moved))
    grads, true = (
        torch.func.grad(lambda *x, f=f: sum(y.square().sum() for y in of(*x, function=f)), tuple(range(len(plain))))(
            *plain
        )
        for f in (block, reference)
    )
    near(list(grads), list(true))


@pytest.mark.parametrize("name", ROUNDED)
def test_compiled_whole(name: str, launched: list[str]):
    torch._dynamo.reset()  # all cases have the code of one function
    block, _, tensors = drawn(name, torch.float64)
    found, grads = with_gradients(torch.compile(block, fullgraph=True, backend="eager"), tensors)
    assert not launched
    expected, true = with_gradients(block, tensors)
    assert launched
    for own, other in zip([*found, *grads], [*expected, *true], strict=True):
        near(own, other)


@pytest.mark.parametrize("name", CASES)
def test_inputs_that_lie_apart_are_left_as_they_are(name: str, launched: list[str]):
    block, _, tensors = drawn(name, torch.float64)
    expected, true = with_gradients(block, tensors)
    apart = []
    for x in tensors:
        if x is None:
            apart.append(None)
            continue
        wide = torch.full((*x.shape[:-1], 2, x.shape[-1] + 1), torch.nan)  # rows, and numbers of the first axis too
        wide[..., 1, 1:] = x.detach()
        apart.append(wide[..., 1, 1:].requires_grad_())
    turned = [
        None if x is None else x.detach().mT.contiguous().mT.requires_grad_() if x.dim() > 1 else x for x in tensors
    ]
    for given in (apart, turned):
        before = [None if x is None else x.detach().clone() for x in given]
        found, grads = with_gradients(block, given)
        for own, other in zip([*found, *grads], [*expected, *true], strict=True):
            near(own, other)
        for x, old in zip(given, before, strict=True):
            assert x is old is None or torch.equal(x, old)
            for y in found:
                assert x is None or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    outputs = flat(block(*tensors))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(flat(block(*tensors)), outputs, strict=True))
    spread = torch.autograd.grad(sum(y.sum() for y in outputs), [x for x in tensors if x is not None])
    ones = [torch.ones_like(y) for y in outputs]
    again = torch.autograd.grad(flat(block(*tensors)), [x for x in tensors if x is not None], ones)
    assert all(torch.equal(a, b) for a, b in zip(spread, again, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_threads_change_no_bit(name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch):
    block, _, tensors = drawn(name, torch.float64)
    if "conv" not in name:
        tensors = [x if x is None or x.dim() < 3 else torch.cat([x.detach()] * 4, 0).requires_grad_() for x in tensors]
    expected = [item for part in with_gradients(block, tensors) for item in part]
    monkeypatch.setattr(blocks, "SHARE", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = [item for part in with_gradients(block, tensors) for item in part]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_where_plain_torch_stands_in(name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch):
    block, reference, tensors = drawn(name, torch.float64)
    mixed = [None if x is None else x.detach().to(torch.float32 if i else x.dtype) for i, x in enumerate(tensors)]
    half = [None if x is None else x.detach().half() for x in tensors]
    token = [None if x is None else x.detach()[:, :1] if x.dim() > 2 else x.detach() for x in tensors]
    short = [None if x is None else x.detach()[:, :0] if x.dim() > 2 else x.detach() for x in tensors]
    if "conv" in name:
        token[1:], short[1:] = tensors[1:], tensors[1:]
    given = [half] if name in ("swiglu", "units l2", "units rms") else [half, mixed]
    given += [token, short] if CASES[name][3] in ((), (None, None)) and name != "rms bare" else []
    for case in given:
        if case is mixed and all(x is None for x in mixed[1:]):
            continue
        if case is mixed and name == "rms":
            continue  # torch warns of it
        for own, other in zip(flat(block(*case)), flat(reference(*exact(case))), strict=True):
            near(own.double(), other, 4e-3 if case is half else 1e-6)
    assert not launched
    monkeypatch.setattr(blocks, "_kernels", lambda: None)
    for own, other in zip(flat(block(*tensors)), flat(reference(*tensors)), strict=True):
        near(own, other)
    assert not launched


def test_what_no_kernel_is_made_for(launched: list[str]):
    x, weight = torch.randn(1, 70, 16, generator=seeded()), torch.randn(63, 16, generator=seeded(1))
    own = blocks.convolution(x, None, weight, None, None, active=True)
    near(own, convolution(x, None, weight, active=True))
    near(blocks.swiglu(x), swiglu(x))
    assert not launched


@pytest.mark.parametrize("norm", ["l2", "rms"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_units_of_any_length(norm: str, dtype: torch.dtype, launched: list[str]):
    far = 0.9 * torch.finfo(dtype).max
    x = torch.randn(2, 3, 2, 16, generator=seeded()).clamp(-1, 1).to(dtype)
    x[0, 0], x[0, 1], x[1, 2, 0] = x[0, 0] * far, x[0, 1] * 1e-30, 0.0
    x.requires_grad_()
    (y,), (grad,) = with_gradients(partial(lambda *x: blocks.units(*x, norm=norm)), [x])
    own = x.detach().double()
    own = own / own.abs().amax(-1, keepdim=True).clamp(min=1e-300)
    own = own / own.norm(dim=-1, keepdim=True) * (4 if norm == "rms" else 1)
    full = torch.ones(2, 3, dtype=torch.bool)
    full[0, 1] = full[1, 2] = False  # so short that eps is longer
    near(y[full].double(), own[full], 8 * torch.finfo(dtype).eps + 1e-11)  # of 1e-12 beside a mean square
    assert (y[1, 2, 0] == 0).all() and torch.isfinite(grad).all()
    cotangent = torch.randn(y.shape, generator=seeded(1)).bfloat16().to(dtype)
    assert torch.equal(grad[1, 2, 0], cotangent[1, 2, 0])  # the slope of a zero is 1


def test_the_slope_of_a_zero_is_the_weight(launched: list[str]):
    x, weight = torch.zeros(2, 3, 32).requires_grad_(), torch.randn(32, generator=seeded())
    near(torch.autograd.grad(blocks.rms_norm(x, weight).sum(), x)[0], weight.expand(2, 3, 32), 0.0)
    y, gate = torch.zeros(2, 3, 2, 16).requires_grad_(), torch.randn(2, 3, 32, generator=seeded(1))
    (grad,) = torch.autograd.grad(blocks.readout(y, weight.view(2, 16), gate).sum(), y)
    near(grad.flatten(-2), weight * torch.nn.functional.silu(gate), 1e-15)
    assert len(launched) == 4


@pytest.mark.parametrize("name", CASES)
def test_what_is_no_number_stays_where_it_is(name: str, launched: list[str]):
    block, reference, tensors = drawn(name, torch.float64)
    for (at, x), bad in product(enumerate(tensors), (torch.nan, torch.inf)):
        if x is None or x.dim() < 3:
            continue
        given = [None if item is None else item.detach().clone() for item in tensors]
        given[at][0, 1, ..., 3] = bad
        for own, other in zip(flat(block(*given)), flat(reference(*exact(given))), strict=True):
            assert torch.equal(own.isfinite(), other.isfinite()) or (bad == torch.inf and "units" in name)
            assert other.isfinite().all() or not own.isfinite().all() or "units" in name


def test_a_convolution_in_pieces_under_masks(launched: list[str]):
    conv = ShortConv(24, 4)
    conv.reset_parameters(seeded())
    x = torch.randn(2, 23, 24, generator=seeded(1)).requires_grad_()
    write, reset = (torch.rand(2, 23, generator=seeded(n)) < share for n, share in ((2, 0.7), (3, 0.2)))
    for masks in ((None, None), (write, None), (None, reset), (write, reset)):
        for inert in (False, True):
            conv.inert = inert
            whole, end, *_ = convolved(conv, x, None, *masks)
            state, found = None, []
            for part in (slice(0, 2), slice(2, 3), slice(3, 3), slice(3, 16), slice(16, 23)):
                own = [None if mask is None else mask[:, part] for mask in masks]
                y, taps, segment = convolved(conv, x[:, part], state, *own)
                state = LayerState(None, taps, segment)
                found.append(y)
            cut = torch.cat(found, 1)
            if inert and masks[0] is not None:  # what a masked token reads is another token's
                cut, whole = cut[write], whole[write]
            near(cut, whole)
            near(state.conv, end)
            pieces, at_once = (torch.autograd.grad(y.square().sum(), x)[0] for y in (cut, whole))
            near(pieces, at_once)
    assert {"convolve", "convolve_back"} == set(launched)


def test_they_keep_their_inputs_alone(launched: list[str]):
    for name in CASES:
        block, _, tensors = drawn(name, torch.float64)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            block(*tensors)
        given = {x.data_ptr() for x in (*tensors, *CASES[name][3]) if x is not None}
        assert {x.data_ptr() for x in kept if isinstance(x, Tensor)} <= given


def test_a_model_with_kernels_is_the_one_without(launched: list[str], monkeypatch: pytest.MonkeyPatch):
    sizes = {"vocab_size": 17, "d_model": 48, "layers": 1, "heads": 3, "memory": "gated_delta"}
    model = LanguageModel(sizes, generator=seeded(), dtype=torch.float64)
    tokens, found = torch.randint(17, (2, 40), generator=seeded(1)), []
    for least in (1, 1 << 30):
        monkeypatch.setattr(blocks, "LEAST", least)
        logits, _ = model(tokens)
        found.append([logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))])
        kernels, names = set(launched), [*NAMES, *(f"{name}_back" for name in NAMES)]
        assert kernels == (set(names) if least == 1 else set())
        launched.clear()
    near(*found, 1e-11)
