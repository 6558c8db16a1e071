"""The named rules in LaTeX, one equation a line, as a scan computes them: the layer's gates are given to it.

The letters are those of `docs/pages/notation.md`. k_t and q_t stand for phi(k_t) and phi(q_t) behind `key_norm`, where
phi is the identity; u_t = d ell / d prediction, and C is the last token ahead of t's chunk.
"""

from __future__ import annotations

_DELTA = r"M_{t-1} (I - \eta_t k_t k_t^\top) + \eta_t v_t k_t^\top"
_MATRIX_READ = r"y_t = M_t q_t"
_SCALED_READ = r"y_t = \frac{1}{\sqrt{d}} M_t q_t"
_MOMENTUM = r"S_t = \mu_t S_{t-1} - \eta_t (M_{t-1} k_t - v_t) k_t^\top"
_RESIDUAL = r"f(M, p) = p + \mathrm{LN}(W_2\, \mathrm{gelu}(W_1 p))"
_GRADIENT = r"G_t = \nabla_M \ell(f(M_{t-1}, k_t), v_t)"
_RIDGE_STATES = (r"M_t = \alpha_t M_{t-1} + \eta_t v_t k_t^\top,\quad H_t = \alpha_t H_{t-1} + \eta_t k_t k_t^\top",)
_SLOT_STATES = (
    r"K_t = \mathrm{diag}(\alpha_t) K_{t-1} + s_t k_t^\top,\quad V_t = V_{t-1} \mathrm{diag}(\alpha_t) + v_t s_t^\top",
)
_SLOT_READ = r"y_t = V_t\, \mathrm{softmax}(K_t q_t)"
_CURVED = (
    r"\bar k_t = k_t \odot \mathrm{base}^{-r_t / (1 + |r_t|)},\quad r_t = \log(A_t + \varepsilon) - c,\quad "
    r"A_t = \mathrm{decay}_t A_{t-1} + \mathrm{rate}_t\, k_t \odot k_t"
)
_WINDOW = r"G_t = \sum_{a=0}^{3} 0.9^a (M_{t-1} \phi(k_{t-a}) - v_{t-a}) \phi(k_{t-a})^\top"
_NORMED = r"\frac{\eta_t}{1 + \eta_t \Vert k_t \Vert^2}"

