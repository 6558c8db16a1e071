"""What a call asks of a device: kernels that it launches, and times that the host waits, counted on a CPU.

Within `as_on_a_device` the CPU's tensors are taken for a device's: no look at numbers is free, groups are as large as
there, and the CPU's own kernels are not at hand. Torch's profiler then tells the operations. An operation with a kernel
of its own is a launch, whatever it calls on the CPU; one made of others is these; views and allocations are none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hecate import late
from hecate.engine import Engine, parallel
from hecate.tape import bridge

# They have kernels of their own, but launch none.
FREE = frozenset(
    "as_strided alias detach detach_ view view_as _reshape_alias _unsafe_view expand empty empty_like empty_strided "
    "resize_ set_ unfold diagonal select slice permute transpose t squeeze unsqueeze split split_with_sizes unbind "
    "narrow resolve_conj resolve_neg lift_fresh is_pinned result_type promote_types real _local_scalar_dense "
    "unsafe_split as_strided_ requires_grad_ swapaxes movedim unsafe_chunk chunk".split()
)
# What a device answers only once it has come there, and what carries numbers to it from the host.
WAITS = frozenset(
    "aten::_local_scalar_dense aten::nonzero aten::masked_select aten::_unique2 aten::unique_dim aten::lift_fresh "
    "aten::normal_ aten::uniform_ aten::random_ aten::equal".split()
)
LOOKS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")


class Counted(NamedTuple):
    """Launches by operation, and waits by what asks for them."""

    by_name: Counter[str]
    waits: Counter[str]

    @property
    def launches(self) -> int:
        """All of them."""
        return self.by_name.total()


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """The CPU taken for a device."""
    kernels = "hecate.engine.cpu"  # of a CPU
    own = {name: each for name, each in Engine.registry.items() if not type(each).__module__.startswith(kernels)}
    with ExitStack() as stack:
        for target, name, value in (
            (bridge, "AT_ONCE", ()),
            (Engine, "registry", own),
            (parallel, "GROUP", parallel.DEVICE_GROUP),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        try:
            yield
        finally:
            late.forget()


def counted(call: Callable[[], object]) -> Counted:
    """What a call asks for. It is to be called once before, lest what is made once be counted."""
    waits: Counter[str] = Counter()
    with ExitStack() as stack:
        for name in LOOKS:
            stack.enter_context(mock.patch.object(Tensor, name, _noted(getattr(Tensor, name), name, waits)))
        # What has arrived is on the host already.
        stack.enter_context(mock.patch.object(late, "look", lambda **_: None))
        found = stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
        call()
    launches: Counter[str] = Counter()
    for event in found.events() or ():
        if event.name in WAITS:
            waits[event.name] += 1
        if event.name.startswith("aten::") and not _inside(event):
            _count(event, launches)
    # One look shows as the method and as the operation below it.
    waits["aten::_local_scalar_dense"] = max(
        0, waits["aten::_local_scalar_dense"] - sum(map(waits.get, LOOKS, [0] * 7))
    )
    return Counted(launches, +waits)


def _noted(method: Callable[..., Any], name: str, waits: Counter[str]) -> Callable[..., Any]:
    def look(self: Tensor, *args: Any) -> Any:
        waits[name] += 1
        return method(self, *args)

    return look


def _inside(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith("aten::"):
            return True
        parent = parent.cpu_parent
    return False


def _count(event: Any, launches: Counter[str]) -> None:
    if (name := event.name.removeprefix("aten::")) in FREE:
        return
    children = [child for child in event.cpu_children if child.name.startswith("aten::")]
    if _has_kernel(event.name) or (name == "copy_" and not children):
        launches[name] += 1
        return
    for child in children:
        _count(child, launches)


@cache
def _has_kernel(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if packet is None:
        return False
    for overload in packet.overloads():
        full = name if overload == "default" else f"{name}.{overload}"
        if torch._C._dispatch_has_kernel(full) and torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"):
            return True
    return False
