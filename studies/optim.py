"""optim: momentum that keeps features of gradients, beside momentum that keeps gradients.

Where does phi act? tanh leaves its straight part only where numbers of the gradient are about 1: by `input_scale`, or
because some are far larger than the others. Three tasks with noise of a gradient whose variance is infinite, or not,
and one of text.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from hecate.data import Bundled
from hecate.optim import PhiMomentum
from studies.study import Result, Run, Spread, Study, dot_plot, progress

GRID = tuple(10.0 ** (-half / 2) for half in range(11))  # learning rates, from 1 to 1e-5
JUDGES = (1000, 1001)  # seeds that rates and thresholds are chosen on
SIDE, CONDITION, DF = 16, 100.0, 1.5  # of the bowl; degrees of freedom of Student's t
WIDTH, ROWS = 32, 16  # of the regression: inputs, examples in a batch
BYTES, CONTEXT, EMBEDDING, HIDDEN = 256, 8, 16, 64  # of the text model
MOMENTUM = 0.9
LOST = 6.0  # a score that stands for every worse one, and for what is no number


class World:
    """A seed's parameters, their gradients, and how far they have come."""

    def __init__(self, seed: int, *params: Tensor) -> None:
        self.draws = torch.Generator().manual_seed(5000 + seed)
        self.params = [torch.nn.Parameter(p) for p in params]

    def gradients(self) -> None:
        """The next noisy gradient, in `.grad`."""

    def score(self) -> float:
        """Less is better; without noise."""
        raise NotImplementedError


def student(shape: Sequence[int], df: float, g: torch.Generator) -> Tensor:
    """Student's t, normal at df = inf: R. W. Bailey's polar method, Mathematics of Computation 62, 1994."""
    if df == math.inf:
        return torch.randn(*shape, generator=g)
    u, v = (torch.rand(*shape, generator=g, dtype=torch.float64) for _ in range(2))
    return ((df * ((1 - u) ** (-2 / df) - 1)).sqrt() * torch.cos(2 * math.pi * v)).float()


class Bowl(World):
    """w^T H w / 2 of a matrix w, H of a drawn basis; every number of a gradient has noise of its own."""

    def __init__(self, df: float, seed: int) -> None:
        g, size = torch.Generator().manual_seed(seed), SIDE * SIDE
        basis = torch.linalg.qr(torch.randn(size, size, generator=g)).Q
        self.hessian = (basis * torch.logspace(-math.log10(CONDITION), 0, size)) @ basis.T
        self.df = df
        super().__init__(seed, 3 * torch.randn(SIDE, SIDE, generator=g))

    def gradients(self) -> None:
        """Exact, and noise."""
        (w,) = self.params
        exact = (self.hessian @ w.detach().flatten()).view_as(w)
        w.grad = exact + student(w.shape, self.df, self.draws)

    def score(self) -> float:
        """log10 of the loss."""
        w = self.params[0].detach().flatten()
        return math.log10(float(w @ self.hessian @ w) / 2)


class Labels(World):
    """y = W x + noise by least squares: an outlier of a label is one of a whole row of the gradient."""

    def __init__(self, seed: int) -> None:
        self.truth = torch.randn(SIDE, WIDTH, generator=torch.Generator().manual_seed(seed)) * WIDTH**-0.5
        super().__init__(seed, torch.zeros(SIDE, WIDTH))

    def gradients(self) -> None:
        """Of a batch of ROWS."""
        (w,) = self.params
        x = torch.randn(ROWS, WIDTH, generator=self.draws)
        off = x @ (w.detach() - self.truth).T - student((ROWS, SIDE), DF, self.draws)
        w.grad = off.T @ x / ROWS

    def score(self) -> float:
        """log10 of the squared distance from the truth, per output."""
        return math.log10(float((self.params[0].detach() - self.truth).square().sum()) / SIDE)


class Reading(World):
    """The next byte after CONTEXT, by an embedding and two matrices."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        shapes = ((BYTES, EMBEDDING), (HIDDEN, CONTEXT * EMBEDDING), (BYTES, HIDDEN))
        scales = (1.0, *(columns**-0.5 for _, columns in shapes[1:]))
        self.seed, self.step = seed, 0
        super().__init__(seed, *(s * torch.randn(*shape, generator=g) for s, shape in zip(scales, shapes, strict=True)))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of the byte after the last, in nats."""
        embedding, hidden, out = self.params
        read = torch.tanh(F.embedding(tokens, embedding).flatten(1) @ hidden.mT)
        return F.cross_entropy(read @ out.mT, targets[:, -1])

    def gradients(self) -> None:
        """Of the next batch."""
        batch = text().train_batch(self.seed, self.step, 128, CONTEXT)
        self.step += 1
        grads = torch.autograd.grad(self.loss(batch.tokens, batch.targets), self.params)
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad

    @torch.no_grad()
    def score(self) -> float:
        """Bits per byte held out."""
        (batch,) = text().validation_batches(4096, CONTEXT, 1)
        return float(self.loss(batch.tokens, batch.targets)) / math.log(2)


@cache
def text() -> Any:
    """The texts that every Python carries."""
    return Bundled(max_bytes=1 << 18).load()


