"""Where a call runs: the Hopper kernels, the reference, or flash-linear-attention, and why not elsewhere.

A backend is asked for its refusals before it is used; they are sentences that name an argument, what it must be and
what it was. Nothing here imports a compiler until a call needs it.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch
from torch import Tensor

from .operands import Operands, Options
from .plan import Plan
from .validation import Call

logger = logging.getLogger("flashqla")

FLA_FUNCTIONS = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
NOT_FOR_FLA = (
    *("chunk_indices", "cp_context", "chunk_size", "plan", "context_parallel", "backend", "cp_group"),
    *("gk", "gv", "do", "dht"),
)
"""Fields of a call that flash-linear-attention's functions do not take, or that the call leaves empty."""


def choose(operands: Operands, options: Options, plan: Plan) -> str:
    """Where one call runs, "hopper" or "reference"; says which and why on the logger ``flashqla``, once per reason.

    Raises:
        NotImplementedError: when the backend asked for, or context parallelism on the kernels, cannot run the call;
            lists why.
    """
    if options.backend == "reference":
        return "reference"
    reasons = hopper_refusals(operands, options, plan)
    if options.backend == "hopper" and reasons:
        raise NotImplementedError('backend: "hopper" cannot run this call: ' + "; ".join(reasons))
    if not reasons and options.form == "split":
        raise NotImplementedError(
            "context_parallel: must be False or 'auto' with the Hopper kernels, which have no segments yet, got True; "
            "backend='reference' has them"
        )
    if reasons:
        _log_choice("reference", "; ".join(reasons))
        return "reference"
    _log_choice("hopper", "the device and the call meet every requirement of the kernels")
    return "hopper"


def hopper_refusals(operands: Operands, options: Options, plan: Plan) -> list[str]:
    """Why the Hopper kernels cannot run a call; empty when they can."""
    if options.form == "recurrent":
        return ["token by token recurrence runs on the reference"]
    reasons = device_refusals(operands.q.device)
    if reasons:
        return reasons
    try:
        from .hopper import launch
    except ImportError as error:
        return [f"the Hopper kernels cannot be imported: {error}"]
    return launch.refusals(*operands[:5], plan=plan, **_kernel_keywords(operands, options))


def device_refusals(device: torch.device | None = None) -> list[str]:
    """Why the Hopper kernels cannot run on a device (default: the current CUDA device); empty when they can."""
    reasons = _cuda_refusals(device)
    if reasons:
        return reasons
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        found = f"{capability[0]}.{capability[1]} ({torch.cuda.get_device_name(device)})"
        return [f"needs compute capability 9.0 (Hopper), got {found}"]
    return []


def _cuda_refusals(device: torch.device | None) -> list[str]:
    if device is not None and device.type != "cuda":
        return [f"needs tensors on a CUDA device, got {device}"]
    return [] if torch.cuda.is_available() else ["needs a CUDA device, none is available"]


def hopper_forward(operands: Operands, options: Options, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """Output and final state (None unless asked for) by the Hopper kernels, which must not refuse the call."""
    from .hopper import launch

    return launch.forward(*operands[:5], plan=plan, **_kernel_keywords(operands, options))


def hopper_backward(
    do: Tensor | None, dht: Tensor | None, operands: Operands, options: Options, plan: Plan, needed: list[bool]
) -> list[Tensor | None]:
    """Gradients by the Hopper kernels, which must not refuse the call; None where not needed."""
    from .hopper import launch_backward

    keywords = _kernel_keywords(operands, options)
    return launch_backward.backward(do, dht, *operands[:5], plan=plan, needed=needed, **keywords)


def _kernel_keywords(operands: Operands, options: Options) -> dict[str, Any]:
    return {
        "scale": options.scale,
        "initial_state": operands.initial_state,
        "output_final_state": options.output_final_state,
        "state_v_first": options.state_v_first,
        "cu_seqlens": operands.cu_seqlens,
        "use_qk_l2norm": options.use_qk_l2norm,
        "use_gate": options.use_gate,
        "A_log": operands.A_log,
        "dt_bias": operands.dt_bias,
        "use_beta_sigmoid": options.use_beta_sigmoid,
        "allow_neg_eigval": options.allow_neg_eigval,
    }


@functools.cache
def _log_choice(backend: str, reason: str) -> None:
    logger.info("backend %s: %s", backend, reason)


# --------------------------------------------------------------------------------------------- flash-linear-attention


def fla_refusals(device: torch.device | None = None) -> list[str]:
    """Why the kernels of flash-linear-attention cannot run on a device, or on this machine; empty when they can."""
    reasons = _cuda_refusals(device)
    if reasons:
        return reasons
    try:
        importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError as error:
        return [f"needs the package fla-core (pip install fla-core): {error}"]
    return []


def run_fla(function: str, call: Call) -> tuple[Tensor, Tensor | None]:
    """The same call by flash-linear-attention, with its own autograd."""
    refusals = fla_refusals()
    if function not in FLA_FUNCTIONS:
        refusals.append(f"has only {' and '.join(FLA_FUNCTIONS)}")
    if call.context_parallel is True:
        refusals.append("has no context_parallel=True on one device")
    if refusals:
        raise NotImplementedError(f'{function}: backend: "fla" cannot run this call: ' + "; ".join(refusals))
    chunk_only = ("cu_seqlens_cpu",) if function == "fused_recurrent_gated_delta_rule" else ()
    keywords = {name: value for name, value in call._asdict().items() if name not in NOT_FOR_FLA + chunk_only}
    return getattr(importlib.import_module("fla.ops.gated_delta_rule"), function)(**keywords)
