"""Fixtures shared by all tests: where to compute, in what, how exact the result has to be, and memory full of NaN."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from flashqla import testing


class Limits(NamedTuple):
    """Largest relative L2 error against float64, of the outputs (o, final state) and of the gradients."""

    output: float
    gradient: float


LIMITS = {
    torch.float64: Limits(1e-12, 1e-10),
    torch.float32: Limits(1e-5, 1e-5),
    torch.float16: Limits(1e-3, 1e-3),
    torch.bfloat16: Limits(4e-3, 4e-3),
}
"""On a CPU the reference computes in float32 or float64; what is left is the rounding of the results."""

KERNEL_LIMITS = Limits(1e-2, 2e-2)
"""On a GPU, operands of matrix products are rounded to 16 bits as well."""


@pytest.fixture(scope="session")
def device() -> torch.device:
    """CUDA where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def dtype(request) -> torch.dtype:
    """dtype of q, k and v: float64 shows exactness, bfloat16 is what the kernels take."""
    return request.param


@pytest.fixture
def limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """The largest errors allowed for ``dtype`` on ``device``."""
    return limits_of(device, dtype)


def limits_of(device: torch.device, dtype: torch.dtype) -> Limits:
    """The same for a dtype that is not the fixture's."""
    on_kernels = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    return KERNEL_LIMITS if on_kernels else LIMITS[dtype]


@pytest.fixture
def rerun_limit(device: torch.device, dtype: torch.dtype) -> float:
    """How far two calls may be apart that cut the same tokens into other chunks: kernels then round other numbers."""
    if dtype == torch.float64:
        return 1e-13
    return KERNEL_LIMITS.output if device.type == "cuda" else 1e-3


@pytest.fixture(name="limits_of")
def _limits_of():
    return limits_of


@pytest.fixture
def poisoned():
    """Fresh memory is full of NaN during the test."""
    with testing.poisoned_empty():
        yield
