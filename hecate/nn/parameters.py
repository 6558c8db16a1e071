"""Parameters of layers: creation without drawing, and draws from an explicit generator."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from hecate.errors import ConfigError, shorten
from hecate.sizes import check_shapes


def source_of(generator: torch.Generator | None) -> torch.Generator:
    """The generator to draw from: the given one, or torch's default."""
    if generator is None:
        return torch.default_generator
    if not isinstance(generator, torch.Generator) or generator.device.type != "cpu":
        given = generator.device if isinstance(generator, torch.Generator) else shorten(generator)
        raise ConfigError(
            "generator must be a torch.Generator on the CPU, where parameters are drawn so that a "
            f"seed gives the same ones on every device, got {given}"
        )
    return generator


def source_for(name: str, base: int) -> torch.Generator:
    """A generator of its own for a named part, whatever other parts there are."""
    digest = hashlib.sha256(f"{base} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def draw_base(generator: torch.Generator | None) -> int:
    """One draw, from which `source_for` makes the generators of any number of parts."""
    return int(torch.randint(2**62, (), generator=source_of(generator), device="cpu"))


def draw_normal(weight: Tensor, std: float, generator: torch.Generator, mean: Tensor | float = 0.0) -> None:
    """Fills a parameter with N(mean, std^2): one seed, one draw, whatever its dtype and device."""
    draw = torch.randn(weight.shape, generator=generator, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        weight.copy_(mean + draw * std)


def draw_uniform(shape: torch.Size, low: float, high: float, generator: torch.Generator) -> Tensor:
    """U(low, high) in float64 on the CPU."""
    draw = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
    return low + (high - low) * draw


def blank(layer: type[nn.Module], *sizes: int, device: torch.device | str | None, **options: Any) -> Any:
    """A torch layer whose creation draws nothing; `ConfigError` if no memory would hold it."""
    check_shapes({layer.__name__: sizes}, "lower one of the two widths")
    # skip_init knows no default device, neither torch.set_default_device nor `with device:`.
    place = torch.get_default_device() if device is None else device
    return nn.utils.skip_init(layer, *sizes, device=place, **options)


class TensorDict(nn.Module):
    """Named tensors as parameters or as buffers; names may hold dots, which torch forbids."""

    def __init__(
        self, like: dict[str, Tensor], *, learned: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.names = {name: name.replace(".", "__") for name in like}
        for name, tensor in like.items():
            empty = torch.empty(tensor.shape, device=device, dtype=dtype)
            if learned:
                self.register_parameter(self.names[name], nn.Parameter(empty))
            else:
                self.register_buffer(self.names[name], empty)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their own names."""
        return {name: getattr(self, key) for name, key in self.names.items()}

    def copy_(self, values: dict[str, Tensor]) -> None:
        """Overwrites the tensors."""
        with torch.no_grad():
            for name, value in values.items():
                getattr(self, self.names[name]).copy_(value)
