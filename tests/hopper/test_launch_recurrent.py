"""What the recurrent kernel's launcher refuses: decided by shapes, dtypes and strides alone, so no GPU is needed."""

import pytest
import torch

from flashqla.hopper import launch_recurrent
from flashqla.operands import Operands

HEADS = 4


def refusals(dtype=torch.bfloat16, head_dim=128, initial_state=None, **extras):
    q, v = torch.zeros(3, 1, 2, head_dim, dtype=dtype), torch.zeros(3, 1, HEADS, head_dim, dtype=dtype)
    gate = torch.zeros(3, 1, HEADS)
    return launch_recurrent.refusals(Operands(q, q, v, gate, gate, None, None, initial_state, None, None), **extras)


def pool(rows=128, columns=128, dtype=torch.float32):
    return torch.zeros(8, HEADS, rows, columns, dtype=dtype)


GOOD = {
    "no pool": {},
    "pool": {"initial_state": pool(), "state_indices": torch.zeros(3, dtype=torch.int32)},
    "padded slots and rows": {"initial_state": pool(136, 132)[:, :, :128, :128], "inplace_final_state": True},
    "every second slot": {"initial_state": pool()[::2], "inplace_final_state": True},
    "any state that is only read": {"initial_state": pool(dtype=torch.bfloat16).mT},
    "out among other heads": {"out": torch.zeros(3, 1, 6, 128, dtype=torch.bfloat16)[:, :, 1:5]},
    "one slot of any stride": {"initial_state": pool()[:1].as_strided((1, 4, 128, 128), (7, 16384, 128, 1)),
                               "inplace_final_state": True},
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD)
def test_taken(case):
    assert refusals(**GOOD[case]) == []


BAD = {
    "half a pool": ({"initial_state": pool(dtype=torch.bfloat16)}, "must be float32 for the kernels"),
    "transposed pool": ({"initial_state": pool().mT}, "contiguous last dimension"),
    "odd rows": ({"initial_state": pool(128, 129)[..., :128]}, "multiples of 16 bytes, got strides"),
    "odd address": ({"initial_state": pool(128, 132)[..., 1:129]}, "multiples of 16 bytes"),
    "narrow out": ({"out": torch.zeros(3, 1, HEADS, 129, dtype=torch.bfloat16)[..., :128]}, "out: needs"),
    "scattered tokens": ({"out": torch.zeros(3, 2, 2, HEADS, 128, dtype=torch.bfloat16)[:, 0]}, "out: needs"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    changes, says = BAD[case]
    (reason,) = refusals(inplace_final_state="initial_state" in changes, **changes)
    assert says in reason


def test_dtypes_and_sizes():
    reasons = refusals(torch.float32, 96)
    assert len(reasons) == 5 and all("need" in reason for reason in reasons)
