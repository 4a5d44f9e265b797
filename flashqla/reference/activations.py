"""The activations around the recurrence, each with its backward by hand (derivations, eqs. 2.3 to 2.5).

Every function computes and returns float64 for float64 inputs and float32 otherwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashqla.reference.layout import compute_dtype


def l2norm(x: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Eq. 2.4: `y = x * rstd`, `rstd = (sum(x^2) + eps)^-1/2` over the last axis.

    x: `[..., D]`. Returns y `[..., D]` and rstd `[..., 1]`; zero rows stay zero.
    """
    x = x.to(compute_dtype(x))
    rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
    return x * rstd, rstd


def l2norm_backward(dy: Tensor, y: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of eq. 2.4: `dx = rstd * (dy - y <y, dy>)`; dy, y: `[..., D]`, rstd: `[..., 1]`."""
    dy = dy.to(y.dtype)
    return rstd * (dy - y * (y * dy).sum(-1, keepdim=True))


def _gate_inputs(raw: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rate `exp(A_log)`, finite so that rate * 0 is 0, and the argument of the softplus."""
    dtype = compute_dtype(raw)
    rate = A_log.to(dtype).exp().clamp(max=torch.finfo(dtype).max)
    shifted = raw.to(dtype)
    return rate, shifted if dt_bias is None else shifted + dt_bias.to(dtype)


def gate(raw: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """Eq. 2.3: `g = -exp(A_log) * softplus(raw + dt_bias)`, a log decay <= 0, with `softplus(x) = -logsigmoid(-x)`.

    raw: `[..., HV]`; A_log, dt_bias: `[HV]`.
    """
    rate, shifted = _gate_inputs(raw, A_log, dt_bias)
    return rate * F.logsigmoid(-shifted)


def gate_backward(
    dg: Tensor, raw: Tensor, A_log: Tensor, dt_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradient of eq. 2.3: `(draw [..., HV], dA_log [HV], ddt_bias [HV] or None)`.

    `dA_log = sum dg g`, `draw = -dg exp(A_log) sigmoid(raw + dt_bias)`, `ddt_bias = sum draw`. Where the decay is so
    strong that g is infinite nothing crosses it, so dg is 0 there and must meet finite factors.
    """
    rate, shifted = _gate_inputs(raw, A_log, dt_bias)
    dg = dg.to(shifted.dtype)
    draw = -dg * (rate * torch.sigmoid(shifted))
    heads = raw.shape[-1]
    g = (rate * F.logsigmoid(-shifted)).clamp(min=torch.finfo(shifted.dtype).min)
    dA_log = (dg * g).reshape(-1, heads).sum(0)
    return draw, dA_log, None if dt_bias is None else draw.reshape(-1, heads).sum(0)


def beta_activation(raw: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """Eq. 2.5: `beta = sigmoid(raw)` in (0, 1), doubled to (0, 2) with `allow_neg_eigval`."""
    beta = torch.sigmoid(raw.to(compute_dtype(raw)))
    return 2 * beta if allow_neg_eigval else beta


def beta_activation_backward(dbeta: Tensor, raw: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """Gradient of eq. 2.5: `draw = dbeta * sigmoid(raw) * (1 - sigmoid(raw))`, doubled with `allow_neg_eigval`."""
    sigmoid = torch.sigmoid(raw.to(compute_dtype(raw)))
    draw = dbeta.to(sigmoid.dtype) * sigmoid * (1 - sigmoid)
    return 2 * draw if allow_neg_eigval else draw
