"""Feature maps written out entry by entry in numpy, as their papers define them."""

from itertools import combinations_with_replacement, product
from math import erf, factorial, prod

import numpy as np


def elu(x):
    return np.array([v + 1 if v > 0 else np.exp(v) for v in x])


def elu_cancelling(x):
    """elu(x) + 1 with expm1, as it is often written."""
    one = x.dtype.type(1)
    return np.where(x > 0, x, np.expm1(x)) + one


def relu(x, shift=0.0):
    return np.array([max(v, 0.0) + shift for v in x])


def squared_relu(x):
    return relu(x) ** 2


def leaky_relu(x, slope=0.01):
    return np.array([max(v, slope * v) for v in x])


def leaky_relu_squared(x, slope=0.01, shift=0.05):
    return np.array([((v if v > 0 else slope * v) + shift) ** 2 for v in x])


def gelu_shifted(x, shift=0.2):
    return np.array([v * 0.5 * (1 + erf(v / np.sqrt(2))) + shift for v in x])


def softplus(x, beta=1.0):
    return np.logaddexp(0, beta * x) / beta


def exp(x, shift=0.0):
    return np.exp(x - shift)


ACTIVATIONS = {
    "gelu": lambda v: gelu_shifted(v, 0.0),
    "relu": relu,
    "silu": lambda v: v / (1 + np.exp(-v)),
    "tanh": np.tanh,
}


def linear(x, weight):
    return np.array([sum(x[i] * weight[i, j] for i in range(len(x))) for j in range(len(weight[0]))])


def mlp(x, w_in, w_out, activation, residual):
    out = linear(ACTIVATIONS[activation](linear(x, w_in)), w_out)
    return x + out if residual else out


def monomials(x, degree):
    """Monomials of one degree times sqrt(multinomial), ordered by largest index, then the next."""
    indices = combinations_with_replacement(range(len(x)), degree)
    out = []
    for chosen in sorted(indices, key=lambda chosen: tuple(sorted(chosen, reverse=True))):
        times = factorial(degree) / prod(factorial(chosen.count(i)) for i in set(chosen))
        out.append(np.sqrt(times) * prod(x[i] for i in chosen))
    return np.array(out)


def tensor_power(x, degree):
    return np.array([prod(x[i] for i in index) for index in product(range(len(x)), repeat=degree)])


def polynomial(x, coefficients):
    return np.concatenate([np.sqrt(a) * monomials(x, i) for i, a in enumerate(coefficients)])


def polynomial_raw(x):
    return np.concatenate([x, tensor_power(x, 2)])


def taylor(x, order, compact):
    scaled = x / len(x) ** 0.25
    block = monomials if compact else tensor_power
    return np.concatenate([block(scaled, i) / np.sqrt(factorial(i)) for i in range(order + 1)])


def dpfp(x, nu):
    y = [max(v, 0.0) for v in x] + [max(-v, 0.0) for v in x]
    return np.array([y[i] * y[i - j] for j in range(1, nu + 1) for i in range(len(y))])


def dpfp_wrong(x, nu):
    """With -relu(x) for relu(-x), as at least one library has it."""
    y = [max(v, 0.0) for v in x] + [-max(v, 0.0) for v in x]
    return np.array([y[i] * y[i - j] for j in range(1, nu + 1) for i in range(len(y))])


def normalise_l2(f, eps):
    return f / np.sqrt(f @ f + eps**2)


def normalise_sum(f, eps):
    return f / (f.sum() + eps)


def sigmoid(x):
    return np.array([1 / (1 + np.exp(-v)) for v in x])


def crelu(x):
    return np.concatenate([relu(x), relu(-x)])


def softmax(x, temperature=1.0):
    powers = [np.exp(v / temperature) for v in x]
    return np.array([p / sum(powers) for p in powers])


def hedgehog(x, weight, bias):
    z = linear(x, weight) + bias
    return np.concatenate([softmax(z), softmax(-z)])


def hedgehog_fused(x, weight, bias):
    """One softmax over both halves, as at least one library has it."""
    z = linear(x, weight) + bias
    return softmax(np.concatenate([2 * z, -2 * z]))


def glu(x, w_gate, w_up):
    return ACTIVATIONS["silu"](linear(x, w_gate)) * linear(x, w_up)


def t2r(x, weight, bias):
    return relu(linear(x, weight) + bias)


def hadamard(x, w_1, w_2):
    return linear(x, w_1) * linear(x, w_2)


def layer_norm(x, eps):
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / len(x)
    return (x - mean) / np.sqrt(variance + eps)


def rebased(x, scale, shift, eps=1e-5):
    return monomials(scale * layer_norm(x, eps) + shift, 2) / np.sqrt(len(x))


def tensor_product(*features):
    return np.array([prod(chosen) for chosen in product(*features)])
