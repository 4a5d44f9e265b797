"""Activations and their gradients by hand == autograd of the plain formulas."""

from __future__ import annotations

import pytest
import torch
from cases import relative_error

from flashqla.reference import (
    beta_activation,
    beta_activation_backward,
    gate,
    gate_backward,
    l2norm,
    l2norm_backward,
)


def randn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_l2norm():
    x, dy = randn(2, 7, 3, 5).requires_grad_(), randn(2, 7, 3, 5) + 1
    expected = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    y, rstd = l2norm(x.detach())
    assert relative_error(y, expected) <= 1e-15
    assert relative_error(l2norm_backward(dy, y, rstd), *torch.autograd.grad(expected, x, dy)) <= 1e-14


def test_l2norm_of_zero_rows_passes_the_gradient():
    y, rstd = l2norm(torch.zeros(2, 4))
    dy = torch.ones(2, 4)
    assert (y == 0).all()
    torch.testing.assert_close(l2norm_backward(dy, y, rstd), 1e3 * dy)


@pytest.mark.parametrize("with_bias", [True, False])
def test_gate(with_bias):
    raw, A_log, dg = (10 * randn(2, 7, 3)).requires_grad_(), randn(3).requires_grad_(), randn(2, 7, 3)
    dt_bias = (randn(3) + 1).requires_grad_() if with_bias else None
    shifted = raw + dt_bias if with_bias else raw
    expected = -A_log.exp() * torch.log1p(shifted.exp())
    inputs = [raw, A_log, *([dt_bias] if with_bias else [])]
    assert relative_error(gate(raw, A_log, dt_bias), expected) <= 1e-14
    got = gate_backward(dg, raw, A_log, dt_bias)
    assert (got[2] is None) == (not with_bias)
    for mine, theirs in zip(got, torch.autograd.grad(expected, inputs, dg), strict=False):
        assert relative_error(mine, theirs) <= 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gate_is_never_nan_nor_positive(dtype):
    raw = torch.tensor([-2000.0, -200.0, 0.0, 200.0], dtype=dtype)[:, None].expand(4, 5)
    A_log = torch.tensor([-torch.inf, -50.0, 0.0, 100.0, 1000.0], dtype=dtype)
    g = gate(raw, A_log)
    assert (g <= 0).all()
    for gradient in gate_backward(torch.zeros_like(g), raw, A_log)[:2]:
        assert not gradient.isnan().any()


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_beta_activation(allow_neg_eigval):
    raw, dbeta = (5 * randn(2, 7, 3)).requires_grad_(), randn(2, 7, 3)
    expected = (1 + allow_neg_eigval) / (1 + (-raw).exp())
    assert relative_error(beta_activation(raw, allow_neg_eigval), expected) <= 1e-15
    got = beta_activation_backward(dbeta, raw, allow_neg_eigval)
    assert relative_error(got, *torch.autograd.grad(expected, raw, dbeta)) <= 1e-14


def test_dtypes():
    for dtype, computed in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        x = torch.ones(2, 3, dtype=dtype)
        assert l2norm(x)[0].dtype == gate(x, x[0]).dtype == beta_activation(x).dtype == computed
