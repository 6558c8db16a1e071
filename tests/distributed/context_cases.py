"""What ranks compute of pieces of sequences, against one process: run on every rank of a world."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hecate import Gates, MemoryConfig, memory_scan
from hecate.distributed.context import Context, context_scan, share, sum_gradients, unshare
from hecate.models import LanguageModel, LanguageModelConfig
from hecate.nn import LinearAttention, Memory
from hecate.rule import RULES

T = 14
RULE = {"bias": "l2", "retention": "decay", "feature_map": "elu", "key_norm": "l2"}


class Case(NamedTuple):
    """A scan: a config, what it is called with, and where the sequence is cut."""

    config: MemoryConfig
    cuts: tuple[int, ...]
    heads: int = 2
    gates: tuple[str, ...] = ()
    channel: bool = False
    masks: tuple[str, ...] = ("reset",)
    given: str = ""  # "initial", "state"
    values: int = 3


def case(cuts: tuple[int, ...], fields: dict[str, Any] | None = None, **more: Any) -> Case:
    config = {**RULE, **(fields or {}), "state_dtype": "float64"}
    return Case(MemoryConfig.model_validate(config), cuts, **more)


def quick_scans(size: int) -> dict[str, Case]:
    """What the default tests run, by name."""
    uneven = (0, 5, T) if size == 2 else tuple(round(T * (at / size) ** 1.4) for at in range(size + 1))
    first, last = (*[0] * size, T), (0, *[T] * size)
    dot, momentum = {"bias": "dot"}, {"algorithm": "momentum"}
    return {
        "gd": case(uneven, given="initial"),
        "gd, channels, from a state": case(uneven, channel=True, given="state", masks=("reset", "write")),
        "gd, the first pieces empty": case(first, given="initial"),
        "gd, the last pieces empty": case(last, given="initial"),
        "gd, a single token": case((*[0] * size, 1), given="initial", masks=()),
        "before_gradient": case(uneven, {"decay_order": "before_gradient", "read": "before"}, masks=("write",)),
        "momentum": case(uneven, momentum, given="initial", masks=("reset", "write")),
        "momentum, channels, from a state": case(uneven, momentum, channel=True, given="state"),
        "nesterov, empty": case(last, {"algorithm": {"kind": "momentum", "nesterov": True}}, given="state"),
        "implicit": case(uneven, {"step": "implicit"}),
        "implicit gradients": case(uneven, {"algorithm": "implicit"}),
        "dot": case(uneven, dot, given="initial", masks=("reset", "write")),
        "dot, channels, read before": case(uneven, {**dot, "read": "before"}, channel=True, given="state"),
        "dot, momentum": case(uneven, {**dot, **momentum}, channel=True, given="state", masks=("write", "reset")),
        "dot, an empty piece": case(first, {**dot, **momentum, "read": "before"}, given="state"),
        "normaliser": case(uneven, {"normalizer": "sum"}, masks=("write", "reset")),
        "dot, normaliser, from a state": case(uneven, {**dot, "normalizer": "sum"}, given="state"),
        "divisor with a floor": case(uneven, {**dot, "normalizer": "max"}, gates=("floor",), given="state"),
        "erase and write": case(uneven, gates=("erase", "write"), channel=True, given="initial"),
        "value channels": case(uneven, {"decay_order": "before_gradient"}, gates=("retain_value",), given="state"),
        "value channels, dot": case(uneven, dot, gates=("retain_value",), given="initial", masks=("write",)),
        "value channels, read before": case(
            uneven, {**dot, "read": "before"}, gates=("retain_value",), channel=True, given="initial"
        ),
        "value channels, by heads": case(uneven, gates=("retain_value",), given="initial"),
        "several writes": case(uneven, {"writes": 2}, given="initial", masks=("reset", "write")),
        "several writes, dot": case(uneven, {"writes": 2, **dot}, given="state"),
        "a diagonal memory": case(uneven, {"structure": "vector", **momentum}, given="state"),
        "positions": case(uneven, {"feature_map": {"kind": "cosformer", "max_length": 64}}, given="state"),
        "an MLP, by heads": case(uneven, {"structure": "mlp", "key_norm": "none"}, given="state"),
        "chunks, by heads": case(uneven, {"chunk": 4, "commit": "chunk"}, masks=("write", "reset")),
        "writes, by heads": case(uneven, {"writes": 2, "bias": "huber"}, given="initial", heads=2 * size),
        "skip": case(uneven, {"on_nonfinite": "skip"}, given="initial"),
        "an MLP, by turns": case(uneven, {"structure": "mlp", "key_norm": "none"}, heads=3 if size < 3 else 2),
        "chunks, by turns": case(first, {"chunk": 4, **momentum}, heads=3 if size < 3 else 2, given="state"),
    }


def all_rules(size: int) -> dict[str, Case]:
    """Every named rule, by heads and by turns where it is not affine."""
    cuts = tuple(round(T * (at / size) ** 1.4) for at in range(size + 1))
    found = {}
    for name, rule in RULES.items():
        config = rule.config.model_copy(update={"state_dtype": "float64"})
        for heads in (size, size + 1):
            found[f"{name}, {heads} heads"] = Case(config, cuts, heads, values=4)
    return found


def tensors_of(case: Case, length: int, seed: int) -> tuple[dict[str, Tensor], Any]:
    """Inputs of a scan by name, and phi's parameters."""
    g = torch.Generator().manual_seed(seed)
    config, heads, batch, width = case.config, case.heads, 2, 4
    phi = config.feature_map.output_dim(width)
    values, n = phi if config.structure.diagonal else case.values, (config.writes,) if config.writes > 1 else ()
    normal, unit = partial(torch.randn, generator=g), partial(torch.rand, generator=g)
    channel, each = (phi,) if case.channel else (), (batch, length, *n, heads)
    found = {
        "q": normal(batch, length, heads, width),
        "k": nn.functional.normalize(normal(*each, width), dim=-1),
        "v": normal(*each, values),
        "lr": 0.5 * unit(*each),
    }
    if config.forms.gates[1]:
        found["retain"] = 0.8 + 0.2 * unit(batch, length, heads, *channel)
    if config.forms.gates[2]:
        found["momentum"] = 0.8 * unit(batch, length, heads)
    for name in case.gates:
        shape = {"retain_value": (batch, length, heads, values), "floor": (batch, length, heads)}.get(name)
        found[name] = unit(*(shape or (*each, *channel)))
    if "retain_value" in found:
        found["retain_value"] = 0.7 + 0.3 * found["retain_value"]
    params = config.feature_map.init(width, heads=heads, generator=g, dtype=torch.float64)
    return {name: item.requires_grad_() for name, item in found.items()}, params


