"""Models as ONNX files, for a whole sequence and for one token at a time, checked against torch in ONNX Runtime.

    export_onnx(model, "folder")    # a language model, or a layer `(x, state) -> (y, state)`

A memory becomes the standard operator `LinearAttention` of opset 27 if its rule is one of that operator's four, else a
`Scan` of ONNX over the program of one token. Needs the extra `onnx`. [ONNX-FILE-D1]
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hecate import states
from hecate.algorithm import GD
from hecate.checks import expect_choice
from hecate.engine import Call, as_loop, scan_answers, scan_arguments, to_tokens
from hecate.errors import ConfigError, HecateError, install_line, retelling
from hecate.files import expect_free, read_whole, write_file, written_folder
from hecate.models import LanguageModel, LinearTransformer
from hecate.nn.memory import rule_repr
from hecate.readout import Ridge
from hecate.retention import Decay, NoRetention
from hecate.rule import MemoryConfig
from hecate.structure import Matrix
from hecate.tape import execute
from hecate.train.trained import home_of, open_model

try:
    import onnx
    import onnx_ir as ir
    import onnxruntime
    from onnx_ir.passes import common
    from onnxscript.rewriter import RewriteRule, rewrite
    from onnxscript.rewriter.rules.common import expand_before_binary_op_rules
except ImportError:
    raise ImportError(f"ONNX needs onnx, onnxscript and onnxruntime: {install_line('onnx')}") from None

SEQUENCE, STEP = "sequence.onnx", "step.onnx"
OPSET = 27
TOLERANCE = 1e-5
"""Largest allowed difference between ONNX Runtime and torch, relative to the largest number of an output."""
WeightDtype = Literal["float32", "float16"]
_OWN = "hecate"  # temporary domain of opset 27's operator, which torch.onnx does not know


class Exported(NamedTuple):
    """The exported folder, the number of nodes of each file, and the largest relative difference from torch."""

    folder: Path
    sequence_nodes: int
    step_nodes: int
    error: float


class _Sequence(nn.Module):
    """A model that takes and returns the tensors of its state: x, past -> y, *present; without `past` it starts
    empty."""

    def __init__(self, model: nn.Module, like: Any) -> None:
        super().__init__()
        self.model, (self.leaves, self.spec) = model, pytree.tree_flatten(like)

    def forward(self, x: Tensor, past: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        y, after = self.model(x, states.with_tensors(self.leaves, self.spec, past) if past else None)
        return y, *states.leaves(after).values()


def export_folder(folder: Path | str, out: Path | str, which: str = "best", dtype: WeightDtype = "float32") -> Exported:
    """`export_onnx` of the language model of a run, a checkpoint, or a folder that `hecate export --to hf` wrote, with
    its config and its tokenizer beside it. [ONNX-FILE-D1]

    Raises:
        ConfigError, CheckpointError: a folder without such a model, and the errors of `export_onnx`.
    """
    folder = Path(folder)
    if (folder / "config.json").is_file():
        from hecate.hf import HecateForCausalLM

        with retelling(ConfigError, f"{folder} is no model of hecate"):
            model: LanguageModel = HecateForCausalLM.from_pretrained(folder).model.lm
        home: Path | None = folder
    else:
        model, home = open_model(folder, which, "cpu").model, home_of(folder)
    names = ("config.yaml", "config.json", "tokenizer.json")
    beside = [home / name for name in names if (home / name).is_file()] if home else ()
    return export_onnx(model, out, beside, dtype)


def export_onnx(
    model: nn.Module, out: Path | str, beside: Sequence[Path] = (), dtype: WeightDtype = "float32"
) -> Exported:
    """Writes `sequence.onnx`, tokens `[B, T]` -> logits and the state after them, and `step.onnx`, tokens `[B, 1]` and
    a state -> logits and the next state, into the new folder `out`, complete or not at all. Batch and length are open.
    [ONNX-FILE-D1]

    State tensors are named `past.PATH` and `present.PATH`, all in float32 except integers. Before anything is written,
    both files are run in ONNX Runtime at other sizes than they were traced with, and compared with torch.

    Args:
        model: a `LanguageModel`, or a layer or `LinearTransformer` that takes x `[B, T, d_model]` in place of tokens.
        out: folder to make.
        beside: files to copy into it.
        dtype: "float16" stores weight matrices in half the bytes, each number rounded once, by at most 2^-11 of itself,
            or 2^-25 below 2^-14; computation and states stay in float32. [ONNX-FILE-D3]

    Raises:
        ConfigError: a model of no known width, or that does not convert, naming the cause, or differs from torch; a
            weight beyond float16.
        CheckpointError: `out` exists, or cannot be written.
    """
    expect_choice(dtype, "dtype", get_args(WeightDtype))
    model = getattr(model, "_orig_mod", model)  # of `torch.compile`
    if not isinstance(model, nn.Module) or (not isinstance(model, LanguageModel) and _width(model) is None):
        raise ConfigError(
            f"{type(model).__name__} is no model and no layer with its width as `d_model`; export the one within it"
        )
    out, model = Path(out), deepcopy(model).float().eval()
    expect_free(out, "choose another --out")
    for layer in model.modules():
        rule = getattr(layer, "config", None)
        if isinstance(rule, MemoryConfig) and isinstance(rule.readout, Ridge):
            raise ConfigError(f"{_title(layer)}: queries solve systems of equations, for which ONNX has no operator")
    if dtype == "float16":
        _round(model)
    with torch.no_grad(), _quiet():
        _, state = model(_draw(model, 2, 3))
        tensors = states.leaves(state)
        names = {way: [f"{way}.{_name_of(place)}" for place in tensors] for way in ("past", "present")}
        sequence = _Sequence(model, state)
        if any(item.dim() < 1 or item.shape[0] != 2 for item in tensors.values()):
            raise ConfigError("the state has tensors that are not by rows, and a file of ONNX takes rows alone")
        whole = _to_onnx(sequence, (_draw(model, 2, 6),), ["input"], ["output", *names["present"]], open_length=True)
        inputs = (_draw(model, 2, 1), [item.contiguous() for item in tensors.values()])
        step = _to_onnx(sequence, inputs, ["input", *names["past"]], ["output", *names["present"]], open_length=False)
        if dtype == "float16":
            for proto in (whole, step):
                _halve(proto)
        error = _worst(_difference(sequence, whole, step, batch, length) for batch, length in ((1, 1), (3, 11)))
    if not error <= TOLERANCE:
        raise ConfigError(
            f"{_title(model)}: ONNX Runtime gives other numbers than torch, by {error:.1e} of the largest, and "
            f"{TOLERANCE:g} is allowed; serve it from torch"
        )
    with written_folder(out, "choose another --out") as folder:
        onnx.save(whole, folder / SEQUENCE)
        onnx.save(step, folder / STEP)
        for path in beside:
            write_file(folder / path.name, read_whole(path))
    return Exported(out, len(whole.graph.node), len(step.graph.node), error)


def _round(model: nn.Module) -> None:
    """Rounds weight matrices to float16 numbers, in place, so that storing them in float16 does not round again."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            rounded = weight.half().float()
            if not rounded.isfinite().all():
                raise ConfigError(
                    f"dtype='float16', and {name} has {weight.abs().max():.3g}, beyond its 65504: use 'float32'"
                )
            weight.data = rounded


