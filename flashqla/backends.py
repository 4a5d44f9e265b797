"""Where a call runs: the Hopper kernels, the reference, or flash-linear-attention, and why not elsewhere.

A backend is asked for its refusals before it is used; they are sentences that name an argument, what it must be and
what it was. Nothing here imports a compiler until a call needs it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import validation_serving
from .operands import Operands, Options
from .plan import Plan
from .validation import Call

if TYPE_CHECKING:
    from .serving import Serving

logger = logging.getLogger("flashqla")

FLA_FUNCTIONS = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
NOT_FOR_FLA = (
    *("chunk_indices", "cp_context", "chunk_size", "plan", "backend", "cp_group"),
    *("context_parallel", "cp_threshold"),
    *("gk", "gv", "do", "dht", "inplace_final_state", "states_every", *validation_serving.BUFFERS),
)
"""Fields of a call that flash-linear-attention's functions do not take, or that the call leaves empty."""


def choose(operands: Operands, options: Options, plan: Plan, serving: Serving | None = None) -> str:
    """Where one call runs, "hopper" or "reference"; says which and why on the logger ``flashqla``, once per reason.

    Raises:
        NotImplementedError: when the backend asked for, or context parallelism on the kernels, cannot run the call;
            lists why.
    """
    if options.backend == "reference":
        return "reference"
    reasons = hopper_refusals(operands, options, plan, serving)
    if options.backend == "hopper" and reasons:
        raise NotImplementedError('backend: "hopper" cannot run this call: ' + "; ".join(reasons))
    if not reasons and options.form == "split" and not plan.segment_chunks:
        raise NotImplementedError(
            "context_parallel: must be False or 'auto' with the Hopper kernels where no sequence has two chunks of "
            f"{plan.chunk_size} tokens to cut between, got True and sequences of at most {plan.max_seqlen} tokens"
        )
    if reasons:
        # A Hopper GPU without kernels is a machine to mend, every other reason is one of the call or the machine.
        level = logging.WARNING if "no CUDA compiler" in reasons[0] else logging.INFO
        _log_choice("reference", "; ".join(reasons), level)
        return "reference"
    _log_choice("hopper", "the device and the call meet every requirement of the kernels")
    return "hopper"


def hopper_refusals(operands: Operands, options: Options, plan: Plan, serving: Serving | None = None) -> list[str]:
    """Why the Hopper kernels cannot run a call; empty when they can."""
    reasons = device_refusals(operands.q.device)
    if reasons:
        return reasons
    try:
        from .hopper import compile, launch, launch_recurrent
    except ImportError as error:
        return [f"the Hopper kernels cannot be imported: {error}"]
    if options.form == "recurrent":
        extras = {} if serving is None else serving.keywords()
        return compile.shortage() + launch_recurrent.refusals(operands, **extras)
    reasons = compile.shortage() + launch.refusals(operands, plan)
    if serving is not None and serving.states is not None:
        reasons.append("states: the chunk kernels write no states along the way")
    if serving is not None and serving.out is not None:
        reasons += launch_recurrent.out_refusals(serving.out)
    return reasons


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


def backward_refusals(device: torch.device) -> list[str]:
    """Why no Hopper kernel computes the backward on a device, so that the reference does; empty when one does."""
    return device_refusals(device)


def _cuda_refusals(device: torch.device | None) -> list[str]:
    if device is not None and device.type != "cuda":
        return [f"needs tensors on a CUDA device, got {device}"]
    return [] if torch.cuda.is_available() else ["needs a CUDA device, none is available"]


