"""What a tape shows and what it keeps: prints, norms, checkpoints, bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hecate.errors import ConfigError
from hecate.tape import Block, Run, Tape, Tensors, checkpoint
from tests.tape.tape_blocks import APPLY, SINE, checkpointed, plain, through


def test_print_names_every_call_with_label_shapes_and_source(point):
    tape = Tape()
    (y,) = tape(APPLY, *point, label="layer 0")
    tape(SINE, y, label="layer 1")
    tape(Block("maybe", lambda x, none: ((x, None), None)), y, None)
    lines = str(tape).splitlines()
    assert len(lines) == 3
    assert all(word in lines[0] for word in ("layer 0", "apply", "[2, 3, 3], [2, 3] -> [2, 3]"))
    assert "torch.func" in lines[1] and "torch.func" not in lines[0]
    assert "[2, 3], None -> [2, 3], None" in lines[2]


@pytest.mark.spec("TAPE-NORM-D1")
def test_norms_by_label_look_inside_checkpoints(point):
    inputs = tuple(item.detach() for item in point)
    outer, inner = Tape(observe=True), Tape(observe=True)
    g = torch.ones(2, 3)
    grads = outer.backward(checkpointed(outer, *inputs), [g], inputs)
    expected = inner.backward(plain(inner, *inputs), [g], inputs)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    # The unlabelled tape has one sum per block name; squares of the labelled ones add up to it.
    for name in ("apply", "tanh", "sine"):
        parts = [norm.square() for key, norm in outer.norms().items() if key.endswith(f"/{name}")]
        assert len(parts) == 4
        torch.testing.assert_close(torch.stack(parts).sum().sqrt(), inner.norms()[name])
    assert set(outer.norms("step 3")) == {f"step 3/{n}" for n in ("layer", "apply", "tanh", "sine")}
    torch.testing.assert_close(outer.norms("step 3")["step 3/layer"], g.norm())


def test_norms_of_a_label_leave_out_longer_labels_and_earlier_passes(point):
    x = point[1].detach()
    tape = Tape(observe=True)
    (y,) = tape(SINE, x, label="layer 1")
    (z,) = tape(SINE, y, label="layer 10")
    for scale in (1.0, 2.0):
        tape.backward([z], [scale * torch.ones_like(z)], [x])
        assert set(tape.norms("layer 1")) == {"layer 1/sine"}
        torch.testing.assert_close(tape.norms()["layer 10/sine"], torch.tensor(scale * 6**0.5))


def test_norms_need_an_observing_tape():
    with pytest.raises(ConfigError, match="observe=True"):
        Tape().norms()


@pytest.mark.spec("TAPE-CKPT-I1")
def test_checkpoint_changes_no_bit(point):
    results = []
    for program in (plain, checkpointed):
        y = through(program)(*point)
        results.append((y, *torch.autograd.grad(y.square().sum(), point)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bytes_count_shared_storage_once_and_meta_tensors_too():
    for place in ("cpu", "meta"):
        tape = Tape()
        x = torch.zeros(10, 10, device=place)
        tape(Block("view", lambda x: ((x[0], x + 1), x)), x)
        assert tape.bytes == 2 * 100 * 8


@pytest.mark.spec("TAPE-BRIDGE-I3")
def test_bridge_saves_its_inputs_only(point):
    def saved(mode: str) -> int:
        sizes: dict[int, int] = {}

        def pack(item: Tensor) -> Tensor:
            sizes[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
            return item

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda item: item):
            through(plain, mode)(*point)
        return sum(sizes.values())

    assert saved("tape") == sum(item.untyped_storage().nbytes() for item in point)
    assert saved("torch") > 2 * saved("tape")


@pytest.mark.spec("TAPE-BRIDGE-I3")
def test_bridge_saves_what_checkpoints_return_and_runs_them_once(point):
    runs = []

    def counting(x: Tensor) -> tuple[Tensors, Tensor]:
        runs.append(x)
        return (x.sin(),), x

    sine = Block("sine", counting, lambda x, g: (g * x.cos(),))

    def program(run: Run, x: Tensor) -> Tensors:
        for _ in range(4):
            (x,) = run(checkpoint("step", lambda run, x: run(sine, x)), x)
        return (x,)

    f, x = through(program), point[1]
    for twice, forwards in ((False, 4 + 4), (True, 4 + 4 + 4)):
        runs.clear()
        (grad,) = torch.autograd.grad(f(x).sum(), x, create_graph=twice)
        assert len(runs) == forwards and grad.requires_grad == twice
    runs.clear()
    with torch.no_grad():
        f(x)
    assert len(runs) == 4
    y = f(x)
    y.detach().mul_(2)  # the last checkpoint's output, saved
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x)
