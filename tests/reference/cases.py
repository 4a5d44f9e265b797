"""Cases shared by the reference tests; everything is float64 on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from flashqla.testing import Inputs, inputs

GATES = {"recipe": None, "none": 0.0, "weak": -0.01, "strong": -20.0}
PACKED = [0, 0, 33, 5, 32, 0, 50, 1, 0]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Relative L2 error; NaN anywhere gives NaN, which no comparison lets pass."""
    got, expected = got.detach(), expected.detach()
    norm = expected.norm()
    return float((got - expected).norm() / norm) if norm > 0 else float(got.norm())


def case(value_heads: int = 4, gate: str = "recipe", packed: bool = False, **options) -> Inputs:
    """Small inputs with two key heads, K = 6 and V = 9; packed ones end in padding full of NaN."""
    options = {"heads": 2, "head_dim_k": 6, "head_dim_v": 9, "dtype": torch.float64, "gate": GATES[gate]} | options
    if not packed:
        return inputs(2, 70, value_heads=value_heads, **options)
    made = inputs(1, sum(PACKED) + 17, value_heads=value_heads, lengths=PACKED, **options)
    for padded in (made.q, made.k, made.v, made.g, made.beta, made.do):
        padded[:, sum(PACKED) :] = torch.nan
    return made