def hopper_forward(
    operands: Operands, options: Options, plan: Plan, serving: Serving | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """Output and final state (None unless asked for) by the Hopper kernels, which must not refuse the call.

    None where a kernel could not be compiled: then the reference takes the call, unless the caller insists.
    """
    from .hopper import compile, launch, launch_recurrent

    try:
        if options.form == "recurrent":
            extras = {} if serving is None else serving.keywords()
            return launch_recurrent.forward(operands, options, **extras)
        if serving is None:
            return launch.forward(operands, options, plan)
        gathered = operands._replace(initial_state=serving.gather(operands))
        options = options._replace(output_final_state=options.output_final_state or serving.inplace_final_state)
        return serving.scatter(*launch.forward(gathered, options, plan, out=serving.out), operands)
    except compile.CompileError as error:
        if options.backend == "hopper":
            raise
        _log_choice("reference", str(error), logging.WARNING)
        return None


def hopper_backward(
    do: Tensor | None, dht: Tensor | None, operands: Operands, options: Options, plan: Plan, needed: list[bool]
) -> list[Tensor | None] | None:
    """Gradients by the Hopper kernels, which must not refuse the call; None where not needed.

    None altogether where a kernel could not be compiled, as in :func:`hopper_forward`.
    """
    from .hopper import compile, launch_backward

    try:
        return launch_backward.backward(do, dht, operands, options, plan, needed)
    except compile.CompileError as error:
        if options.backend == "hopper":
            raise
        _log_choice("reference", str(error), logging.WARNING)
        return None


@functools.cache
def _log_choice(backend: str, reason: str, level: int = logging.INFO) -> None:
    logger.log(level, "backend %s: %s", backend, reason)


# --------------------------------------------------------------------------------------------- flash-linear-attention

_running_fla: ContextVar[bool] = ContextVar("flash-linear-attention runs on behalf of this package", default=False)


def inside_fla() -> bool:
    """Whether flash-linear-attention was called by this package, which must then not take the call back."""
    return _running_fla.get()


@contextlib.contextmanager
def _outward() -> Iterator[None]:
    token = _running_fla.set(True)
    try:
        yield
    finally:
        _running_fla.reset(token)


def fla_refusals(device: torch.device | None = None) -> list[str]:
    """Why the kernels of flash-linear-attention cannot run on a device, or on this machine; empty when they can."""
    return _cuda_refusals(device) or _fla_import_problem()


@functools.cache
def _fla_import_problem() -> list[str]:
    if importlib.util.find_spec("fla") is None:
        return ["needs the package fla-core (pip install fla-core)"]
    try:
        importlib.import_module("fla.ops.gated_delta_rule")
    except Exception as error:  # Triton raises what it likes where it does not fit the GPU or FLA
        return [f"needs a working fla-core: {type(error).__name__}: {error}"]
    return []


def prefers_fla(function: str, call: Call) -> bool:
    """Whether "auto" leaves a call to flash-linear-attention: on a CUDA GPU that is no Hopper one, where it can.

    Said once on the logger. Whole graphs of torch.compile stay here: FLA breaks them.
    """
    if not call.q.is_cuda or call.backend != "auto" or torch.compiler.is_compiling():
        return False
    foreign = device_refusals(call.q.device)
    if not foreign:
        return False
    reasons = _fla_call_refusals(function, call) + fla_refusals(call.q.device)
    if reasons:
        _log_choice("reference", "; ".join(foreign + reasons))
        return False
    _log_choice("fla", "; ".join(foreign))
    return True


def _fla_call_refusals(function: str, call: Call) -> list[str]:
    refusals = []
    if function not in FLA_FUNCTIONS:
        refusals.append(f"has only {' and '.join(FLA_FUNCTIONS)}")
    if call.context_parallel is True:
        refusals.append("has no context_parallel=True on one device")
    if validation_serving.wanted(call):
        refusals.append("has no pools or buffers")
    if call.backend == "auto":  # what FLA would take and then fail on, or compute otherwise
        if call.q.dtype == torch.float64:
            refusals.append("has no float64")
        if max(call.q.shape[-1], call.v.shape[-1]) > 256 and function == FLA_FUNCTIONS[0]:
            refusals.append("has no head dimension above 256")
        gradients = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in call)
        if gradients and function == FLA_FUNCTIONS[1]:
            refusals.append("has no gradients token by token")
    return [f"fla-core {refusal}" for refusal in refusals]


def run_fla(function: str, call: Call) -> tuple[Tensor, Tensor | None]:
    """The same call by flash-linear-attention, with its own autograd."""
    refusals = fla_refusals() + _fla_call_refusals(function, call)
    if refusals:
        raise NotImplementedError(f'{function}: backend: "fla" cannot run this call: ' + "; ".join(refusals))
    chunk_only = ("cu_seqlens_cpu",) if function == "fused_recurrent_gated_delta_rule" else ()
    keywords = {name: value for name, value in call._asdict().items() if name not in NOT_FOR_FLA + chunk_only}
    with _outward():
        return getattr(importlib.import_module("fla.ops.gated_delta_rule"), function)(**keywords)