def _halve(model: Any) -> None:
    """Stores in float16, followed by a cast, every matrix whose numbers float16 holds exactly; matrices computed by
    the converter may not be such."""
    casts = []
    for weight in model.graph.initializer:
        numbers = onnx.numpy_helper.to_array(weight)
        half = numbers.astype("float16") if numbers.dtype == "float32" and numbers.ndim > 1 else None
        if half is not None and (half == numbers).all():
            source, target = f"{weight.name}.half", weight.name
            casts.append(onnx.helper.make_node("Cast", [source], [target], to=onnx.TensorProto.FLOAT))
            weight.CopyFrom(onnx.numpy_helper.from_array(half, source))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _rules_of(model: nn.Module) -> list[MemoryConfig]:
    """The rules of a model's memories, each once."""
    configs = (getattr(layer, "config", None) for layer in model.modules())
    return list(dict.fromkeys(config for config in configs if isinstance(config, MemoryConfig)))


def _title(model: nn.Module) -> str:
    """Name of a model for messages: its class, and the rule of its memories if all have the same."""
    rules, name = _rules_of(model), type(model).__name__
    return f"{name} of {rule_repr(rules[0])}, readout={rules[0].readout.kind}" if len(rules) == 1 else name


def _by_torch(model: nn.Module) -> list[str]:
    """Knobs of a user's own with derivatives left to `torch.func`, and the methods that would define them."""
    rules = _rules_of(model)
    knobs = dict.fromkeys(k for rule in rules for k in (rule.bias, rule.retention, rule.algorithm, rule.structure))
    return [f"{k._family} {k.kind!r} ({', '.join(k._derivatives)})" for k in knobs if not k.hand_written()]


