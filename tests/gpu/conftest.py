"""Tests in this folder need a Hopper GPU; elsewhere they say so and skip."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    reason = _missing()
    if reason:
        for item in items:
            if "/gpu/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "needs an SM90 GPU (here: cpu)"
    capability = torch.cuda.get_device_capability()
    return None if capability == (9, 0) else f"needs an SM90 GPU (here: SM{capability[0]}{capability[1]})"