_LINES: dict[str, tuple[str, ...]] = {
    "hebbian": (r"M_t = M_{t-1} + v_t k_t^\top", _MATRIX_READ),
    "linear_attention": (
        r"M_t = M_{t-1} + v_t \phi(k_t)^\top,\quad z_t = z_{t-1} + \phi(k_t)",
        r"y_t = \frac{M_t \phi(q_t)}{z_t^\top \phi(q_t)},\quad \phi = \mathrm{elu}",
    ),
    "retnet": (r"M_t = \alpha_h M_{t-1} + v_t k_t^\top,\quad \alpha_h = 1 - 2^{-5-h}", _SCALED_READ),
    "gla": (r"M_t = M_{t-1} \mathrm{diag}(\alpha_t) + v_t k_t^\top", _SCALED_READ),
    "mamba2": (
        r"M_t = \alpha_t M_{t-1} + \eta_t v_t k_t^\top,\quad \alpha_t = \exp(-A \eta_t)",
        r"y_t = M_t q_t + d v_t",
    ),
    "delta": (rf"M_t = {_DELTA},\quad \Vert k_t \Vert = 1", _MATRIX_READ),
    "gated_delta": (
        r"M_t = \alpha_t M_{t-1} (I - \eta_t k_t k_t^\top) + \eta_t v_t k_t^\top,\quad \Vert k_t \Vert = 1",
        _MATRIX_READ,
    ),
    "kda": (
        r"M_t = M_{t-1} \mathrm{diag}(\alpha_t) (I - \eta_t k_t k_t^\top) + \eta_t v_t k_t^\top,\quad "
        r"\Vert k_t \Vert = 1",
        _MATRIX_READ,
    ),
    "gated_delta_2": (
        r"M_t = M_{t-1} \mathrm{diag}(\alpha_t) (I - (\mathrm{erase}_t \odot k_t) k_t^\top) + "
        r"(\mathrm{value}_t \odot v_t) k_t^\top,\quad \Vert k_t \Vert = 1",
        _MATRIX_READ,
    ),
    "delta_product": (
        r"M_{t,0} = \alpha_t M_{t-1},\quad M_{t,j} = M_{t,j-1} (I - \eta_{t,j} k_{t,j} k_{t,j}^\top) + "
        r"\eta_{t,j} v_{t,j} k_{t,j}^\top",
        r"M_t = M_{t,n},\quad n = \mathrm{writes},\quad y_t = M_t q_t,\quad \Vert k_{t,j} \Vert = 1",
    ),
    "rwkv7": (
        r"M_t = M_{t-1} \mathrm{diag}(\alpha_t) - (M_{t-1} \kappa_t) (a_t \odot \kappa_t)^\top + v_t \tilde k_t^\top,"
        r"\quad \Vert \kappa_t \Vert = 1",
        _MATRIX_READ,
    ),
    "comba": (
        r"M_t = \alpha_t M_{t-1} (I - \eta_t\, c\, k_t k_t^\top) + \eta_t v_t k_t^\top,\quad "
        r"c = \mathrm{erase}_t,\quad \Vert k_t \Vert = 1",
        r"y_t = M_t \hat q_t,\quad \hat q_t \propto q_t - d\, c\, k_t",
    ),
    "efla": (
        r"M_t = M_{t-1} (I - c_t k_t k_t^\top) + c_t v_t k_t^\top,\quad "
        r"c_t = \frac{1 - \exp(-\eta_t \Vert k_t \Vert^2)}{\Vert k_t \Vert^2}",
        _MATRIX_READ,
    ),
    "momentum_delta": (
        r"S_t = \mu_t S_{t-1} - \eta_t (\alpha_t M_{t-1} k_t - v_t) k_t^\top,\quad M_t = \alpha_t M_{t-1} + S_t",
        r"y_t = M_t \hat q_t,\quad \hat q_t \propto q_t - d\, k_t",
    ),
    "mamba3": (
        r"M_t = \alpha_t M_{t-1} + (1 - \lambda_t) \Delta_t \alpha_t v_{t-1} k_{t-1}^\top + "
        r"\lambda_t \Delta_t v_t k_t^\top",
        r"y_t = M_t q_t + d \odot v_t",
    ),
    "pgdn": (
        r"M_t = \alpha_t M_{t-1} (I - \eta_t k_t \bar k_t^\top) + \eta_t v_t \bar k_t^\top,\quad y_t = M_t q_t",
        _CURVED,
    ),
    "pkda": (
        r"M_t = M_{t-1} \mathrm{diag}(\alpha_t) (I - \eta_t k_t \bar k_t^\top) + \eta_t v_t \bar k_t^\top,\quad "
        r"y_t = M_t q_t",
        _CURVED,
    ),
    "osdn": (
        r"M_t = M_{t-1} (I - \eta_t k_t \bar k_t^\top) + \eta_t v_t \bar k_t^\top,\quad \bar k_t = d_t \odot k_t,\quad "
        r"y_t = M_t q_t",
        r"d_{t+1} = \mathrm{forget}_t\, d_t + (1 - d_t^\top s_t)\, s_t,\quad s_t = k_t \odot k_t",
    ),
    "oja": (
        r"M_t = M_{t-1} \mathrm{diag}(\alpha_t) (I - \eta_t v_t v_t^\top) + \eta_t k_t v_t^\top,\quad "
        r"\Vert v_t \Vert = 1",
        r"y_t = M_t^\top q_t",
    ),
    "mlstm": (
        r"M_t = \alpha_t M_{t-1} + \eta_t v_t k_t^\top,\quad z_t = \alpha_t z_{t-1} + \eta_t k_t,\quad "
        r"\eta_t = \exp(i_t),\quad \alpha_t = \mathrm{sigmoid}(f_t)",
        r"y_t = \frac{M_t \hat q_t}{\max(|z_t^\top \hat q_t|, 1)},\quad \hat q_t = \frac{q_t}{\sqrt{d}}",
    ),
    "hgrn2": (r"M_t = M_{t-1} \mathrm{diag}(\alpha_t) + v_t (1 - \alpha_t)^\top", _MATRIX_READ),
    "longhorn": (rf"M_t = M_{{t-1}} (I - c_t k_t k_t^\top) + c_t v_t k_t^\top,\quad c_t = {_NORMED}", _MATRIX_READ),
    "dgd": (rf"M_t = M_{{t-1}} (\alpha_t I - c_t k_t k_t^\top) + c_t v_t k_t^\top,\quad c_t = {_NORMED}", _MATRIX_READ),
    "mesa": (
        r"M_t = \left(\sum_{i \leq t} \eta_i v_i k_i^\top\right) "
        r"\left(\sum_{i \leq t} \eta_i k_i k_i^\top + \mathrm{ridge}\, I\right)^{-1},\quad \Vert k_i \Vert = 1",
        _MATRIX_READ,
    ),
    "gated_mesa": (
        *_RIDGE_STATES,
        r"y_t = M_t (H_t + \mathrm{diag}(\mathrm{ridge}_t))^{-1} q_t,\quad \Vert k_t \Vert = 1",
    ),
    "gated_kalmanet": (
        *_RIDGE_STATES,
        r"y_t = M_t \left(\hat q_t + \mathrm{mix}_t (x_t - \hat q_t)\right),\quad "
        r"(H_t + 0.02 \Vert H_t \Vert_F I) x_t = \hat q_t,\quad \hat q_t = \frac{q_t}{\sqrt{d}}",
    ),
    "gsa": (*_SLOT_STATES, rf"{_SLOT_READ},\quad s_t = 1 - \alpha_t"),
    "abc": (
        *_SLOT_STATES,
        r"y_t = V_t\, \mathrm{softmax}\left(\frac{1}{\sqrt{d}} K_t q_t\right),\quad "
        r"s_t = \exp(a_t - Z_t),\quad \alpha_t = \exp(Z_{t-1} - Z_t),\quad Z_t = \log \sum_{i \leq t} \exp(a_i)",
    ),
    "raven": (
        *_SLOT_STATES,
        rf"{_SLOT_READ},\quad s_t = 1 - \alpha_t,\quad \alpha_t = \exp(g_t c_t),\quad "
        r"\sum_i c_{t,i} = 1",
    ),
    "titans_linear": (_MOMENTUM, r"M_t = \alpha_t M_{t-1} + S_t,\quad y_t = M_t q_t,\quad \Vert k_t \Vert = 1"),
    "titans": (
        r"S_t = \mu_t S_{t-1} - (1 - \mu_t)\, \eta_t c_t G_t,\quad M_t = M_0 + \alpha_t (M_{t-1} - M_0) + S_t",
        rf"{_GRADIENT},\quad f(M, p) = W_2 \tanh(W_1 p),\quad \ell = \frac{{1}}{{2}} \Vert \hat v - v \Vert^2",
        r"y_t = f(M_t, q_t)",
    ),
    "ttt_linear": (
        r"M_t = M_{t-1} - \eta_t (M_C k_t - v_t) k_t^\top,\quad C = 16 \lfloor (t - 1) / 16 \rfloor,\quad "
        r"\Vert k_t \Vert = 1",
        _MATRIX_READ,
    ),
    "ttt_linear_norm": (
        r"M_t = M_{t-1} - \eta_t \nabla_M \ell(f(M_C, k_t), v_t),\quad C = 16 \lfloor (t - 1) / 16 \rfloor",
        r"f(M, p) = p + \mathrm{LN}(W p + b),\quad \ell = \frac{1}{2} \Vert \hat v - v \Vert^2,\quad "
        r"y_t = f(M_t, q_t)",
    ),
    "ttt_mlp": (
        r"M_t = M_{t-1} - \eta_t \nabla_M \ell(f(M_C, k_t), v_t),\quad C = 16 \lfloor (t - 1) / 16 \rfloor",
        r"f(M, p) = p + \mathrm{LN}(W_2\, \mathrm{gelu}(W_1 p + b_1) + b_2),\quad "
        r"\ell = \frac{1}{2} \Vert \hat v - v \Vert^2,\quad y_t = f(M_t, q_t)",
    ),
    "large_chunk_ttt": (
        r"S_C = \mu_C S_{C-n} + \sum_{i=C-n+1}^{C} \eta_i \nabla_M \ell(f(M_{C-n}, k_i), v_i),\quad "
        r"X = M_{C-n} - \mathrm{NS}(S_C),\quad n = \mathrm{chunk}",
        r"M_{C,j} = \frac{\Vert M_{C-n,j} \Vert}{\Vert X_j \Vert} X_j \ \text{for each row } j,\quad "
        r"f(M, p) = W_2 (\mathrm{silu}(W_1 p) \odot W_3 p),\quad \ell = -\hat v^\top v",
        r"y_t = f(M_C, q_t),\quad \Vert k_t \Vert = 1",
    ),
    "in_place_ttt": (
        r"M_C = M_{C-n} + \sum_{i=C-n+1}^{C} \eta_i \tilde v_i \phi(k_i)^\top,\quad n = \mathrm{chunk}",
        r"\phi(x) = \mathrm{silu}(W_g^\top x) \odot (W_u^\top x),\quad \tilde v_t = \sum_o c_o \odot v_{t+o},\quad "
        r"y_t = M_C \phi(q_t)",
    ),
    "moneta": (
        r"A_t = \alpha_t A_{t-1} - \eta_t G_t,\quad "
        r"M_t = \frac{\mathrm{sign}(A_t) \odot |A_t|^{p-1}}{\Vert A_t \Vert_p^{p-2}},\quad p = \frac{4}{3}",
        rf"{_GRADIENT},\quad {_RESIDUAL},\quad \ell = \frac{{1}}{{3}} \Vert \hat v - v \Vert_3^3",
        r"y_t = f(M_t, q_t)",
    ),
    "yaad": (
        rf"M_t = M_0 + \alpha_t (M_{{t-1}} - M_0) - \eta_t G_t,\quad {_GRADIENT},\quad {_RESIDUAL}",
        r"u = e \ \text{if } \Vert e \Vert \leq \delta,\quad u_i = \frac{\delta\, e_i}{\sqrt{e_i^2 + \varepsilon^2}} "
        r"\ \text{beyond},\quad e = \hat v - v",
        r"y_t = f(M_t, q_t)",
    ),
    "memora": (
        r"A_t = \alpha_t A_{t-1} - \eta_t G_t,\quad M_t = 8\, \mathrm{softmax}(A_t)",
        rf"{_GRADIENT},\quad {_RESIDUAL},\quad \ell = \frac{{1}}{{2}} \Vert \hat v - v \Vert^2",
        r"y_t = f(M_t, q_t)",
    ),
    "omeganet": (rf"M_t = \alpha_t M_{{t-1}} - \eta_t G_t,\quad {_WINDOW}", r"y_t = M_t \phi(q_t)"),
    "atlas": (
        rf"S_t = \mu_t S_{{t-1}} + G_t,\quad M_t = \alpha_t M_{{t-1}} - \eta_t \mathrm{{NS}}(S_t),\quad {_WINDOW}",
        r"y_t = M_t \phi(q_t)",
    ),
    "lattice": (
        r"m_{i,t} = \frac{x_i}{\Vert x_i \Vert},\quad x_i = \alpha_t m_i + d_i - m_i (m_i^\top d_i),\quad "
        r"m_i = m_{i,t-1}",
        r"d_i = -\eta_t k_{t,i} \left(e_t - m_i (m_i^\top e_t)\right),\quad e_t = \sum_i k_{t,i} m_i - v_t,\quad "
        r"y_t = \sum_i q_{t,i} m_{i,t}",
    ),
    "trellis": (
        r"K_t = \alpha_t K_{t-1} - \eta_t J_t^\top (\psi(K_{t-1} w_t) - a_t) w_t^\top,\quad "
        r"V_t = \alpha_t V_{t-1} - \eta_t (V_{t-1} a_t - v_t) a_t^\top",
        r"y_t = V_t\, \psi(K_t w_{q,t}),\quad w_t = \frac{k_t}{\Vert k_t \Vert},\quad "
        r"a_t = \frac{W^\top k_t}{\Vert W^\top k_t \Vert},\quad "
        r"\psi(z) = \frac{\mathrm{silu}(z)}{\sqrt{\Vert \mathrm{silu}(z) \Vert^2 + 10^{-6}}}",
    ),
    "delta_momentum": (
        r"S_t = S_{t-1} (\mu_t I - c_t G_t^\top G_t) - \eta_t G_t,\quad G_t = (M_{t-1} k_t - v_t) k_t^\top",
        r"c_t = \frac{1}{1 + \Vert G_t \Vert_F^2},\quad M_t = \alpha_t M_{t-1} + S_t,\quad y_t = M_t q_t",
    ),
    "deep_momentum": (
        r"M_t = \alpha_t M_{t-1} + \eta_t\, m_t(G_t),\quad G_t = (M_{t-1} k_t - v_t) k_t^\top,\quad "
        r"m(g) = W_2 \tanh(W_1 g)",
        r"W_{i,t} = W_{i,0} + \mu_t (W_{i,t-1} - W_{i,0}) - c_t \nabla_{W_i} \ell(m_{t-1}; G_t),\quad "
        r"\ell(m; g) = \frac{1}{2} \Vert m(g) + g \Vert^2,\quad y_t = M_t q_t",
    ),
}
EQUATIONS: dict[str, str] = {rule: "\n".join(f"${line}$" for line in lines) for rule, lines in _LINES.items()}
"""By rule, as `hecate.variant.equation` gives them of a variant."""