def _draw(model: nn.Module, batch: int, length: int) -> Tensor:
    """Random input of a model: tokens or x."""
    draws = torch.Generator().manual_seed(length)
    if isinstance(model, LanguageModel):
        return torch.randint(0, model.config.vocab_size or 1, (batch, length), generator=draws)
    return torch.randn(batch, length, _width(model) or 1, generator=draws, dtype=torch.float32)


def _width(model: nn.Module) -> int | None:
    """Width of the x that a layer or a `LinearTransformer` takes; None if it does not tell."""
    width = model.config.embed_dim if isinstance(model, LinearTransformer) else getattr(model, "d_model", None)
    return width if isinstance(width, int) else None


def _name_of(place: str) -> str:
    """`[0].memory.memory['weight']` as `0.memory.memory.weight`."""
    return place.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "").strip(".")


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without the warnings and log messages of torch's exporter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def _to_onnx(
    sequence: _Sequence, arguments: tuple[Any, ...], inputs: list[str], outputs: list[str], *, open_length: bool
) -> Any:
    """The ONNX model of a sequence, traced with these arguments."""
    batch, length = torch.export.Dim("batch", min=1, max=1 << 16), torch.export.Dim("length", min=1, max=1 << 20)
    past = arguments[1:]
    axes: dict[str, Any] = {"x": {0: batch, 1: length} if open_length else {0: batch}}
    if past:
        axes["past"] = [{0: batch} for _ in past[0]]
    try:
        program = torch.export.export(sequence, arguments, dynamic_shapes=axes, strict=False)
        program = program.run_decompositions({torch.ops.hecate.memory_scan.default: _operator})
        converted = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=inputs, output_names=outputs, dynamic_shapes=axes
        )
    except HecateError:
        raise
    except Exception as error:  # torch's converter may raise anything
        said = str(error.__cause__ or error).strip().splitlines()[0]
        if own := _by_torch(sequence.model):
            said = f"torch.func takes derivatives of {' and '.join(own)}, which the exporter cannot follow; write them"
        raise ConfigError(f"{_title(sequence.model)} does not convert to ONNX: {said}") from None
    proto = ir.to_proto(shorter(converted.model))  # type: ignore[union-attr]
    for node in proto.graph.node:
        node.domain = "" if node.domain == _OWN else node.domain
    del proto.opset_import[:]
    proto.opset_import.append(onnx.helper.make_opsetid("", OPSET))
    onnx.checker.check_model(proto)
    return proto


def _difference(sequence: _Sequence, whole: Any, step: Any, batch: int, length: int) -> float:
    """The largest difference from torch over a sequence and the token after it, relative to each output's largest
    number."""
    x, more = _draw(sequence.model, batch, length), _draw(sequence.model, batch, 1)
    wanted = sequence(x)
    further = sequence(more, wanted[1:])
    first, second = map(_session, (whole, step))
    outputs = first.run(None, {"input": x.numpy()})
    names = [item.name.replace("present.", "past.") for item in first.get_outputs()]
    feeds = dict(zip(names, outputs, strict=True)) | {"input": more.numpy()}
    after = second.run(None, {item.name: feeds[item.name] for item in second.get_inputs()})
    pairs = zip((*wanted, *further), map(torch.from_numpy, (*outputs, *after)), strict=True)
    return _worst(float(_relative(got, want)) for want, got in pairs if want.numel())


def _worst(errors: Iterable[float]) -> float:
    """The largest error; NaN if one is NaN, which Python's `max` may lose."""
    return float(torch.tensor([*errors], dtype=torch.float64).max())


