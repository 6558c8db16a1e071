"""Small faults, each of a kind that someone has made: one line replaced by a wrong one."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """`old` (which occurs once in the file at `path`) becomes `new`; `tests` should notice."""

    path: str
    old: str
    new: str
    tests: str

    def planted(self, text: str) -> str:
        """The file's text with the fault."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path}: {self.old!r} occurs {text.count(self.old)} times")
        return text.replace(self.old, self.new)


PHI = "tests/phi"
KNOBS = "tests/rule tests/engine/test_reference.py"
ENGINES = (
    "tests/engine/test_reference.py tests/engine/test_masks.py tests/engine/test_properties.py"
)
CHUNK = "tests/engine/test_chunk.py"
TAPE = "tests/tape tests/engine/test_tape.py"
NN = "tests/nn"


def _of(folder: str, tests: str, *faults: tuple[str, str, str]) -> list[Fault]:
    return [Fault(f"hecate/{folder}/{name}.py", old, new, tests) for name, old, new in faults]


FAULTS = [
    *_of(
        "engine",
        "tests/engine/test_features.py",
        ("features", "return x + y, after", "return y, after"),
        ("features", "k = torch.where(write_mask[..., None, None], k, 0.0)", "pass"),
        ("features", "reset_mask=reset_mask", "reset_mask=None"),
        ("features", "state=state", "state=None"),
        ("features", "answer(q), answer(k)", "answer(k), answer(k)"),
        ("features", "            k,\n            v,", "            x,\n            v,"),
    ),
    *_of(
        "nn",
        "tests/nn/test_feature_memory.py",
        ("memory", "None if state is None else state.features", "None"),
        ("rule", "            k,\n            k,", "            k,\n            q,"),
        ("rule", "initial=self.initial.tensors,\n            write_mask=write_mask", "write_mask=write_mask"),
    ),
    *_of(
        "engine",
        "tests/engine/test_positions.py",
        ("positions", "before = write.cumsum(1) - write.long()", "before = write.cumsum(1)"),
        ("positions", "position[:, -1] + (1 if written is None else written[:, -1])", "position[:, -1]"),
        ("positions", "start = -seen.unsqueeze(1)", "start = 0 * seen.unsqueeze(1)"),
        ("positions", "start).cummax(1).values", "start)"),
        ("positions", "if write is None:", "if True:"),
        ("prepare", "inputs.position.unsqueeze(-1)", "inputs.position.flip(1).unsqueeze(-1)"),
    ),
    *_of(
        "phi",
        PHI,
        # Feature maps: definitions.
        ("random_fourier", "orthogonal=self.orthogonal) / self.sigma", "orthogonal=self.orthogonal) * self.sigma"),
        ("random_fourier", "features = phase.cos() * math.sqrt(2 / self.d_phi)", "features = phase.cos() * math.sqrt(1 / self.d_phi)"),
        ("random_fourier", 'return {"w": w, "b": 2 * math.pi * turns}', 'return {"w": w, "b": math.pi * turns}'),
        ("random_fourier", "/ (2 * self.sigma**2)).exp()", "/ self.sigma**2).exp()"),
        ("favor", "half = scaled.square().sum(-1, keepdim=True) / 2", "half = scaled.square().sum(-1, keepdim=True)"),
        ("favor", "features = (both - half - math.log(both.shape[-1]) / 2).exp()", "features = (both - half - math.log(both.shape[-1])).exp()"),
        ("favor", "float(x.shape[-1] ** -0.25)", "float(x.shape[-1] ** -0.5)"),
        ("elu", "tail = x.clamp(max=0).exp()", "tail = x.clamp(max=0).expm1() + 1"),
        ("elu", "return torch.relu(x) + tail, tail", "return torch.relu(x), tail"),
        ("random", "signed: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0)", "signed: Tensor = q"),
        ("random", "columns = columns / columns.norm(dim=0)", "columns = columns / columns.norm(dim=1, keepdim=True)"),
        ("taylor", "return 1 / math.sqrt(math.factorial(i))", "return 1 / math.factorial(i)"),
        ("dpfp", "rolled = [y.roll(j, -1) for j in range(1, self.nu + 1)]", "rolled = [y.roll(j - 1, -1) for j in range(1, self.nu + 1)]"),
        ("polynomial", "return [math.sqrt(a) for a in self._fixed()]", "return list(self._fixed())"),
        ("normalise", "return features.sum(-1, keepdim=True) + self.eps", "return features.mean(-1, keepdim=True) + self.eps"),
        ("odd_lift", "return (ahead - behind) / 2, (residuals, mirrored)", "return (ahead + behind) / 2, (residuals, mirrored)"),
        ("performer_relu", "w, lift = w / math.sqrt(w.shape[-1]), self._lift(w)", "lift = self._lift(w)"),
        ("gelu_shifted", "positive = self.shift >= _DEPTH", "positive = self.shift >= 0.1"),
        ("cosformer", "return behind.sin(), ahead.sin()", "return ahead.sin(), behind.sin()"),
        ("cosformer", "(position <= self.max_length)", "(position <= 2 * self.max_length)"),
        ("cosformer", "return behind.sin(), ahead.sin()", "return ahead.cos(), ahead.sin()"),
        ("cosformer", "torch.addcmul(g_cos * cos, g_sin, sin)", "torch.addcmul(g_cos * cos, g_sin, sin, value=-1)"),
        ("nested", "        **params,\n", ""),
        # Feature maps: derivatives.
        ("random_fourier", "gphase = phase.sin() * g * -math.sqrt(2 / self.d_phi)", "gphase = phase.cos() * g * -math.sqrt(2 / self.d_phi)"),
        ("random_fourier", "(phase.cos() * gsin - phase.sin() * gcos)", "(phase.cos() * gsin + phase.sin() * gcos)"),
        ("favor", "gz = plus - minus", "gz = plus + minus"),
        ("favor", "gz, radial = gsin * cos - gcos * sin, -radial", "gz = gsin * cos - gcos * sin"),
        ("elu", "return g * residuals, {}", "return g, {}"),
        ("dpfp", "(gj * y).roll(-j, -1)", "(gj * y).roll(j, -1)"),
        ("mlp", "gbefore = gafter * activate(self.activation, before, 1)", "gbefore = gafter * activate(self.activation, before, 0)"),
        ("mlp", "gx = gx + g", "gx = gx"),
        ("normalise", "normalised * along if", "wide * along if"),
        ("odd_lift", "return (gx + gmirrored) / 2,", "return (gx - gmirrored) / 2,"),
        ("squared_relu", "return 2 * torch.relu(x)", "return torch.relu(x)"),
        ("leaky_relu_squared", "return torch.ops.aten.leaky_relu_backward(outer, x, self.slope, False)", "return outer"),
        ("softplus", "return torch.sigmoid(self.beta * x)", "return torch.sigmoid(x)"),
        ("base", "return project(g, w.mT), xs.mT @ gs", "return project(g, w.mT), xs.mT @ gs * 0.5"),
        ("polynomial", "factor = raw.sigmoid() / (2 *", "factor = raw.sigmoid() / (1 *"),
    ),
    *_of(
        "bias",
        KNOBS,
        ("dot", "-target", "target"),
        ("huber", "return error.clamp(-self.delta, self.delta)", "return error.clamp(-self.delta, 2 * self.delta)"),
        ("huber", "linear = self.delta * size - 0.5 * self.delta**2", "linear = self.delta * size"),
        ("huber", "(tangent - unit * along)", "tangent"),
        ("lp", "diagonal = (self.p - 1) * size.pow(self.p - 2)", "diagonal = self.p * size.pow(self.p - 2)"),
        ("lp", "return torch.where(live, size.pow(self.p), 0.0).sum(-1) / self.p", "return torch.where(live, size.pow(self.p), 0.0).sum(-1)"),
        ("lp", "diagonal = diagonal + size.pow(self.p - 1) * self.eps**2 / radius.pow(3)", "pass"),
    ),
    *_of(
        "retention",
        KNOBS,
        ("decay", "return over(retain, memory) * memory + direction", "return over(1 - retain, memory) * memory + direction"),
        ("decay", "return over(retain, memory) * g, g, sum_to_gate(g * memory, retain)", "return g, g, sum_to_gate(g * memory, retain)"),
    ),
    *_of(
        "algorithm",
        KNOBS,
        ("base", "return (-over(lr, grad) * grad,)", "return (over(lr, grad) * grad,)"),
        ("momentum", "carried = torch.addcmul(keep * slots[0],", "carried = keep * torch.addcmul(slots[0],"),
        ("momentum", "sum_to_gate(slot * g, momentum) + look", "sum_to_gate(grad * g, momentum) + look"),
        ("momentum", "g = gstep = carried + ahead", "g = gstep = ahead"),
    ),
    *_of(
        "structure",
        KNOBS,
        ("graph", "values.add(node.source, gh[node.weight])", "values.add(node.source, None)"),
        ("graph", "outers(gweights[node.weight], g, c)", "outers(gweights[node.weight], g, -c)"),
        ("ops", "c * g * activate(self.kind, x, 2)", "c * g * activate(self.kind, x, 1)"),
    ),
    *_of(
        "tape",
        KNOBS,
        ("activation", "torch.addcmul(x, x, s, value=-2) + 2", "torch.addcmul(x, x, s, value=-1) + 2"),
        ("activation", "* (2 - square)", "* (1 - square)"),
        ("ops", "return product.sum(dim=axes) if axes", "return 2 * product.sum(dim=axes) if axes"),
    ),
    *_of(
        "tape",
        TAPE,
        ("tape", "return self._walk(reversed(self.calls), outputs", "return self._walk(iter(self.calls), outputs"),
    ),
    *_of(
        "engine",
        ENGINES,
        ("prepare", "along = product.sum(-1, keepdim=True)", "along = torch.zeros_like(norm)"),
        ("prepare", "return ((g - (share * g).sum(-1, keepdim=True)) / total,)", "return (g / total,)"),
        ("prepare", "return (lr / (1 + lr * phi.square().sum(-1)),), (lr, phi)", "return (lr / (1 + phi.square().sum(-1)),), (lr, phi)"),
        ("prepare", "return g / total, (-2 * g * lr * lr / total).unsqueeze(-1) * phi", "return g / total, (-2 * g * lr / total).unsqueeze(-1) * phi"),
        ("prepare", "torch.where(filled, -(g * mean).sum(-1, keepdim=True), 0.0)", "torch.where(filled, (g * mean).sum(-1, keepdim=True), 0.0)"),
        ("prepare", "phi_q = one(run(norm, phi_q, label=\"key_norm\"))", "pass"),
        ("products", "later = torch.ones(size, size, dtype=torch.bool, device=gates.device).tril(-1)", "later = torch.ones(size, size, dtype=torch.bool, device=gates.device).tril()"),
        ("coefficients", "return torch.nn.functional.pad(weight[..., :-1], (1, 0), value=first)", "return torch.nn.functional.pad(weight[..., 1:], (0, 1), value=first)"),
        ("coefficients", "adds = spans if write is None else spans * write.unsqueeze(-2)", "adds = spans"),
        ("coefficients", "return gate if write is None else torch.where(write, gate, 1.0)", "return gate"),
        ("coefficients", "same = count.unsqueeze(-1) == count.unsqueeze(-2)", "same = count.unsqueeze(-1) >= count.unsqueeze(-2)"),
        ("tokens", "return None, torch.where(wide, g, 0.0), torch.where(wide, 0.0, g)", "return None, g, torch.where(wide, 0.0, g)"),
    ),
    *_of(
        "engine",
        CHUNK,
        ("commits", "return g * gates.prod(1), (g * total).unsqueeze(1) * earlier * later", "return g * gates.prod(1), (g * total).unsqueeze(1) * later"),
        ("layers", "gslot = torch.addcmul(over(s, g) * g, over(e, g), gcarried)", "gslot = over(s, g) * g"),
    ),
    *_of(
        "nn",
        "tests/nn/test_sliding.py tests/nn/test_compose.py",
        ("slots", "place > rank - self.window", "place >= rank - self.window"),
        ("slots", "(place < end)", "(place <= end)"),
        ("slots", "(shown == own) &", "(shown <= own) & (shown >= 0) &"),
        ("slots", "document = torch.where(write, own, -1)", "document = own"),
        ("slots", "hidden = length - count[:, -1:]", "hidden = 0 * count[:, -1:]"),
        ("slots", "past = torch.where(present, 0, -1)", "past = torch.zeros_like(present).long()"),
        ("slots", "+ self.lead - (window - 1)", "+ self.lead - window"),
        ("positions", "a * sin + b * cos", "a * sin - b * cos"),
        ("sliding", "blocks.reaches_all and", "blocks.single and"),
        ("sliding", "own_k = F.pad(own_k[..., self.width // 2 :], (self.width // 2, 0))", "pass"),
        ("compose/gate", "1 + torch.tanh(weight[0] * answer)", "torch.sigmoid(weight[0] * answer)"),
        ("compose/segments", "torch.where(reset, before, 0).cummax(1).values", "0"),
        ("compose/layer", "return self.memory(none, memory, write_mask=_nowhere(none))[1]", "return memory"),
        ("compose/layer", "state.start, write_mask=_nowhere(x[:, part])", "state.start"),
        ("compose/layer", "None if piece.aligned else state.attention", "None"),
        ("compose/layer", "state = where_rows(place == size, begun, state)", "state = begun"),
    ),
    *_of(
        "nn",
        NN,
        ("gates", 'starts = {"lr": 0.5 * (1 - momentum)}', 'starts = {"lr": 0.5}'),
        ("gates", "self.bias[name].fill_(math.log(inside / (1 - inside)))", "self.bias[name].fill_(inside)"),
        ("conv", "tap = padded[:, reach - j : reach - j + length]", "tap = padded[:, reach - j + 1 : reach - j + 1 + length]"),
        ("conv", "return nn.functional.silu(total), padded[:, length:]", "return nn.functional.silu(total), padded[:, -reach:] * 0"),
    ),
    *_of(
        "bias",
        "tests/bias tests/rule/test_knobs.py",
        ("kl", "return pred.softmax(-1) - self._told(target)", "return pred.softmax(-1) + self._told(target)"),
        ("kl", "return share * (tangent - (share * tangent).sum(-1, keepdim=True))", "return share * tangent"),
        ("kl", "return (target / self.temperature).softmax(-1)", "return (target * self.temperature).softmax(-1)"),
        ("l1", "return (self.eps / radius).square() / radius * tangent", "return self.eps / radius * tangent"),
        ("robust", "return error + self.radius * error / self._radius(error)", "return error - self.radius * error / self._radius(error)"),
        ("robust", "return tangent + self.radius * across / radius", "return tangent + self.radius * across"),
        ("yaad", "return error.square().sum(-1, keepdim=True) <= self.delta**2", "return error.square().sum(-1, keepdim=True) <= self.delta"),
    ),
    *_of(
        "retention",
        "tests/retention tests/rule/test_knobs.py",
        ("elastic_net", "return moved.sign() * (moved.abs() - self.threshold).relu()", "return moved.sign() * (moved.abs() - self.threshold).abs()"),
        ("l2", "return 1 / (1 + self.penalty)", "return 1 - self.penalty"),
        ("l2", "return kept * memory + direction if self.decoupled else kept * (memory + direction)", "return kept * memory + direction"),
        ("links", "return self.scale * dual.softmax(-1)", "return dual.softmax(-1)"),
        ("links", "return share.log() - (-share).log1p()", "return share.log()"),
        ("links", "return self.scale * share * (g - (share * g).sum(-1, keepdim=True))", "return self.scale * share * g"),
        ("mirror", "return link.memory(over(retain, memory) * link.dual(memory) + direction)", "return link.memory(link.dual(memory) + direction)"),
        ("norm_cap", "return torch.where(beyond, free * (self.norm / length), free)", "return torch.where(beyond, free / length, free)"),
        ("sphere", "return over(retain, memory) * memory + tangent", "return memory + tangent"),
        ("sphere", "return unit * self._length(memory)[0] if self.form", "return unit if self.form"),
        ("sphere", "torch.where(live, memory / kept * outward, 0.0)", "torch.where(live, memory * outward, 0.0)"),
    ),
    *_of(
        "algorithm",
        "tests/rule/test_algorithms.py",
        ("newton_schulz", "return fused(x, inner, x, beta=a)", "return fused(x, inner, x, beta=b)"),
        ("newton_schulz", "inner = b * outer + c * (gram @ outer + outer @ gram)", "inner = b * outer + c * gram @ outer"),
        ("newton_schulz", "return rows.mT if rows.shape[-2] > rows.shape[-1] else rows", "return rows"),
        ("adaptive", "return carried, square, (square + self.eps**2).rsqrt()", "return carried, square, square.sqrt() + self.eps"),
        ("delta_momentum", "gg = gg - 2 * c.square()", "gg = gg + 2 * c.square()"),
        ("deep_momentum", "rate / (1 + rate * (_square(hidden) + _square(w_out) * _square(rows)))", "rate / (1 + _square(hidden))"),
        ("ftrl", "return self._link(total) - self._link(slots[0]), total", "return self._link(total), total"),
        ("implicit", "return curvature * (phi.square() if diagonal", "return 0.5 * (phi.square() if diagonal"),
        ("rls", "new = (start + change - rank_one) / self.discount - start", "new = start + change - rank_one - start"),
        ("omega", "block = _weighted(self.decay**age)", "block = _weighted(self.decay ** (age + 1))"),
        ("omega", "return tuple(torch.cat([old[:, 1:], new.unsqueeze(1)], 1) for old, new in pairs), None", "return tuple(torch.cat([new.unsqueeze(1), old[:, 1:]], 1) for old, new in pairs), None"),
    ),
    *_of(
        "structure",
        "tests/structure tests/rule/test_bounded.py",
        ("vector", "return (u * p,), memory[0] * u", "return (u * p,), memory[0] * p"),
        ("slots", "return slots - unit * (unit * slots).sum(1, keepdim=True)", "return slots"),
        ("ops", "return (-(along * y + gy * jc + cy * jg) * scale,), jc", "return (-(along * y + gy * jc) * scale,), jc"),
        ("two_pass", "(error,) = pull(code - a)", "error = code - a"),
    ),
    *_of(
        "engine",
        "tests/engine/test_compiled.py",
        ("narrow", "G4 = living(G4, four(after, i * ROWS * W, W, width))", "pass"),
        ("narrow", "            M4 = shrunken(M4, cut)\n            keep(after", "            keep(after"),
        ("rows", "x0, x1 = alive(x0, load(A, after)), alive(x1, load(A, after + P))", "pass"),
        ("rows", "n0, n1 = load(A, after + j), load(A, after + P + j)", "pass"),
        ("kernels", "end if cut is not None else end - 1", "end - 1"),
        ("rows", "return n // heads * heads * T + n % heads", "return n // heads * heads * T"),
        ("launch", "return self.tokens.retain.dim() > self.tokens.lr.dim()", "return self.tokens.retain.dim() == 3"),
    ),
    *_of(
        "engine",
        "tests/engine/test_parallel.py tests/engine/test_implicit.py",
        ("implicit", "return slope, -(slope @ u.mT).tril(-1), gv", "return slope, -(slope @ u.mT).tril(), gv"),
    ),
    *_of(
        "cms",
        "tests/cms/test_reference.py",
        ("nested", "for index in reversed(range(1, len(levels))):", "for index in range(1, len(levels)):"),
        ("nested", "(count % periods[index] == 0)", "(count % periods[index - 1] == 0)"),
        ("nested", "normalizer = _fresh(source.normalizer, normalizer)", "pass"),
        ("nested", "slots={name: torch.zeros_like(slot) for name, slot in like.slots.items()},", ""),
        ("nested", "{0, *(end + 1 for end in ends), length}", "{0, *ends, length}"),
        ("nested", "committed = write & (count", "committed = (count"),
        ("flow", "seen = one(run(_plain(\"add\", torch.add), seen, out))", "seen = out"),
        ("cms", "weights = [len(outputs) ** -0.5] * len(outputs)", "weights = [1 / len(outputs)] * len(outputs)"),
        ("config", "{\"chunk\": self.period, \"commit\": \"chunk\"}", "{\"chunk\": self.period}"),
    ),
    *_of(
        "cms",
        "tests/cms/test_streaming.py",
        ("cms", "written = count[:, -1]", "written = count[:, 0]"),
    ),
    *_of(
        "nn",
        "tests/cms/test_firing.py",
        ("gates", "+ (gate - gate.detach())", "- (gate - gate.detach())"),
        ("gates", "retain * fired + (1 - fired)", "retain * fired"),
        ("gates", "lr = lr * fired", "lr = lr * fired.detach()"),
        ("gates", "(gate > 0.5)", "(gate < 0.5)"),
    ),
    *_of(
        "cms",
        "tests/cms/test_growth.py",
        ("growth", "((count + 1) / count) ** 0.5", "(count + 1) / count"),
        ("growth", "theirs[places] = mine", "theirs[: len(mine)] = mine"),
        ("growth", "nn.init.zeros_(new.memories[at].out.weight)", "pass"),
        ("growth", "state.written % memory.config.chunk", "0 * state.written"),
    ),
    *_of(
        "cms",
        "tests/cms/test_health.py",
        ("health", "y.numel() ** -0.5", "1.0"),
        ("health", "rates = retain.double().log().mean((0, 1))", "rates = retain.double().mean((0, 1)).log()"),
        ("health", "bool((passed.written < every).all())", "found.commits == 0"),
    ),
    *_of(
        "nn",
        "tests/cms/test_local.py",
        ("projection", "opens = opens & write", "pass"),
        ("projection", "opens = opens | reset", "pass"),
        ("projection", "span = span + unit @ unit.mT", "span = span + k[:, t].unsqueeze(-1) @ unit.mT"),
        ("projection", "unit = phi_k / torch.where(square > 0, square, 1.0).sqrt()", "unit = phi_k"),
        ("memory", "state.memory.position[:, 0], state.projection", "0 * state.memory.position[:, 0], state.projection"),
    ),
    *_of(
        "cms",
        "tests/cms/test_local.py",
        ("cms", "(before % level.restart == 0) & (before != count)", "count % level.restart == 0"),
    ),
    *_of(
        "optim",
        "tests/optim",
        ("leveled", 'return group["elapsed"] >= group["period"]', 'return group["elapsed"] > group["period"]'),
        ("leveled", 'window / group["elapsed"]', 'window / (group["elapsed"] + 1)'),
        ("leveled", "self.inner.state, self.inner.param_groups = self.state, due", "self.inner.state = self.state"),
        ("leveled", "self._windows.pop(parameter, None)", "self._windows.get(parameter)"),
        ("leveled", "copy=window is None", "copy=False"),
        ("leveled", "self._windows = windows\n", "self._windows.update(windows)\n"),
        ("leveled", "self.inner.__setstate__(shared)", "pass"),
    ),
    *_of(
        "lab",
        "tests/lab/test_levels.py",
        ("two_paces", '"read": "before"', '"read": "after"'),
        ("two_paces", "for level in reversed(levels):", "for level in levels:"),
        ("two_paces", "math.nan).flip(-1)", "math.nan)"),
    ),
    *_of(
        "optim",
        "tests/optim/test_muon_and_m3.py",
        ("m3", "counts = [int(state[STEP]) // period for state in ended]", "counts = [int(state[STEP]) for state in ended]"),
        ("m3", "put(group, state, WINDOW, torch.zeros_like(state[WINDOW]))", "pass"),
        ("m3", "scale = 1 if summed else 1 - group", "scale = 1 if summed else 1 + 0 * group"),
        ("muon", "g.lerp(m, momentum)", "m.lerp(g, momentum)"),
        ("orthogonal", "tall = matrix.shape[-2] > matrix.shape[-1]", "tall = False"),
    ),
    *_of(
        "optim",
        "tests/optim/test_delta_and_deep.py",
        ("delta_momentum", "return square.max() if group", "return square.sum() if group"),
        ("delta_momentum", "torch.minimum(factor, momentum) if stable else factor", "factor"),
        ("deep_momentum", "every = [self.state[p] for p in group", "every = states or [self.state[p] for p in group"),
    ),
    *_of(
        "optim",
        "tests/optim/test_dgd.py",
        ("dgd", "torch.tril(xs @ xs.mT, -1) * cs.mT", "torch.tril(xs @ xs.mT, -1) * cs"),
        ("dgd", "g = -g if group", "g = g if group"),
        ("dgd", "if isinstance(output, Tensor) and output.requires_grad:", "if isinstance(output, Tensor):"),
    ),
]  # fmt: skip
