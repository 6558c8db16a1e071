"""Peers on the same streams: attention, least squares, and published implementations, if installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import runpy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from hecate.errors import NonFiniteError, install_line
from hecate.gym.contenders import HEADS, Contender, Memory, Setting, grid, ours
from hecate.nn import SlidingAttention
from hecate.phi import RandomFourier

BLOCK = 256
LOOP = 20_000
"""Longest row, in tokens, for implementations that loop in Python."""
Kernel = Callable[..., tuple[Tensor, Tensor]]
Pair = tuple[Tensor, Tensor]


class Attention(NamedTuple):
    """Softmax attention over all earlier tokens, or the last `window`: y = sum_s softmax_s(beta <q, k_s>) v_s.

    The state is the cache of keys and values. If there is no earlier token the answer is zero.
    """

    beta: float
    window: int | None = None

    def __call__(self, keys: Tensor, values: Tensor | None, state: Pair | None) -> tuple[Tensor, Pair]:
        length = keys.shape[1]
        if state is None:
            state = keys[:, :0], keys.new_zeros(len(keys), 0, (keys if values is None else values).shape[-1])
        cached_keys, cached_values = state if values is None else _append(state, keys, values)
        past = state[0].shape[1]
        answers = []
        for start in range(0, length, BLOCK):
            asked = keys[:, start : start + BLOCK]
            # A written token sees the tokens before it; if nothing is written, keys see the whole cache.
            ends = torch.full((asked.shape[1],), past)
            ends = ends if values is None else ends + start + torch.arange(asked.shape[1])
            begins = torch.zeros_like(ends) if self.window is None else ends - self.window
            first, last = max(int(begins[0]), 0), int(ends[-1])
            at = torch.arange(first, last)
            mask = (at >= begins[:, None]) & (at < ends[:, None])
            past_keys, past_values = cached_keys[:, first:last], cached_values[:, first:last]
            output = functional.scaled_dot_product_attention(asked, past_keys, past_values, mask, scale=self.beta)
            answers.append(torch.where(mask.any(1)[:, None], output, 0.0))
        return torch.cat(answers, 1), self._trim(cached_keys, cached_values)

    def write(self, keys: Tensor, values: Tensor, state: Pair | None) -> Pair:
        """The cache with the tokens appended."""
        return self._trim(*((keys, values) if state is None else _append(state, keys, values)))

    def _trim(self, keys: Tensor, values: Tensor) -> Pair:
        return (keys, values) if self.window is None else (keys[:, -self.window :], values[:, -self.window :])


def _append(state: Pair, keys: Tensor, values: Tensor) -> Pair:
    return torch.cat([state[0], keys], 1), torch.cat([state[1], values], 1)


def _attention(window: int | None, width: int, generator: Generator) -> nn.Module:
    return SlidingAttention(width, HEADS, window=window, generator=generator)


class Ridge(NamedTuple):
    """The best linear map of phi(k) before every token: exact recursive least squares with a ridge. phi is the
    identity, or 128 random Fourier features of bandwidth `sigma`.

    M_t = argmin_M sum_(s < t) r^(t - 1 - s) |M phi_s - v_s|^2 + r^t ridge |M|^2, r = `retain`, in float64. A block of
    tokens is computed as Gaussian process regression around the map at its start: with the Cholesky factor L L^T =
    diag(r^-s) + Phi P Phi^T, P the inverse Gram matrix at the start, token t needs the leading block of L only.
    """

    ridge: float
    retain: float
    sigma: float | None = None
    seed: int = 0

    def __call__(self, keys: Tensor, values: Tensor | None, state: Pair | None) -> tuple[Tensor, Pair]:
        features = self._features(keys)
        if state is None:
            width = features.shape[-1]
            gram = self.ridge * torch.eye(width, dtype=torch.float64).expand(len(keys), -1, -1)
            state = gram, gram.new_zeros(len(keys), width, (keys if values is None else values).shape[-1])
        gram, moment = state
        answers = []
        for start in range(0, keys.shape[1], BLOCK if values is None else BLOCK // 4):
            block = features[:, start : start + (BLOCK if values is None else BLOCK // 4)]
            factor = torch.linalg.cholesky(gram)
            output = block @ torch.cholesky_solve(moment, factor)
            if values is not None:
                said = values[:, start : start + block.shape[1]].double()
                age = self.retain ** -torch.arange(1.0, block.shape[1] + 1, dtype=torch.float64)
                inner = block @ torch.cholesky_solve(block.mT, factor)
                lower = torch.linalg.cholesky(inner + torch.diag(1 / age))
                residual = torch.linalg.solve_triangular(lower, said - output, upper=False)
                across = torch.linalg.solve_triangular(lower, inner, upper=False)
                output = output + across.triu(1).mT @ residual
                weighted, faded = block.mT * age, self.retain ** block.shape[1]
                gram, moment = faded * (gram + weighted @ block), faded * (moment + weighted @ said)
            answers.append(output)
        return torch.cat(answers, 1).to(keys.dtype), (gram, moment)

    def _features(self, keys: Tensor) -> Tensor:
        if self.sigma is None:
            return keys.double()
        phi = RandomFourier(d_phi=128, sigma=self.sigma)
        params = phi.init(keys.shape[-1], generator=torch.Generator().manual_seed(self.seed))
        return phi(keys.unsqueeze(2), params).squeeze(2).double()


class GatedDelta(NamedTuple):
    """A published kernel of the gated delta rule, `(q, k, v, g, beta, initial_state) -> (y, state)`, which reads after
    the write, with q / sqrt(D). Keys and values are shifted by a token that neither writes nor forgets, so that it
    reads before the write."""

    kernel: Kernel
    lr: float
    retain: float

    def __call__(self, keys: Tensor, values: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        width = keys.shape[-1]
        if state is None:
            state = keys.new_zeros(len(keys), 1, width, (keys if values is None else values).shape[-1])
        none = keys.new_zeros(len(keys), 1, 1)
        if values is None:
            k, v, q = keys, keys.new_zeros(*keys.shape[:2], state.shape[-1]), keys
            lr = log = none.expand(-1, keys.shape[1], -1)
        else:
            k, v = (torch.cat([torch.zeros_like(x[:, :1]), x], 1) for x in (keys, values))
            q = torch.cat([keys, keys[:, -1:]], 1)
            full = keys.new_ones(*keys.shape[:2], 1)
            lr, log = (torch.cat([none, value * full], 1) for value in (self.lr, torch.tensor(self.retain).log()))
        how = {"g": log, "beta": lr, "initial_state": state, "output_final_state": True}
        y, new = self.kernel(q.unsqueeze(2) * width**0.5, k.unsqueeze(2), v.unsqueeze(2), **how)
        return y.squeeze(2)[:, : keys.shape[1]], state if values is None else new


class TitansPytorch:
    """titans-pytorch's `NeuralMemory`, reduced to Titans' equations: an MLP of two layers with loss 1/2 |M(k) - v|^2,
    constant gates, and gradients at the weights at the start of each block of 64 tokens.

    State: weights at the block's start, current weights, momentum, and number of tokens of the block so far.
    """

    def __init__(self, lr: float, momentum: float, seed: int) -> None:
        self._gates, self._seed = (lr, momentum), seed
        self._module: Any = None

    def __call__(self, keys: Tensor, values: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        if self._module is None:
            self._module = _neural_memory(keys.shape[-1], *self._gates).to(keys.dtype)
        start, now, momentum, count = state or self._start(len(keys), keys.dtype)
        if values is None:
            return self._answer(now, keys), (start, now, momentum, count)
        answers, place, block = [], 0, BLOCK // 4
        while place < keys.shape[1]:
            part = slice(place, place + block - count)
            tokens = torch.cat([keys[:, part], values[:, part]], -1)
            how = {"weights": start, "past_state": (now, momentum), "return_surprises": False}
            updates, memory = self._module.store_memories(tokens, **how)
            now, momentum = (dict(item.items()) for item in memory.states)
            ahead = {name: weight[:, :-1].flatten(0, 1) for name, weight in updates.items()}
            answers.append(self._answer(ahead, keys[:, part].flatten(0, 1).unsqueeze(1)).view_as(values[:, part]))
            place, count = place + tokens.shape[1], (count + tokens.shape[1]) % block
            start = start if count else now
        answer = torch.cat(answers, 1)
        if not answer.isfinite().all():
            raise NonFiniteError("titans-pytorch became non-finite")
        return answer, (start, now, momentum, count)

    def _start(self, rows: int, dtype: torch.dtype) -> Any:
        source, shapes = torch.Generator().manual_seed(self._seed), self._module.init_weights(rows).items()
        drawn = {name: torch.randn(item.shape[1:], generator=source, dtype=dtype) for name, item in shapes}
        weights = {name: (item * item.shape[0] ** -0.5).expand(rows, *item.shape) for name, item in drawn.items()}
        return weights, weights, {name: torch.zeros_like(item)[None] for name, item in weights.items()}, 0

    def _answer(self, weights: Any, keys: Tensor) -> Tensor:
        return torch.as_tensor(torch.func.functional_call(self._module.memory_model, {**weights}, (keys,)))


def _neural_memory(width: int, lr: float, momentum: float) -> Any:
    with warnings.catch_warnings(), torch.random.fork_rng():  # it draws weights, which are replaced
        warnings.simplefilter("ignore")
        from titans_pytorch import MemoryMLP, NeuralMemory

        module: Any = NeuralMemory(
            width, chunk_size=1, model=MemoryMLP(width, depth=2, expansion_factor=2.0), pre_rmsnorm=False,
            store_memory_loss_fn=lambda p, v: 0.5 * (p - v).square().sum(-1), adaptive_step_transform=lambda rate: rate,
            mem_model_norm_add_residual=False,
        )  # fmt: skip
    logit = math.log(momentum / (1 - momentum)) if momentum else -math.inf
    for name, function in {
        "to_keys": lambda x: x[..., :width],
        "to_values": lambda x: x[..., width:],
        "to_adaptive_step": lambda x: x.new_full(x.shape[:2], lr),
        "to_momentum": lambda x: x.new_full((1, *x.shape[:2], 1), logit),
        "to_decay_factor": lambda x: x.new_full((*x.shape[:2], 1), -math.inf),
    }.items():
        part: Any = nn.Module()
        part.forward = function
        setattr(module, name, part)
    return module.requires_grad_(False)


def _package(name: str, extra: str) -> dict[str, Any]:
    """Arguments of a contender that needs a package: its facts, or the reason why it cannot run here."""
    try:
        return {"facts": {"package": name, "version": importlib.metadata.version(name)}}
    except importlib.metadata.PackageNotFoundError:
        return {"missing": f"{name} is not installed: {install_line(extra)}"}


@cache
def _fla() -> Kernel:
    """fla-core's plain torch reference, imported from its file: importing the package would import triton."""
    path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/gated_delta_rule/naive.py")
    return runpy.run_path(str(path))["naive_recurrent_gated_delta_rule"]


