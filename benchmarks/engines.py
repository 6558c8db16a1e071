"""What engines cost: blocks or token loop, tape or autograd, linear or softmax attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from benchmarks.harness import Row, compare, forward, forward_backward
from hecate import Gates, MemoryConfig, bias, memory_scan, named_rule, structure

BATCH, HEADS, WIDTH = 2, 4, 64


def _inputs(length: int, width: int = WIDTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, length, HEADS, width)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    q, k = (torch.nn.functional.normalize(item, dim=-1) for item in (q, k))
    lr, retain = (torch.rand(shape[:3], generator=generator) for _ in range(2))
    return [q, k, v, lr, 0.9 + 0.1 * retain]


def _scan(config: MemoryConfig, **options: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, lr: Tensor, retain: Tensor) -> Tensor:
        kept = retain if config.retention.uses_retain else None
        y = memory_scan(config, q, k, v, Gates(lr, kept), **options)[0]
        return y if kept is not None else y + 0 * retain.sum()

    return run


def parallel(length: int, repeats: int) -> Iterator[Row]:
    """Exact blocks against the token loop of the same rule."""
    length = min(length, 1024)
    names = ("hebbian", "delta", "gated_delta", "titans_linear")
    rules = {name: named_rule(name) for name in names}
    rules["huber"] = MemoryConfig(bias=bias.Huber(delta=0.5), retention="decay")
    rules["lp 1.5"] = MemoryConfig(bias=bias.Lp(p=1.5, eps=1e-2), retention="decay")
    for name, config in rules.items():
        for label, measure in (("forward", forward), ("forward+backward", forward_backward)):
            yield compare(
                "parallel",
                f"{name}, T={length}, {label}",
                measure(_scan(config, engine="parallel"), _inputs(length)),
                "hecate sequential",
                measure(_scan(config, engine="sequential"), _inputs(length)),
                repeats=max(3, repeats // 3),
                tolerance=1e-3,
            )


def chunk(length: int, repeats: int) -> Iterator[Row]:
    """Gradients frozen at a chunk's start: batched products against the token loop."""
    length = min(length, 512)
    titans = structure.MLP(layers=2, expansion=1, activation="silu")
    rules = {
        "ttt_linear": named_rule("ttt_linear"),
        "titans mlp": named_rule("titans").model_copy(update={"structure": titans}),
    }
    for name, size in product(rules, (16, 64)):
        config = rules[name].model_copy(update={"chunk": size}).validated()
        for label, measure in (("forward", forward), ("forward+backward", forward_backward)):
            yield compare(
                "chunk",
                f"{name}, chunk {size}, T={length}, {label}",
                measure(_scan(config, engine="chunk"), _gentle(length)),
                "hecate sequential",
                measure(_scan(config, engine="sequential"), _gentle(length)),
                repeats=max(3, repeats // 3),
                tolerance=1e-3,
            )


def _gentle(length: int) -> list[Tensor]:
    """Steps small enough for the sum of a chunk's gradients."""
    q, k, v, lr, retain = _inputs(length)
    return [q, k, v, 0.02 * lr, retain]


def compiled(length: int, repeats: int) -> Iterator[Row]:
    """Kernels against exact blocks, and against the token loop where no blocks are exact."""
    names = ("hebbian", "delta", "gated_delta", "titans_linear")
    huber, lp = ({"bias": kind, "retention": "decay", "key_norm": "l2"} for kind in ("huber", "lp"))
    cases = [
        *((name, named_rule(name)) for name in names),
        ("huber", MemoryConfig.model_validate(huber)),
        ("lp", MemoryConfig.model_validate(lp)),
    ]
    for name, config in cases:
        for peer in ("parallel", "sequential"):
            # The token loop takes seconds: a shorter sequence will do.
            size = length if peer == "parallel" else min(length, 512)
            inputs = _inputs(size)
            inputs[3] = 0.1 * inputs[3]
            for label, measure in (("forward", forward), ("forward+backward", forward_backward)):
                yield compare(
                    "compiled",
                    f"{name}, T={size}, {label}",
                    measure(_scan(config, engine="compiled"), inputs),
                    f"hecate {peer}",
                    measure(_scan(config, engine=peer), inputs),
                    repeats=repeats if peer == "parallel" else max(3, repeats // 3),
                    tolerance=1e-3,
                )


def tape(length: int, repeats: int) -> Iterator[Row]:
    """The token loop's backward: hand-written on a recomputing tape against autograd's record."""
    length = min(length, 256)
    rules = {
        "delta": named_rule("delta"),
        "mlp": MemoryConfig(structure=structure.MLP(expansion=1)),
    }
    for name, config in rules.items():
        yield compare(
            "tape",
            f"{name}, T={length}, forward+backward",
            forward_backward(_scan(config, engine="sequential", autodiff="tape"), _small(length)),
            "the same loop under autograd",
            forward_backward(_scan(config, engine="sequential", autodiff="torch"), _small(length)),
            repeats=max(3, repeats // 3),
            tolerance=1e-3,
        )


def _small(length: int) -> list[Tensor]:
    q, k, v, lr, retain = _inputs(length, 32)
    return [q, k, v, 0.1 * lr, retain]


def softmax(length: int, repeats: int) -> Iterator[Row]:
    """Cost against causal softmax attention, which is another function: only finiteness agrees."""
    config = named_rule("hebbian")
    for size in (length // 2, length, 4 * length):
        inputs = _inputs(size)
        for label, measure in (("forward", forward), ("forward+backward", forward_backward)):
            ours = _finite(measure(_scan(config), inputs))
            theirs = _finite(measure(_sdpa, inputs))
            yield compare(
                "softmax",
                f"linear attention, T={size}, {label}",
                ours,
                "torch SDPA, causal",
                theirs,
                repeats=repeats,
                tolerance=0.0,
            )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, lr: Tensor, retain: Tensor) -> Tensor:
    heads = (item.transpose(1, 2) for item in (q, k, v))
    y = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    return y + 0 * (lr.sum() + retain.sum())


def _finite(case: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    return lambda: [torch.isfinite(item).all().float() for item in case()]


GROUPS: dict[str, Callable[[int, int], Iterator[Row]]] = {
    "parallel": parallel,
    "compiled": compiled,
    "chunk": chunk,
    "tape": tape,
    "softmax": softmax,
}
