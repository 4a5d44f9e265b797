"""Gated Delta Rule kernels: chunked forward and backward, packed sequences, decoding.

Importing this package needs no GPU and loads no compiler; the Hopper kernels are imported when a call first needs them.
"""

from .api import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    fused_recurrent_gated_delta_rule,
    is_supported,
)
from .operands import Gradients
from .plan import Plan

__version__ = "0.1.0"

__all__ = [
    "Gradients",
    "Plan",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "fused_recurrent_gated_delta_rule",
    "is_supported",
]
