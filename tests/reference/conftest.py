"""Fixtures of the reference tests."""

from __future__ import annotations

import pytest
from cases import GATES


@pytest.fixture(params=[False, True], ids=["dense", "packed"])
def packed(request) -> bool:
    return request.param


@pytest.fixture(params=list(GATES))
def gate(request) -> str:
    return request.param
