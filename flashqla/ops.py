"""The two operators behind the public functions, and the one autograd Function that joins them.

``flashqla::gated_delta_rule_forward`` and ``flashqla::gated_delta_rule_backward`` are registered with torch.library:
their arity is fixed, their fakes allocate exactly what the real operators return, and nothing whose size depends on
data leaves them. What is absent (a final state nobody asked for, a gradient nobody needs) is a tensor with no elements.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import reference
from .plan import DEFAULT_SM_COUNT, Plan, sequence_lengths

logger = logging.getLogger("flashqla")


class Operands(NamedTuple):
    """The tensors of a call; ``A_log`` and ``dt_bias`` are None unless the gate is computed inside."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None


class Options(NamedTuple):
    """The numbers and flags of a call.

    ``form`` is how the recurrence is computed: "chunked", "recurrent" (token by token) or "split" (segments and a
    scan). ``block_dv`` fixes the plan's split of d_v; 0 lets the plan choose.
    """

    scale: float
    output_final_state: bool
    state_v_first: bool
    use_qk_l2norm: bool
    use_gate: bool
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    form: str
    backend: str
    block_dv: int


class Gradients(NamedTuple):
    """Gradients of the differentiable operands; None for those that are absent or were not asked for."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dg: Tensor | None
    dbeta: Tensor | None
    dA_log: Tensor | None
    ddt_bias: Tensor | None
    dinitial_state: Tensor | None


NUM_DIFFERENTIABLE = len(Gradients._fields)
"""The first operands are the differentiable ones, in the order of :class:`Gradients`."""

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, float scale, bool output_final_state, bool state_v_first, "
    "bool use_qk_l2norm, bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, "
    "str form, str backend, int block_dv"
)

torch.library.define(
    "flashqla::gated_delta_rule_forward",
    f"({_ARGUMENTS}) -> (Tensor o, Tensor final_state)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "flashqla::gated_delta_rule_backward",
    f"(Tensor? do, Tensor? dht, {_ARGUMENTS}, bool[] needed) -> ("
    + ", ".join(f"Tensor {name}" for name in Gradients._fields)
    + ")",
    tags=torch.Tag.pt2_compliant_tag,
)


# ---------------------------------------------------------------------------------------------------------------- fakes


def _compute_dtype(q: Tensor) -> torch.dtype:
    """float64 stays float64; everything else computes, and keeps its state, in float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _state_shape(operands: Operands, state_v_first: bool) -> tuple[int, ...]:
    q, v, offsets = operands.q, operands.v, operands.cu_seqlens
    num_sequences = q.shape[0] if offsets is None else offsets.shape[0] - 1
    dims = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    return (num_sequences, v.shape[2], *dims)


@torch.library.register_fake("flashqla::gated_delta_rule_forward")
def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    operands, options = Operands(*arguments[:10]), Options(*arguments[10:])
    shape = _state_shape(operands, options.state_v_first) if options.output_final_state else (0,)
    final_state = operands.q.new_empty(shape, dtype=_compute_dtype(operands.q))
    return operands.v.new_empty(operands.v.shape, dtype=operands.q.dtype), final_state


