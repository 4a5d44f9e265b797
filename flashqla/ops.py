"""The two operators behind the public functions, and the one autograd Function that joins them.

``flashqla::gated_delta_rule_forward`` and ``flashqla::gated_delta_rule_backward`` are registered with torch.library:
their arity is fixed, their fakes allocate exactly what the real operators return, and nothing whose size depends on
data leaves them. What is absent (a final state nobody asked for, a gradient nobody needs) is a tensor with no elements.
On a CPU the forward may keep tensors that spare the backward a pass (`reference.Kept`); kernels keep nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backends, reference
from .operands import NUM_DIFFERENTIABLE, Gradients, Operands, Options, make_plan
from .plan import sequence_lengths
from .reference.layout import compute_dtype

CPU_CHUNK_SIZE = 32
"""Tokens of a chunk on a CPU: fewer operations than with 64, and products of this size reach nearly the same rate."""

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, float scale, bool output_final_state, bool state_v_first, "
    "bool use_qk_l2norm, bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, "
    "str form, str backend, int block_dv, int segment_chunks, int backward_block_dv, int backward_segment_chunks, "
    "float? cp_threshold"
)

torch.library.define(
    "flashqla::gated_delta_rule_forward",
    f"({ARGUMENTS}, bool keep=False) -> (Tensor o, Tensor final_state, Tensor starts, Tensor inverses)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "flashqla::gated_delta_rule_backward",
    f"(Tensor? do, Tensor? dht, {ARGUMENTS}, bool[] needed, Tensor? starts=None, Tensor? inverses=None) -> ("
    + ", ".join(f"Tensor {name}" for name in Gradients._fields)
    + ")",
    tags=torch.Tag.pt2_compliant_tag,
)


# ---------------------------------------------------------------------------------------------------------------- fakes


def _state_shape(operands: Operands, state_v_first: bool) -> tuple[int, ...]:
    q, v, offsets = operands.q, operands.v, operands.cu_seqlens
    num_sequences = q.shape[0] if offsets is None else offsets.shape[0] - 1
    dims = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    return (num_sequences, v.shape[2], *dims)


def _unpack(arguments: tuple[Any, ...]) -> tuple[Operands, Options, tuple[Any, ...]]:
    """The arguments of an operator from q on: trailing ones are missing where they have their default."""
    end = len(Operands._fields) + len(Options._fields)
    return Operands(*arguments[:10]), Options(*arguments[10:end]), arguments[end:]


def _new_kept(operands: Operands, keep: bool) -> tuple[Tensor, Tensor]:
    """Room for what the forward keeps; without elements where it keeps nothing."""
    q, v = operands.q, operands.v
    shapes = reference.Kept.shapes(q.shape, v.shape, CPU_CHUNK_SIZE) if keep else ((0,), (0,))
    starts, inverses = (q.new_empty(shape, dtype=compute_dtype(q)) for shape in shapes)
    return starts, inverses


@torch.library.register_fake("flashqla::gated_delta_rule_forward")
def forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operands, options, keep = _unpack(arguments)
    shape = _state_shape(operands, options.state_v_first) if options.output_final_state else (0,)
    final_state = operands.q.new_empty(shape, dtype=compute_dtype(operands.q))
    o = operands.v.new_empty(operands.v.shape, dtype=operands.q.dtype)
    return o, final_state, *_new_kept(operands, any(keep))


@torch.library.register_fake("flashqla::gated_delta_rule_backward")
def _backward_fake(do: Tensor | None, dht: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    operands, _, (needed, *_) = _unpack(arguments)
    return tuple(
        operands.q.new_empty(0) if tensor is None or not wanted else tensor.new_empty(tensor.shape)
        for tensor, wanted in zip(operands[:NUM_DIFFERENTIABLE], needed, strict=True)
    )


# ------------------------------------------------------------------------------------------------------------ operators


@torch.library.impl("flashqla::gated_delta_rule_forward", "CompositeExplicitAutograd")
def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operands, options, keep = _unpack(arguments)
    plan = make_plan(operands, options)
    on_hopper = backends.choose(operands, options, plan) == "hopper"
    result = backends.hopper_forward(operands, options, plan) if on_hopper else None
    kept = _new_kept(operands, any(keep) and result is None)
    o, final_state = reference_forward(operands, options, *kept) if result is None else result
    nothing = operands.q.new_empty(0, dtype=compute_dtype(operands.q))
    return o, nothing if final_state is None else final_state, *kept


@torch.library.impl("flashqla::gated_delta_rule_backward", "CompositeExplicitAutograd")
def _backward(do: Tensor | None, dht: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    operands, options, (needed, *kept) = _unpack(arguments)
    kernels = options._replace(block_dv=options.backward_block_dv, segment_chunks=options.backward_segment_chunks)
    if options.form == "split":
        kernels = kernels._replace(form="chunked")
    elif options.form == "recurrent":  # the chunk kernels give its gradients; what they refuse, the reference computes
        kernels = kernels._replace(form="chunked", backend="auto" if options.backend == "hopper" else options.backend)
    plan = make_plan(operands, kernels)
    gradients = None
    if backends.choose(operands, kernels, plan) == "hopper":
        gradients = backends.hopper_backward(do, dht, operands, kernels, plan, needed)
    if gradients is None:
        gradients = _reference_backward(do, dht, operands, options, needed, *kept)
    return tuple(operands.q.new_empty(0) if gradient is None else gradient for gradient in gradients)


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
    compute = compute_dtype(operands.q)

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
    if options.form == "chunked" and operands.q.device.type == "cpu":
        keywords["chunk_size"] = CPU_CHUNK_SIZE
    return _Prepared(q, k, v, g, beta, q_rstd, k_rstd, raw_g, raw_beta, A_log, dt_bias, keywords)


def _add_kept(keywords: dict[str, Any], starts: Tensor | None, inverses: Tensor | None) -> None:
    if starts is not None and starts.numel():
        keywords["kept"] = reference.Kept.of(starts, inverses)


def reference_forward(
    operands: Operands, options: Options, starts: Tensor | None = None, inverses: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    with torch.autocast(operands.q.device.type, enabled=False):
        inputs = _prepare(operands, options)
        _add_kept(inputs.keywords, starts, inverses)
        compute = getattr(reference, options.form)
        result = compute(*inputs[:5], output_final_state=options.output_final_state, **inputs.keywords)
    o = _with_padding(result.output, operands.v.shape, operands.q.dtype)
    return o, result.final_state


def _reference_backward(
    do: Tensor | None,
    dht: Tensor | None,
    operands: Operands,
    options: Options,
    needed: list[bool],
    starts: Tensor | None = None,
    inverses: Tensor | None = None,
) -> list[Tensor | None]:
    backward = reference.split_backward if options.form == "split" else reference.backward
    with torch.autocast(operands.q.device.type, enabled=False):
        inputs = _prepare(operands, options)
        _add_kept(inputs.keywords, starts, inverses)
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
    o, final_state, *_ = torch.ops.flashqla.gated_delta_rule_forward(*operands, *options)
    return o, final_state if options.output_final_state else None


@torch.no_grad()
def backward(
    do: Tensor | None,
    dht: Tensor | None,
    operands: Operands,
    options: Options,
    needed: list[bool] | None = None,
    kept: Sequence[Tensor] = (),
) -> Gradients:
    """Gradients in the dtypes of their inputs; ``needed`` (one flag per differentiable operand) leaves the others
    out; ``kept`` is what the forward operator kept."""
    needed = [
        tensor is not None and (needed is None or needed[i]) for i, tensor in enumerate(operands[:NUM_DIFFERENTIABLE])
    ]
    gradients = torch.ops.flashqla.gated_delta_rule_backward(do, dht, *operands, *options, needed, *kept)
    return Gradients(*(gradient if wanted else None for gradient, wanted in zip(gradients, needed, strict=True)))


def differentiable(operands: Operands, options: Options) -> tuple[Tensor, Tensor | None]:
    """As :func:`forward`, and differentiable once with respect to the first eight operands."""
    asked_for = torch.is_grad_enabled() and any(x.requires_grad for x in operands if x is not None)
    # torch.compile cannot trace a Function with a setup_context where nothing asks for gradients, and an eager call
    # saves its cost; function transforms want the Function in any case, for its refusals.
    if not asked_for and (torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()):
        return forward(operands, options)
    distinct = []  # torch.compile refuses a Function that gets one tensor twice, as in q = k
    for tensor in operands:
        repeated = tensor is not None and any(tensor is other for other in distinct)
        distinct.append(tensor.view_as(tensor) if repeated else tensor)
    o, final_state, *_ = _GatedDeltaRule.apply(options, *distinct)
    return o, final_state if options.output_final_state else None


class _GatedDeltaRule(torch.autograd.Function):
    """Saves the inputs and on a CPU what the forward kept, linear in the tokens; the backward recomputes the rest."""

    @staticmethod
    def forward(options: Options, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        operands = Operands(*tensors)
        # How many blocks packed sequences have depends on their lengths, which is no size for an operator to return.
        keep = operands.q.device.type == "cpu" and options.form == "chunked" and operands.cu_seqlens is None
        return torch.ops.flashqla.gated_delta_rule_forward(*operands, *options, keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Apart from the forward, which is what torch.func.grad asks of a Function."""
        (ctx.options, *tensors), (_, _, *kept) = inputs, output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(*tensors, *(tensor for tensor in kept if tensor.numel()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        tensors, options = ctx.saved_tensors, ctx.options
        operands, kept = Operands(*tensors[: len(Operands._fields)]), tensors[len(Operands._fields) :]
        dht = dht if options.output_final_state else None
        needed = list(ctx.needs_input_grad[1 : 1 + NUM_DIFFERENTIABLE])
        return (None, *backward(do, dht, operands, options, needed, kept), None, None)