@cache
def _qwen3_next() -> Kernel:
    """The gated delta rule of transformers' Qwen3-Next layers on a CPU, in chunks of 64."""
    module: Any = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    outer = module.torch_chunk_gated_delta_rule
    return getattr(outer, "__wrapped__", outer)  # the wrapper would use a package's GPU kernels


def _peer(
    name: str, build: Callable[..., Memory], axes: Mapping[str, Sequence[Any]], seeded: bool = False,
    longest: int | None = None, **facts: Any,
) -> tuple[str, Callable[[], Contender]]:  # fmt: skip
    """A contender whose memory takes its settings by name, and the seed if `seeded`."""

    def built(setting: Setting, seed: int) -> Memory:
        return build(**setting, **({"seed": seed} if seeded else {}))

    return name, lambda: Contender(name, built, grid(axes), longest=longest, **facts)


def contenders() -> dict[str, Callable[[], Contender]]:
    """All contenders that run by default, by name."""
    betas = {"beta": (16.0, 1.0, 2.0, 4.0, 8.0, 32.0, 64.0, 128.0)}
    retains, rates = (1.0, 0.995, 0.98, 0.9), {"lr": (1.0, 0.4, 0.1, 0.03), "retain": (0.99, 1.0)}
    features = {"ridge": (1e-3, 0.3), "retain": (1.0, 0.98), "sigma": (0.4, 1.6)}
    deep = {"lr": (0.1, 0.03, 0.3, 0.01), "momentum": (0.9, 0.0)}
    theirs = "titans-pytorch"
    peers = (
        _peer("attention", Attention, betas, layer=partial(_attention, None)),
        _peer("attention, window 64", partial(Attention, window=64), betas, layer=partial(_attention, 64)),
        _peer("ridge", Ridge, {"ridge": (1e-3, 0.3), "retain": retains}),
        _peer("ridge, rff", Ridge, features, seeded=True),
        _peer("fla", lambda **how: GatedDelta(_fla(), **how), rates, longest=LOOP, **_package("fla-core", "oracle")),
        _peer("transformers", lambda **how: GatedDelta(_qwen3_next(), **how), rates, **_package("transformers", "hf")),
        _peer(theirs, TitansPytorch, deep, seeded=True, longest=LOOP, **_package(theirs, "oracle")),
    )
    return {**dict(ours()), **dict(peers)}