def scanned(scan: Any, case: Case, tensors: dict[str, Tensor], **given: Any) -> tuple[Tensor, Any]:
    gates = Gates(**{name: tensors.get(name) for name in Gates._fields})
    return scan(case.config, tensors["q"], tensors["k"], tensors["v"], gates, **given)


def shared_of(case: Case, params: Any) -> dict[str, Any]:
    """What all ranks share: phi's parameters, learned starts, a state to go on from."""
    earlier, _ = tensors_of(case, 5, 7)
    earlier = {name: item.detach() for name, item in earlier.items()}
    _, state = scanned(memory_scan, case, earlier, phi_params=params)
    given: dict[str, Any] = {"phi_params": params}
    if case.given == "initial":
        given["initial"] = {name: item[0].clone() for name, item in state.memory.items()}
    elif case.given == "state":
        given["state"] = state
    leaves = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    return given


def loss_of_state(state: Any) -> Tensor:
    """A sum that every number of a state enters with a weight of its own."""
    total = torch.zeros(())
    for index, leaf in enumerate(pytree.tree_leaves(state)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            weight = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(index))
            total = total + (leaf * weight).sum()
    return total


def apart(found: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference, relative to the largest number where that is above 1."""
    if wanted is None or not wanted.numel():
        return 0.0
    if found is None:
        return float(wanted.abs().max())
    return float((found - wanted).abs().max() / max(1.0, float(wanted.abs().max())))


def scan_error(case: Case, context: Context) -> float:
    """Outputs, final states and all gradients of one scan."""
    a, b = case.cuts[context.rank], case.cuts[context.rank + 1]
    length = case.cuts[-1]
    tensors, params = tensors_of(case, length, 0)
    given = shared_of(case, params)
    masks = {}
    if "reset" in case.masks:
        masks["reset_mask"] = torch.zeros(2, length, dtype=torch.bool)
        masks["reset_mask"][0, 3] = masks["reset_mask"][1, 9] = True
    if "write" in case.masks:
        masks["write_mask"] = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) < 0.7
    y, end = scanned(memory_scan, case, tensors, **given, **masks)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    shared = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad]
    loss = (y * weight).sum() + loss_of_state(end)
    wanted = torch.autograd.grad(loss, [*tensors.values(), *shared], allow_unused=True)

    own = {name: item[:, a:b].detach().clone().requires_grad_() for name, item in tensors.items()}
    given = shared_of(case, params)
    mine = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad]
    for leaf in mine:
        leaf.grad = None
    pieces = {name: mask[:, a:b] for name, mask in masks.items()}
    got, final = scanned(context_scan, case, own, context=context, **given, **pieces)
    loss = (got * weight[:, a:b]).sum()
    if context.last:
        loss = loss + loss_of_state(final)
    loss.backward()
    errors = [apart(got, y[:, a:b])]
    errors += [apart(x.double(), w.double()) for x, w in zip(*map(tensors_in, (final, end)), strict=True)]
    errors += [apart(x.grad, w[:, a:b]) for x, w in zip(own.values(), wanted, strict=False) if w is not None]
    for leaf, want in zip(mine, wanted[len(own) :], strict=True):
        total = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
        dist.all_reduce(total)
        errors.append(apart(total, want))
    return worst(errors)


def rounding(case: Case) -> float:
    """How far outputs and gradients of one process move where every input does by its last bit or so: what no way of
    summing can be held to."""
    found: list[list[Tensor]] = []
    for moved in (False, True):
        tensors, params = tensors_of(case, case.cuts[-1], 0)
        if moved:
            draw = torch.Generator().manual_seed(7)
            tensors = {
                name: (x * (1 + 2.0**-52 * torch.randint(-1, 2, x.shape, generator=draw))).detach().requires_grad_()
                for name, x in tensors.items()
            }
        y, end = scanned(memory_scan, case, tensors, **shared_of(case, params))
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
        loss = (y * weight).sum() + loss_of_state(end)
        grads = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
        found.append([y, *(x for x in grads if x is not None)])
    return max(apart(one, two) for one, two in zip(*found, strict=True))


def tensors_in(state: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]


def worst(errors: list[float]) -> float:
    """Over ranks; what is no number counts as 1e9."""
    most = torch.tensor([1e9 if error != error else error for error in errors]).max()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


# Models.


DELTA = {"retention": "decay", "algorithm": {"kind": "gd", "lr": 0.5}}
MLP = {"structure": "mlp", "algorithm": {"kind": "gd", "lr": 0.1}}
FAST = {"name": "fast", "memory": DELTA}
LEVELS = [FAST, {"name": "mid", "period": 2, "memory": DELTA}, {"name": "slow", "period": 4, "memory": MLP}]
NESTED = [FAST, {"name": "slow", "period": 4, "memory": DELTA}]


def quick_models() -> dict[str, dict[str, Any]]:
    """Fields of language models by name."""
    return {
        "gated delta with phi": {"memory": {**DELTA, "feature_map": "elu", "key_norm": "l2"}},
        "titans_linear": {"memory": "titans_linear"},
        "an MLP memory": {"memory": MLP},
        "levels": {"levels": LEVELS},
        "nested levels": {"levels": NESTED, "composition": "nested"},
        "carried levels": {"levels": [FAST], "composition": "carry", "carry_levels": 3},
        "attention in a window": {
            "memory": DELTA,
            "attention": {"kind": "mag", "window": 5, "persistent": 2, "conv_kernel": 3, "output_gate": True},
        },
        "full attention": {"attention": {"kind": "attention"}},
        "memory as context": {"memory": DELTA, "attention": {"kind": "mac", "segment": 4}},
        "self-reference": {"self_reference": {"chunk": 4}},
        "a feature memory": {"memory": DELTA, "feature_memory": DELTA},
        "rwkv7": {"memory": "rwkv7"},
        "mamba3": {"memory": "mamba3"},
        "mlstm": {"memory": "mlstm"},
        "linear_attention": {"memory": "linear_attention", "qk_norm": "none"},
    }  # fmt: skip


def model_error(fields: dict[str, Any], context: Context, length: int, heads: int = 2) -> float:
    """Logits, final states and gradients of a language model over two calls, the second from the first one's state."""
    config = LanguageModelConfig.model_validate(
        {"vocab_size": 11, "d_model": 16, "layers": 2, "heads": heads, **fields}
    )
    g = torch.Generator().manual_seed(0)
    model = LanguageModel(config, generator=g, dtype=torch.float64)
    tokens = torch.randint(11, (2, 2, length), generator=g)
    resets = torch.zeros(2, 2, length, dtype=torch.bool)
    resets[0, 0, length // 3] = resets[0, 1, -2] = resets[1, 1, 1] = True
    weight = torch.randn(2, 2, length, 11, generator=g)

    def run(slices: tuple[slice, slice]) -> tuple[list[Tensor], Any]:
        state, outputs = None, []
        for call, own in enumerate(slices):
            logits, state = model(tokens[call][:, own], state, reset_mask=resets[call][:, own])
            outputs.append(logits)
            state = pytree.tree_map_only(Tensor, Tensor.detach, state) if call == 0 else state
        return outputs, state

    def backward(outputs: list[Tensor], slices: tuple[slice, slice]) -> list[Tensor]:
        model.zero_grad()
        sum(
            (y * weight[call][:, own]).sum() for call, (y, own) in enumerate(zip(outputs, slices, strict=True))
        ).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]

    whole = (slice(None),) * 2
    wanted, end = run(whole)
    gradients = backward(wanted, whole)
    share(model, context)
    rank, size = context.rank, context.size
    cut = [round(length * (at / size) ** 1.3) for at in range(size + 1)]
    slices = slice(cut[rank], cut[rank + 1]), slice(length * rank // size, length * (rank + 1) // size)
    got, final = run(slices)
    backward(got, slices)
    sum_gradients(model, context)
    found = [p.grad for p in model.parameters()]
    errors = [apart(y, w[:, own]) for y, w, own in zip(got, wanted, slices, strict=True)]
    errors += [apart(x.double(), w.double()) for x, w in zip(*map(tensors_in, (final, end)), strict=True)]
    errors += [apart(x, w) for x, w in zip(found, gradients, strict=True)]
    unshare(model)
    again, _ = run(whole)
    errors.append(apart(again[1], wanted[1]))
    return worst(errors)


def steps(model: nn.Module, batches: Tensor, own: slice, add: Any, count: int = 0) -> None:
    """Trains on a piece of each batch, the loss divided by `count` targets; `add` brings gradients together."""
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for tokens in batches:
        optimizer.zero_grad()
        logits, _ = model(tokens[:, :-1][:, own])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:][:, own].flatten(), reduction="sum")
        (loss / (count or tokens[:, 1:].numel())).backward()
        add()
        optimizer.step()