def _session(proto: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only: it would warn of what it removes
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _relative(got: Tensor, want: Tensor) -> Tensor:
    got, want = got.double(), want.double()
    return (got - want).abs().max() / want.abs().max().clamp(min=1e-30)


def _operator(call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Decomposition of a scan: ONNX's operator LinearAttention, or a loop."""
    config, tree, _ = scan_arguments(call, tensors)
    rule = update_rule(config)
    masked = tree["write_mask"] is not None or tree["reset_mask"] is not None
    # A write that does not read the memory has one key, `write * phi(k)`, so that erase gates have no effect.
    others = () if tree["gates"] is None else tree["gates"][5 if config.forms.target else 3 :]
    if rule is None or masked or any(gate is not None for gate in others):
        return as_loop(call, tensors)
    asked = Call.of(config, **tree)
    tokens = to_tokens(config, asked.inputs, asked.params, asked.plan.dtype, execute)
    (_, carry), (batch, length, heads, _) = asked.memories[0], tree["k"].shape
    weight = carry.memory[0].unflatten(0, (batch, heads)).mT.contiguous()  # [B, H, P, V]
    v = tokens.v if "delta" in rule else tokens.v * tokens.lr.unsqueeze(-1)
    key = tokens.phi_k if tokens.phi_w is None else tokens.phi_w
    operands: list[Tensor | None] = [tokens.phi_q.flatten(2), key.flatten(2), v.flatten(2), weight]
    operands.append(tokens.retain.log().flatten(2) if "gated" in rule else None)
    if "delta" in rule:
        operands.append(tokens.lr)
    how = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": rule, "scale": 1.0}
    shapes = [(batch, length, heads * v.shape[-1]), weight.shape]
    y, last = torch.onnx.ops.symbolic_multi_out(
        f"{_OWN}::LinearAttention", operands, how, dtypes=[v.dtype, weight.dtype], shapes=shapes, version=1
    )
    outputs = asked.result((y.unflatten(2, (heads, -1)), last.mT.flatten(0, 1).contiguous(), carry.position.clone()))
    return scan_answers(*outputs)


def update_rule(config: MemoryConfig) -> str | None:
    """The `update_rule` of the operator LinearAttention that computes a rule, or None."""
    plain = isinstance(config.structure, Matrix) and not config.forms.transposed and isinstance(config.algorithm, GD)
    plain = plain and isinstance(config.retention, NoRetention | Decay) and not config.retention.anchored
    plain = plain and config.writes == 1 and config.readout.plain
    plain = plain and (config.chunk, config.commit, config.read) == (1, "token", "after")
    if not plain or config.normalizer != "none" or config.feature_map.needs_position:
        return None
    decays = isinstance(config.retention, Decay)
    if config.forms.target:
        return "gated" if decays else "linear"
    if config.forms.error and (not decays or config.decay_order == "before_gradient"):
        return "gated_delta" if decays else "delta"
    return None


# Graphs with fewer nodes and the same results up to rounding: norms as one operator, each shape set once.

TINY = 2.0**-126
"""The smallest normal number of float32."""


def shorter(model: Any) -> Any:
    """Simplifies a model in place: norms as `RMSNormalization`, softplus as one operator, no `Expand` before operators
    that broadcast, and chains of operators that only change the shape as one `Reshape` or none."""
    for rules in (*_RULES, expand_before_binary_op_rules):
        rewrite(model, rules)
    for graph in model.graphs():
        _reshape(graph)
    for tidy in _TIDY:
        tidy(model)
    return model


# Patterns that torch's converter produces for functions of torch and hecate, with operands in its order.


def _softplus(op: Any, x: Any) -> Any:
    return op.Where(op.Greater(x, 20.0), x, op.Softplus(x))


def _rms(op: Any, x: Any, axes: Any, eps: Any, scale: Any) -> Any:
    """The pattern of `torch.rms_norm`."""
    return op.Mul(op.Mul(x, op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(op.Pow(x, 2.0), axes), eps)))), scale)


def _level(op: Any, x: Any, axes: Any) -> tuple[Any, Any]:
    """`hecate.tape.ops.largest` and `levelling`: the largest |x|, and the power of two that brings it near 1."""
    longest = op.ReduceMax(op.Abs(x), axes)
    power = op.Neg(op.Clip(op.Floor(op.Div(op.Log(longest), math.log(2))), -126.0, 126.0))
    return longest, op.Where(op.Greater(longest, 0.0), op.Pow(2.0, power), 1.0)


def _keys(op: Any, x: Any, axes: Any) -> Any:
    """key_norm="l2" as traced, without branches on values."""
    x = op.Mul(x, _level(op, x, axes)[1])
    size = op.ReduceSum(op.Pow(x, 2.0), axes)
    return op.Div(x, op.Sqrt(op.Where(op.Greater(size, 0.0), size, 1.0)))