@torch.library.register_fake("flashqla::gated_delta_rule_backward")
def _backward_fake(do: Tensor | None, dht: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    operands, needed = Operands(*arguments[:10]), arguments[-1]
    return tuple(
        operands.q.new_empty(0) if tensor is None or not wanted else tensor.new_empty(tensor.shape)
        for tensor, wanted in zip(operands[:NUM_DIFFERENTIABLE], needed, strict=True)
    )


# ------------------------------------------------------------------------------------------------------------ operators


@torch.library.impl("flashqla::gated_delta_rule_forward", "CompositeExplicitAutograd")
def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    operands, options = Operands(*arguments[:10]), Options(*arguments[10:])
    plan = make_plan(operands, options)
    if choose_backend(operands, options, plan) == "hopper":
        from .hopper import launch

        o, final_state = launch.forward(*operands[:5], plan=plan, **_kernel_keywords(operands, options))
    else:
        o, final_state = _reference_forward(operands, options)
    return o, operands.q.new_empty(0, dtype=_compute_dtype(operands.q)) if final_state is None else final_state


@torch.library.impl("flashqla::gated_delta_rule_backward", "CompositeExplicitAutograd")
def _backward(do: Tensor | None, dht: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    operands, options, needed = Operands(*arguments[:10]), Options(*arguments[10:-1]), arguments[-1]
    gradients = _reference_backward(do, dht, operands, options, needed)
    return tuple(operands.q.new_empty(0) if gradient is None else gradient for gradient in gradients)


def make_plan(operands: Operands, options: Options) -> Plan:
    """The plan of a call; exact when the offsets lie on the host.

    Raises:
        ValueError: when the offsets on the host are not those of packed sequences.
    """
    offsets, lengths = _offsets_on_host(operands), None
    if offsets is not None:
        lengths = sequence_lengths(offsets.tolist(), operands.q.shape[1])
    return Plan.build(
        operands.q.shape,
        operands.v.shape,
        None if operands.cu_seqlens is None else operands.cu_seqlens.shape,
        lengths,
        sm_count=device_sm_count(operands.q.device),
        block_dv=options.block_dv or None,
    )


def _offsets_on_host(operands: Operands) -> Tensor | None:
    """The offsets if they can be read without waiting for a device."""
    if operands.cu_seqlens_cpu is not None:
        return operands.cu_seqlens_cpu
    offsets = operands.cu_seqlens
    return offsets if offsets is not None and offsets.device.type == "cpu" else None


@functools.cache
def device_sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; those of an H200 where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else DEFAULT_SM_COUNT


# ------------------------------------------------------------------------------------------------------------- backends


def choose_backend(operands: Operands, options: Options, plan: Plan) -> str:
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
    if device is not None and device.type != "cuda":
        return [f"needs tensors on a CUDA device, got {device}"]
    if not torch.cuda.is_available():
        return ["needs a CUDA device, none is available"]
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        found = f"{capability[0]}.{capability[1]} ({torch.cuda.get_device_name(device)})"
        return [f"needs compute capability 9.0 (Hopper), got {found}"]
    return []


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


# ----------------------------------------------------------------------------------------------------------- directions


class _Prepared(NamedTuple):
    """Real tokens only, in the compute dtype, after the activations (eq. 2.3 to 2.5)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    raw_g: Tensor
    raw_beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    keywords: dict[str, Any]


def _prepare(operands: Operands, options: Options) -> _Prepared:
    compute = _compute_dtype(operands.q)

    def upcast(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(compute)

    offsets = operands.cu_seqlens if operands.cu_seqlens_cpu is None else operands.cu_seqlens_cpu
    tokens = operands.q.shape[1]
    if offsets is not None:
        offsets = offsets.cpu()  # the reference cuts chunks on the host
        tokens = sum(sequence_lengths(offsets.tolist(), tokens))
    q, k, v, raw_g, raw_beta = (upcast(tensor[:, :tokens]) for tensor in operands[:5])
    g, beta, q_rstd, k_rstd = raw_g, raw_beta, None, None
    A_log, dt_bias = upcast(operands.A_log), upcast(operands.dt_bias)
    if options.use_qk_l2norm:
        q, q_rstd = reference.l2norm(q)
        k, k_rstd = reference.l2norm(k)
    if options.use_gate:
        g = reference.gate(raw_g, A_log, dt_bias)
    if options.use_beta_sigmoid:
        beta = reference.beta_activation(raw_beta, options.allow_neg_eigval)
    keywords = {
        "scale": options.scale,
        "initial_state": upcast(operands.initial_state),
        "state_v_first": options.state_v_first,
        "cu_seqlens": offsets,
    }
    return _Prepared(q, k, v, g, beta, q_rstd, k_rstd, raw_g, raw_beta, A_log, dt_bias, keywords)


def _reference_forward(operands: Operands, options: Options) -> tuple[Tensor, Tensor | None]:
    with torch.autocast(operands.q.device.type, enabled=False):
        inputs = _prepare(operands, options)
        compute = getattr(reference, options.form)
        result = compute(*inputs[:5], output_final_state=options.output_final_state, **inputs.keywords)
    o = _with_padding(result.output, operands.v.shape, operands.q.dtype)
    return o, result.final_state


def _reference_backward(
    do: Tensor | None, dht: Tensor | None, operands: Operands, options: Options, needed: list[bool]
) -> list[Tensor | None]:
    backward = reference.split_backward if options.form == "split" else reference.backward
    with torch.autocast(operands.q.device.type, enabled=False):
        inputs = _prepare(operands, options)
        do = torch.zeros_like(inputs.v) if do is None else do[:, : inputs.v.shape[1]].to(inputs.v.dtype)
        dht = None if dht is None else dht.to(inputs.v.dtype)
        dq, dk, dv, dg, dbeta, dinitial_state = backward(*inputs[:5], do, dht=dht, **inputs.keywords)
        dA_log = ddt_bias = None
        if options.use_qk_l2norm:
            dq = reference.l2norm_backward(dq, inputs.q, inputs.q_rstd)
            dk = reference.l2norm_backward(dk, inputs.k, inputs.k_rstd)
        if options.use_gate:
            dg, dA_log, ddt_bias = reference.gate_backward(dg, inputs.raw_g, inputs.A_log, inputs.dt_bias)
        if options.use_beta_sigmoid:
            dbeta = reference.beta_activation_backward(dbeta, inputs.raw_beta, options.allow_neg_eigval)
    per_token = zip((dq, dk, dv, dg, dbeta), operands[:5], needed[:5], strict=True)
    once = zip((dA_log, ddt_bias, dinitial_state), operands[5:NUM_DIFFERENTIABLE], needed[5:], strict=True)
    return [
        *(
            _with_padding(gradient, tensor.shape, tensor.dtype) if wanted else None
            for gradient, tensor, wanted in per_token
        ),
        *(gradient.to(tensor.dtype) if wanted and tensor is not None else None for gradient, tensor, wanted in once),
    ]


def _with_padding(tokens: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The per-token result for the real tokens, zeros for the padding behind them."""
    if tokens.shape == shape:
        return tokens.to(dtype).contiguous()
    padded = tokens.new_zeros(shape, dtype=dtype)
    padded[:, : tokens.shape[1]] = tokens
    return padded


# ------------------------------------------------------------------------------------------------------------- autograd


@torch.no_grad()
def forward(operands: Operands, options: Options) -> tuple[Tensor, Tensor | None]:
    """Output ``[B, T, HV, V]`` in q's dtype, and the final state or None. Not differentiable."""
    o, final_state = torch.ops.flashqla.gated_delta_rule_forward(*operands, *options)
    return o, final_state if options.output_final_state else None


@torch.no_grad()
def backward(
    do: Tensor | None, dht: Tensor | None, operands: Operands, options: Options, needed: list[bool] | None = None
) -> Gradients:
    """Gradients in the dtypes of their inputs; ``needed`` (one flag per differentiable operand) leaves the others
    out."""
    needed = [
        tensor is not None and (needed is None or needed[i]) for i, tensor in enumerate(operands[:NUM_DIFFERENTIABLE])
    ]
    gradients = torch.ops.flashqla.gated_delta_rule_backward(do, dht, *operands, *options, needed)
    return Gradients(*(gradient if wanted else None for gradient, wanted in zip(gradients, needed, strict=True)))


def differentiable(operands: Operands, options: Options) -> tuple[Tensor, Tensor | None]:
    """As :func:`forward`, and differentiable once with respect to the first eight operands."""
    distinct = []  # torch.compile refuses a Function that gets one tensor twice, as in q = k
    for tensor in operands:
        repeated = tensor is not None and any(tensor is other for other in distinct)
        distinct.append(tensor.view_as(tensor) if repeated else tensor)
    o, final_state = _GatedDeltaRule.apply(options, *distinct)
    return o, final_state if options.output_final_state else None


class _GatedDeltaRule(torch.autograd.Function):
    """Saves only the inputs, all through save_for_backward; the backward recomputes the rest from them."""

    @staticmethod
    def forward(ctx: Any, options: Options, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return torch.ops.flashqla.gated_delta_rule_forward(*tensors, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        operands, options = Operands(*ctx.saved_tensors), ctx.options
        dht = dht if options.output_final_state else None
        gradients = backward(do, dht, operands, options, list(ctx.needs_input_grad[1 : 1 + NUM_DIFFERENTIABLE]))
        return (None, *gradients, None, None)