def moved_by_rounding(fields: dict[str, Any], data: int) -> float:
    """How far the parameters of `mixed_error`'s one process end where every number they start from moves by its last
    bit or so."""
    models = [mixed_model(fields) for _ in range(2)]
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in models[1].parameters():
            p.mul_(1 + 2.0**-52 * torch.randint(-1, 2, p.shape, generator=draw))
    for model in models:
        steps(model, mixed_batches(data), slice(None), lambda: None)
    ends = (map(Tensor.detach, model.parameters()) for model in models)
    return max(apart(moved, end) for end, moved in zip(*ends, strict=True))


def mixed_model(fields: dict[str, Any]) -> LanguageModel:
    config = LanguageModelConfig.model_validate({"vocab_size": 11, "d_model": 16, "layers": 2, "heads": 2, **fields})
    return LanguageModel(config, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mixed_batches(data: int) -> Tensor:
    return torch.randint(11, (8, 2 * data, 13), generator=torch.Generator().manual_seed(1))


def mixed_error(rank: int, size: int, fields: dict[str, Any], data: int, recompute: bool) -> float:
    """Parameters after 8 steps of data x context ranks, sharded over data where there are several, against one
    process."""
    warnings.simplefilter("ignore")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    batches, one, model = mixed_batches(data), mixed_model(fields), mixed_model(fields)
    steps(one, batches, slice(None), lambda: None)
    mesh = init_device_mesh("cpu", (data, size // data), mesh_dim_names=("data", "context"))
    context = Context.of(mesh["context"].get_group())
    share(model, context)
    if recompute:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if data > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        for module in (*model.blocks, model):
            module.set_gradient_divide_factor(1.0)
    rows = slice(2 * (rank // context.size), 2 * (rank // context.size) + 2)
    ends = 12 * context.rank // context.size, 12 * (context.rank + 1) // context.size
    steps(model, batches[:, rows], slice(*ends), lambda: sum_gradients(model, context), batches[0, :, 1:].numel())
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return worst([apart(p.detach(), w.detach()) for p, w in zip(found, one.parameters(), strict=True)])


def border_bytes(context: Context, fields: dict[str, Any], length: int) -> int:
    """What a rank sends in a scan of the whole length, forward and backward."""
    one, sent = case((0, length // 2, length), fields), list[int]()

    def counted(name: str) -> Any:
        act = getattr(dist, name)

        def noted(whole: Tensor, part: Tensor, **how: Any) -> Any:
            sent.append(min(whole.nbytes, part.nbytes))
            return act(whole, part, **how)

        return patch.object(dist, name, noted)

    now, before = ("all_gather_single", "reduce_scatter_single"), ("all_gather_into_tensor", "reduce_scatter_tensor")
    gathers, scatters = now if hasattr(dist, now[0]) else before
    a, b = one.cuts[context.rank], one.cuts[context.rank + 1]
    tensors, _ = tensors_of(one, length, 0)
    with counted(gathers), counted(scatters):
        y, _ = scanned(context_scan, one, {name: item[:, a:b] for name, item in tensors.items()}, context=context)
        y.sum().backward()
    return sum(sent)


def refusals(context: Context) -> Iterator[tuple[str, str]]:
    """The sentences of what cannot be done."""
    one = case((0, T // 2, T))
    tensors, _ = tensors_of(one, T, 0)
    mine = {name: item[:, one.cuts[context.rank] : one.cuts[context.rank + 1]] for name, item in tensors.items()}
    y, _ = scanned(context_scan, one, mine, context=context)
    attempts = {
        "second derivatives": lambda: torch.autograd.grad(y.sum(), tensors["v"], create_graph=True),
        "no state": lambda: share(nn.Linear(2, 2), context),
        "later tokens": lambda: share(LinearAttention(8, 2, causal=False), context),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            yield name, ""
        except Exception as error:
            yield name, f"{type(error).__name__}: {error}"


FEW = ("gated delta with phi", "titans_linear", "levels", "attention in a window", "nested levels", "rwkv7")


def layer_error(make: Any, context: Context) -> float:
    """One layer on its own: outputs and the gradient of its input."""
    layer = make(torch.Generator().manual_seed(0))
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(2))
    whole = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad((layer(whole)[0] * weight).sum(), whole)
    own = slice(9 * context.rank // context.size, 9 * (context.rank + 1) // context.size)
    mine = x[:, own].clone().requires_grad_()
    share(layer, context)
    y, _ = layer(mine)
    (y * weight[:, own]).sum().backward()
    return worst([apart(y, layer_alone(layer, x)[:, own]), apart(mine.grad, wanted[:, own])])


def layer_alone(layer: nn.Module, x: Tensor) -> Tensor:
    unshare(layer)
    return layer(x)[0]


OPTIONS = {"key_heads": 1, "conv": {"bias": True, "on": "qk"}, "output": {"gate": "sigmoid"}, "lr_bias": False}


def quick_layers() -> dict[str, Any]:
    """Layers by name, from a generator."""
    place = {"dtype": torch.float64}
    delta = MemoryConfig.model_validate(DELTA)
    return {
        "linear attention": lambda g: LinearAttention(8, 2, generator=g, **place),
        "projected queries": lambda g: Memory(8, 2, delta, query_projection="sum", generator=g, **place),
        "layer options": lambda g: Memory(
            8, 2, delta.model_copy(update={"layer_options": OPTIONS}), generator=g, **place
        ),
        "no convolution": lambda g: Memory(8, 2, delta, conv_kernel=0, generator=g, **place),
    }


def small() -> dict[str, Any]:
    """What the default tests look at, of one rank, by name."""
    rank, size = dist.get_rank(), dist.get_world_size()
    warnings.simplefilter("ignore")
    context = Context.of(dist.group.WORLD)
    found: dict[str, Any] = {name: scan_error(one, context) for name, one in quick_scans(size).items()}
    models = quick_models()
    found |= {f"model: {name}": model_error(models[name], context, 12) for name in FEW}
    found |= {f"layer: {name}": layer_error(make, context) for name, make in quick_layers().items()}
    for name, fields in {"dot": {"bias": "dot"}, "l2": {}, "momentum": {"algorithm": "momentum"}}.items():
        found[f"bytes: {name}"] = [border_bytes(context, fields, length) for length in (8, 16, 64, 256)]
    found["refusals"] = dict(refusals(context))
    found["mixed"] = mixed_error(
        rank, size, {"memory": MLP, "heads": 3, "d_key": 4, "d_value": 4, "mlp_ratio": 0}, 1, True
    )
    return found


def large() -> dict[str, float]:
    """Every named rule, every model, on any number of ranks; and tokens fewer than ranks."""
    size = dist.get_world_size()
    warnings.simplefilter("ignore")
    context = Context.of(dist.group.WORLD)
    scans = quick_scans(size) | all_rules(size)
    found = {name: scan_error(one, context) for name, one in scans.items()}
    found |= {f"rounding: {name}": rounding(scans[name]) for name, error in found.items() if not error <= 1e-12}
    for name, fields in quick_models().items():
        found |= {f"model: {name}": model_error(fields, context, 12), f"short: {name}": model_error(fields, context, 2)}
    found |= {f"layer: {name}": layer_error(make, context) for name, make in quick_layers().items()}
    return found


def meshed() -> dict[str, float]:
    """data x context ranks with sharded parameters, with activations kept and computed again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    turns = {"memory": MLP, "heads": 3, "d_key": 4, "d_value": 4, "mlp_ratio": 0}
    mac = {"memory": DELTA, "mlp_ratio": 0, "attention": {"kind": "mac", "segment": 4}}
    runs = {
        "delta": ({"memory": DELTA}, False),
        "levels": ({"levels": LEVELS}, True),
        "turns": (turns, True),
        "mac": (mac, True),
    }
    rounding = {f"rounding: {name}": moved_by_rounding(fields, 2) for name, (fields, _) in runs.items()}
    return rounding | {name: mixed_error(rank, size, fields, 2, again) for name, (fields, again) in runs.items()}