def _layers(op: Any, x: Any, axes: Any, far: Any, eps: Any) -> Any:
    """qk_norm="l2" as traced, without branches on values."""
    longest, level = _level(op, x, axes)
    level = op.Where(op.Greater(longest, far), level, 1.0)
    x, least = op.Mul(x, level), op.Mul(level, eps)
    size = op.ReduceSum(op.Pow(x, 2.0), axes)
    return op.Mul(x, op.Reciprocal(op.Sqrt(op.Where(op.Equal(size, 0.0), 1.0, op.Add(size, op.Mul(least, least))))))


def _both(op: Any, x: Any, axes: Any, far: Any, eps: Any) -> Any:
    """key_norm after qk_norm, which is the same as key_norm alone."""
    return _keys(op, _layers(op, x, axes, far, eps), axes)


def _unit(op: Any, x: Any, floor: float, eps: float = 1e-6) -> Any:
    """x / sqrt(|x|^2 + eps^2), computed from x / max(sum |x|, floor), so that squares do not overflow. With floor 1 the
    division only acts where eps is negligible; with floor TINY eps is negligible for every x but 0."""
    width = x.shape[-1]
    least, scale = (op.Constant(value=ir.tensor(item, dtype=x.dtype)) for item in ([floor], [width**-0.5] * width))
    near = op.Div(x, op.Max(op.ReduceL1(x, op.Constant(value=ir.tensor([-1]))), least))
    return op.RMSNormalization(near, scale, axis=-1, epsilon=eps**2 / width)


def _root(op: Any, x: Any, eps: Any, scale: Any, **_: Any) -> Any:
    return op.RMSNormalization(x, scale, axis=-1, epsilon=_number(eps))


def _number(value: Any) -> float:
    return float(value.const_value.numpy().item())


def _last(_: Any, x: Any, axes: Any, **__: Any) -> bool:
    """True if a pattern reduces along the last axis."""
    return x.shape is not None and axes.const_value.numpy().tolist() in ([-1], [len(x.shape) - 1])


_RULES = (
    [RewriteRule(_both, lambda op, x, **_: _unit(op, x, TINY), _last)],
    [
        RewriteRule(_keys, lambda op, x, **_: _unit(op, x, TINY), _last),
        RewriteRule(_layers, lambda op, x, eps, **_: _unit(op, x, 1.0, _number(eps)), _last),
        RewriteRule(_rms, _root, _last),
        RewriteRule(_softplus, lambda op, x: op.Softplus(x)),
    ],
)  # fmt: skip
_TIDY = (
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    common.LiftSubgraphInitializersToMainGraphPass(),
    common.DeduplicateInitializersPass(),
    common.CommonSubexpressionEliminationPass(),
    common.RemoveUnusedNodesPass(),
)


def _reshape(graph: Any) -> None:
    """Replaces operators that only change the shape, also several in a row, by one `Reshape`, or by none if the shape
    stays the same."""
    origins: dict[Any, Any] = {}
    for node in tuple(graph):
        if not _says_shape(node):
            continue
        x, y = node.inputs[0], node.outputs[0]
        sizes = [size if isinstance(size, int) else -1 for size in y.shape]
        x = origins.get(x, x)
        if x.shape == y.shape and (not y.is_graph_output() or (x.producer() and not x.is_graph_output())):
            origins[y] = x
            if y.is_graph_output():
                x.name, y.name = y.name, None
            y.replace_all_uses_with(x, replace_graph_outputs=True)
        elif sizes.count(-1) < 2 and 0 not in sizes:
            shape = ir.node("Constant", [], {"value": ir.tensor(sizes, ir.DataType.INT64)})
            said = ir.node("Reshape", [x, shape.outputs[0]])
            (output,) = said.outputs
            output.shape, output.type = y.shape, y.type
            ir.convenience.replace_nodes_and_values(graph, node, [node], [shape, said], [y], [output])
            origins[output] = x


def _says_shape(node: Any) -> bool:
    """True if an operator's output has the elements of its first input, in the same order."""
    x, y = (*node.inputs, None)[0], node.outputs[0]
    if any(item is None or item.shape is None or item.shape.has_unknown_dim() for item in (x, y)):
        return False
    if node.op_type == "Transpose":
        order = [at for at in node.attributes["perm"].value if x.shape[at] != 1]
        return order == sorted(order)
    if node.op_type == "Slice":  # a step of -1 would reverse them
        return x.shape == y.shape and (len(node.inputs) < 5 or bool((node.inputs[4].const_value.numpy() > 0).all()))
    return node.op_type in ("Reshape", "Squeeze", "Unsqueeze")
