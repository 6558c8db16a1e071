"""Linear attention, plain and with a feature map and normaliser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from hecate import MemoryConfig, memory_scan, named_rule, phi
from studies.costs import peers
from studies.costs.harness import WIDTH, Row, Size, compare, scan, sequence

NATIVE = Path("runs/fast-transformers-native")


def linear(size: Size) -> Iterator[Row]:
    """Causal linear attention against a C++ kernel, softmax attention and performer-pytorch."""
    yield from _kernels(size)
    for length, repeats in ((size.length, size.repeats), (size.short(16384), size.fewer(9))):
        yield compare(
            f"linear attention, T={length}",
            scan(named_rule("hebbian")),
            "torch SDPA, causal",
            softmax,
            sequence(length, batch=2 if length == size.length else 1),
            repeats=repeats,
            tolerance=None,
        )
    yield _performer(size)


def _kernels(size: Size) -> Iterator[Row]:
    """fast-transformers as pip builds it, and built for this processor into the folder NATIVE."""
    package = "pytorch-fast-transformers"
    stock = peers.causal_product() if peers.installed(package) else None
    native = peers.causal_product(NATIVE) if NATIVE.exists() else None
    flags = f"--target {NATIVE} {package} with CFLAGS='-O3 -march=native'"
    for name, kernel, install in (("stock build", stock, package), ("native build", native, flags)):
        yield compare(
            f"linear attention, T={size.length}",
            scan(named_rule("hebbian")),
            f"fast-transformers C++, {name}",
            kernel,
            sequence(size.length),
            repeats=size.repeats,
            package=install,
        )


def _performer(size: Size) -> Row:
    features = phi.PerformerReLU(kernel_epsilon=1e-3 * WIDTH**0.25)
    params = features.init(WIDTH)
    config = MemoryConfig(bias="dot", feature_map=features, normalizer="sum")

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return memory_scan(config, q, k, v, phi_params=params)[0]

    theirs: Callable[..., Tensor] | None = None
    if peers.installed("performer-pytorch"):
        theirs = peers.performer(params["frozen"]["w"][0].mT.contiguous())
    return compare(
        f"linear attention, ReLU features ({features.output_dim(WIDTH)}), normaliser",
        ours,
        "performer-pytorch on a CPU",
        theirs,
        sequence(size.length),
        repeats=size.fewer(3),
        package="performer-pytorch",
    )


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention, another function of the same shapes."""
    heads = (item.transpose(1, 2) for item in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