class Lion(torch.optim.Optimizer):
    """w <- w - lr sign(momentum m + (1 - momentum) g), m <- keep m + (1 - keep) g (arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, keep: float = 0.99) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "keep": keep})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.sub_(group["lr"] * torch.lerp(p.grad, m, group["momentum"]).sign())
                m.lerp_(p.grad, 1 - group["keep"])


class Form(NamedTuple):
    """An optimiser but for its learning rate, and what cuts the gradients of a world before it."""

    make: Callable[..., torch.optim.Optimizer]
    clip: Callable[[list[torch.nn.Parameter]], object] | None = None


SGD = partial(torch.optim.SGD, momentum=MOMENTUM)
PHI = partial(PhiMomentum, momentum=MOMENTUM, on_nonfinite="propagate")
ADAM = partial(torch.optim.AdamW, weight_decay=0.0)
CONTENDERS: dict[str, list[Form]] = {  # of several forms the one that is best on the judges
    "SGD": [Form(SGD)],
    "SGD, norm clipped": [Form(SGD, partial(clip_grad_norm_, max_norm=t)) for t in (1.0, 4.0, 16.0)],
    "SGD, numbers clipped": [Form(SGD, partial(clip_grad_value_, clip_value=t)) for t in (0.1, 1.0, 3.0)],
    "AdamW": [Form(partial(ADAM, betas=(MOMENTUM, b))) for b in (0.95, 0.99, 0.999)],
    "Lion": [Form(partial(Lion, momentum=MOMENTUM, keep=keep)) for keep in (0.9, 0.99, 0.999)],
    "phi: identity, rms": [Form(partial(PHI, feature_map="identity", input_scale="rms"))],
    "phi: tanh, as they come": [Form(partial(PHI, feature_map="tanh", input_scale="none"))],
    "phi: tanh, rms": [Form(partial(PHI, feature_map="tanh", input_scale="rms"))],
}  # fmt: skip
QUICK = ("SGD", "AdamW", "phi: identity, rms", "phi: tanh, rms")


class Task(NamedTuple):
    """Worlds of one kind, steps in them, and learning rates to choose from."""

    world: Callable[[int], World]
    steps: int
    grid: tuple[float, ...] = GRID


TASKS = {
    "noise of every number, t": Task(partial(Bowl, DF), 400),
    "the same, normal": Task(partial(Bowl, math.inf), 400),
    "noise of labels, t": Task(Labels, 400),
    "text (bits)": Task(Reading, 200, GRID[:-3]),
}


def descended(task: Task, form: Form, lr: float, seeds: Sequence[int], steps: int) -> list[float]:
    """The score of every seed after a cosine to 0; one optimiser has all of them, each its own parameters."""
    worlds = [task.world(seed) for seed in seeds]
    optimizer = form.make([p for world in worlds for p in world.params], lr)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
        for world in worlds:
            world.gradients()
            if form.clip is not None:
                form.clip(world.params)
        optimizer.step()
    scores = [world.score() for world in worlds]
    return [min(score, LOST) if math.isfinite(score) else LOST for score in scores]


def optim(run: Run) -> Result:
    """Scores of every contender on every task, at the rate and form that were best on the judges, and phi against its
    baselines."""
    names, tasks = (QUICK, list(TASKS)[:1]) if run.quick else (tuple(CONTENDERS), list(TASKS))
    scores: dict[str, dict[str, list[float]]] = {kind: {} for kind in tasks}
    rates: dict[str, dict[str, float]] = {kind: {} for kind in tasks}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "phi sees")  # that tanh is a straight line there is a result here
        for kind in tasks:
            task = TASKS[kind]
            steps, grid = (100, task.grid[1:6:2]) if run.quick else (task.steps, task.grid)
            for name in progress(names, f"{kind}, {steps} steps"):
                cells = [(form, lr) for form in CONTENDERS[name] for lr in grid]
                form, lr = min(cells, key=lambda cell: sum(descended(task, cell[0], cell[1], JUDGES, steps)))
                rates[kind][name] = lr
                scores[kind][name] = descended(task, form, lr, run.seeds, steps)
    spreads = {kind: {name: Spread.of(scores[kind][name]) for name in names} for kind in tasks}
    rows = [
        [name, *(cell for kind in tasks for cell in (spreads[kind][name], f"{rates[kind][name]:.2g}"))]
        for name in names
    ]
    *others, last = names
    notes = []
    for kind, of in scores.items():
        gaps = (f"{name} {Spread.of(a - b for a, b in zip(of[last], of[name], strict=True))}" for name in others)
        notes.append(f"{kind}: {last} minus {', '.join(gaps)}")
    notes += [
        f"log10 of a loss after 400 steps from the best of {len(GRID)} rates (text: bits per byte, 200 steps), noise "
        f"of Student's t of {DF} degrees of freedom, whose variance is infinite, or normal",
        f"noise of every number: a bowl of {SIDE} x {SIDE} numbers, condition {CONDITION:g}; of labels: least squares "
        f"of {WIDTH} inputs and {SIDE} outputs, {ROWS} examples a step; text: {CONTEXT} bytes through two matrices",
    ]
    columns = ["optimiser", *(text for kind in tasks for text in (kind, "lr"))]
    panels = {kind: {"": list(of.values())} for kind, of in spreads.items()}
    size, data = (3.4 * len(tasks) + 1.6, 3.6), {"scores": scores, "rates": rates}
    return Result(columns, rows, notes, lambda figure: dot_plot(figure, names, panels, "less is better"), size, data)


ABOUT = "Where does the feature map of phi-momentum act, and is it ahead of what others do there?"
OPTIM = Study("optim", ABOUT, optim, seeds=8)
