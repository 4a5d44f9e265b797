"""The specification: every formula in plain PyTorch, on any device, in float64 when asked for.

`recurrent` is the definition, one token at a time. `chunked`, `chain` and `split` compute the same result in chunks,
`backward` and `split_backward` its gradients. All cite the numbered equations of `derivations/README.md`.
"""

from flashqla.reference.activations import (
    beta_activation,
    beta_activation_backward,
    gate,
    gate_backward,
    l2norm,
    l2norm_backward,
)
from flashqla.reference.backward import Gradients, backward
from flashqla.reference.chain import chain
from flashqla.reference.chunked import Kept, chunked
from flashqla.reference.recurrent import Result, recurrent
from flashqla.reference.split import split, split_backward

__all__ = [
    "Gradients",
    "Kept",
    "Result",
    "backward",
    "beta_activation",
    "beta_activation_backward",
    "chain",
    "chunked",
    "gate",
    "gate_backward",
    "l2norm",
    "l2norm_backward",
    "recurrent",
    "split",
    "split_backward",
]
