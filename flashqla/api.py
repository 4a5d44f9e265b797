"""The public functions: validate, plan, run.

The recurrence, for value head j with query/key head ``j // (HV // H)`` and state S of shape [K, V] (eq. 1.1 to 1.3)::

    S   <- exp(g_t) S
    u_t  = beta_t (v_t - S^T k_t)
    S   <- S + k_t u_t^T
    o_t  = scale S^T q_t
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import backends, ops, serving, validation
from .operands import Gradients, Operands, Options, make_plan
from .plan import CP_THRESHOLD, Plan
from .validation import Call


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    plan: Plan | None = None,
    context_parallel: bool | str = "auto",
    cp_threshold: float | None = CP_THRESHOLD,
    backend: str = "auto",
    cp_group: Any = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    inplace_final_state: bool = False,
    out: Tensor | None = None,
    states: Tensor | None = None,
    states_every: int | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over whole sequences, chunk by chunk; differentiable once, bitwise deterministic.

    Args:
        q, k: ``[B, T, H, K]``; float16, bfloat16, float32 or float64, the same for q, k and v.
        v: ``[B, T, HV, V]``; HV is a multiple of H.
        g: ``[B, T, HV]``, any of these dtypes; natural logarithm of the decay, at most 0. With ``use_gate_in_kernel``
            the raw logits of eq. 2.3.
        beta: ``[B, T, HV]``, any of these dtypes; write strength in [0, 1] (up to 2 is sound for keys of unit norm).
            With ``use_beta_sigmoid_in_kernel`` the raw logits of eq. 2.5.
        scale: factor of the output; default ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]``, default zeros; N is B, or the number of packed sequences.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: divide q and k by ``sqrt(sum(x^2) + 1e-6)`` over K first (eq. 2.4).
        use_beta_sigmoid_in_kernel: ``beta = sigmoid(beta)`` first.
        allow_neg_eigval: ``beta = 2 sigmoid(beta)``; only together with ``use_beta_sigmoid_in_kernel``.
        state_v_first: states are ``[N, HV, V, K]``.
        cu_seqlens: ``[N + 1]`` int32 or int64: offsets of packed sequences, with B = 1. Sequences of no tokens are
            legal. Tokens
            past the last offset are padding: never read, their output and gradients are 0. The values are checked where
                that costs
            no synchronisation (always with the environment variable ``FLASHQLA_DEBUG=1``).
        cu_seqlens_cpu: the same on the host; makes the plan exact without a synchronisation.
        chunk_indices: accepted for flash-linear-attention's callers; the plan makes its own.
        cp_context, cp_group: reserved, must be None.
        use_gate_in_kernel: ``g = -exp(A_log) softplus(g + dt_bias)`` first.
        A_log, dt_bias: ``[HV]``; used with ``use_gate_in_kernel`` only, where ``dt_bias`` may be None.
        chunk_size: a hint of 16, 32 or 64; the results are those of any chunk size.
        plan: a reusable :class:`flashqla.Plan` that fits the shapes.
        context_parallel: cut long sequences into segments that run side by side (eq. 7.1 to 7.4). "auto" lets the
            plan decide; True insists, and raises where there is nothing to cut.
        cp_threshold: log decay, below 0, over which a segment's end state forgets what came before it: its error is
            below ``exp(cp_threshold)`` times what was forgotten (eq. 7.4). Heads that decay less are exact, and so are
            segments in which some ``beta |k|^2`` exceeds 2 (keys of norm 1 and beta up to 2 do not). None: all are. The
            reference is always exact.
        backend: "auto" takes the Hopper kernels where they can run the call, else the reference. "hopper", "reference"
            and "fla" (the Triton kernels of flash-linear-attention) insist.
        state_indices: ``[N]`` int32 or int64, without gradients, as all that follow: ``initial_state`` is a pool of any
            number of slots, and sequence n starts from slot ``state_indices[n]``. A negative index skips the sequence:
            its output and returned state are 0, and no slot is touched.
        has_initial_state: ``[N]`` bool: where False, the sequence starts from zeros, whatever its slot holds.
        inplace_final_state: write final states where the initial ones lie, and return that tensor. The recurrent kernel
            writes there itself; the chunk kernels' N states are gathered from the pool and scattered back.
        out: buffer for the output, ``[B, T, HV, V]`` in q's dtype.
        states, states_every: for prefix caches: after every ``L = 64 * states_every`` tokens of a sequence its state
            goes to a row of ``states``, ``[B * T // L, HV, K, V]`` in the dtype and layout of the final state: after
            ``(j + 1) * L`` tokens of sequence n to row ``cu_seqlens[n] // L + j`` (``n * T // L + j`` in a dense
            batch). Other rows are not touched. Runs on the reference.

    Returns:
        ``(o, final_state)``: ``[B, T, HV, V]`` in q's dtype, and float32 (float64 for float64 q) in the layout of
        ``initial_state``, or None. An output too large for q's dtype (65504 for float16) becomes infinite; nothing is
        clamped.

    Raises:
        TypeError, ValueError, NotImplementedError: listing everything that is wrong with the call.
    """
    call, unknown = _collect(
        unknown,
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_indices=chunk_indices,
        cp_context=cp_context,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
        plan=plan,
        context_parallel=context_parallel,
        cp_threshold=cp_threshold,
        backend=backend,
        cp_group=cp_group,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
        inplace_final_state=inplace_final_state,
        out=out,
        states=states,
        states_every=states_every,
    )
    return _run(ops.differentiable, "chunk_gated_delta_rule", call, unknown, form="chunked")


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same recurrence token by token, for decoding: continues from a prefill's ``final_state``.

    Takes every argument of :func:`chunk_gated_delta_rule`. Without ``g`` nothing decays, without ``beta`` every write
    is full. On Hopper one kernel reads and writes each state once; gradients are those of the chunked backward, so it
    is differentiable once. ``gk`` and ``gv`` (per-channel decays of flash-linear-attention's function) must be None.
    """
    if isinstance(v, Tensor):
        g = v.new_zeros(v.shape[:3], dtype=torch.float32) if g is None else g
        beta = v.new_ones(v.shape[:3], dtype=torch.float32) if beta is None else beta
    call, unknown = _collect(
        options,
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
    )
    return _run(ops.differentiable, "fused_recurrent_gated_delta_rule", call, unknown, form="recurrent")


def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """:func:`chunk_gated_delta_rule` without autograd, for those who write their own Function; same arguments."""
    call, unknown = _collect(
        options,
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
    )
    return _run(ops.forward, "chunk_gated_delta_rule_fwd", call, unknown, form="chunked")


def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor | None,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    **options: Any,
) -> Gradients:
    """Gradients of :func:`chunk_gated_delta_rule_fwd`, recomputed from its inputs.

    Args:
        do: gradient of the output, ``[B, T, HV, V]``, or None for zeros.
        dht: gradient of the final state in its layout, or None for zeros.
        the others: as for :func:`chunk_gated_delta_rule`.

    Returns:
        ``(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial_state)``, each in its input's dtype; None for absent
        inputs.
    """
    call, unknown = _collect(
        options, q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state, do=do, dht=dht
    )

    def run(operands: Operands, flags: Options) -> Gradients:
        return ops.backward(do, dht, operands, flags)

    return _run(run, "chunk_gated_delta_rule_bwd", call, unknown, form="chunked")


def is_supported(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    backend: str = "hopper",
    function: Callable = chunk_gated_delta_rule,
    **options: Any,
) -> tuple[bool, list[str]]:
    """Whether a backend can run a call, and why not. Launches nothing and raises nothing.

    Without tensors it answers for this machine: whether the Hopper kernels (or another ``backend``) can run here at
        all.

    Args:
        backend: "hopper", "reference", "fla", or "auto", which always finds one for a valid call.
        function: :func:`chunk_gated_delta_rule` or :func:`fused_recurrent_gated_delta_rule`.
        the others: as for :func:`chunk_gated_delta_rule`.

    Returns:
        ``(True, [])`` or ``(False, reasons)``.
    """
    if q is None:
        if backend not in validation.BACKENDS:
            return False, [f"backend: must be one of {list(validation.BACKENDS)}, got {backend!r}"]
        reasons = {"hopper": backends.device_refusals, "fla": backends.fla_refusals}.get(backend, list)()
        return not reasons, reasons
    insists = backend in ("hopper", "fla")
    call, unknown = _collect(options, q=q, k=k, v=v, g=g, beta=beta, backend="auto" if insists else backend)
    reasons = [text for _, text in validation.find_unknown(unknown) + validation.find_problems(call)]
    if not reasons and backend == "fla":
        reasons = backends.fla_refusals(call.q.device)
    elif not reasons and backend == "hopper":
        form = "recurrent" if function is fused_recurrent_gated_delta_rule else "chunked"
        operands, flags = _lower(call, form)
        reasons = backends.hopper_refusals(operands, flags, make_plan(operands, flags), serving.Serving.of(call))
    return not reasons, reasons


# --------------------------------------------------------------------------------------------------------------- shared


def _collect(options: dict[str, Any], **named: Any) -> tuple[Call, dict[str, Any]]:
    """Split further keywords into those a call has, the one that has a new name, and those nobody knows."""
    if "transpose_state_layout" in options:
        warnings.warn("transpose_state_layout is the old name of state_v_first", DeprecationWarning, stacklevel=3)
        named["state_v_first"] = options["transpose_state_layout"]
        options = {name: value for name, value in options.items() if name != "transpose_state_layout"}
    fields = set(Call._fields).difference(validation.OUTPUT_GRADIENTS)
    known = {name: value for name, value in options.items() if name in fields}
    unknown = {name: value for name, value in options.items() if name not in fields}
    return Call(**named, **known), unknown


def _run(run: Callable, function: str, call: Call, unknown: dict[str, Any], form: str) -> Any:
    """Validate a call, then hand its operands and options to ``run``."""
    validation.require(function, call, unknown)
    if call.backend == "fla" or backends.prefers_fla(function, call):
        return backends.run_fla(function, call)
    if (served := serving.Serving.of(call)) is not None:
        serving.refuse_gradients(function, call)
        if run is not ops.differentiable and run is not ops.forward:
            raise NotImplementedError(f"{function}: pools and buffers are for the forward alone")
        if form == "recurrent" and call.states is not None:
            raise NotImplementedError(f"{function}: states: must be None token by token, which has no chunks")
        return serving.run(function, call, served, *_lower(call, form))
    if call.context_parallel is True:
        if form == "recurrent":
            text = "context_parallel: must be False or 'auto' token by token, which has no segments, got True"
            raise NotImplementedError(f"{function}: {text}")
        form = "split"
    return run(*_lower(call, form))


def _lower(call: Call, form: str) -> tuple[Operands, Options]:
    """A valid call as operands and options of the operators."""
    offsets, host_offsets = call.cu_seqlens, validation.host_offsets(call)
    if offsets is not None and offsets.device != call.q.device:
        offsets = offsets.to(call.q.device, non_blocking=True)
    operands = Operands(
        q=call.q,
        k=call.k,
        v=call.v,
        g=call.g,
        beta=call.beta,
        A_log=call.A_log if call.use_gate_in_kernel else None,
        dt_bias=call.dt_bias if call.use_gate_in_kernel else None,
        initial_state=call.initial_state,
        cu_seqlens=offsets,
        cu_seqlens_cpu=None if host_offsets is offsets else host_offsets,
    )
    options = Options(
        scale=call.q.shape[-1] ** -0.5 if call.scale is None else float(call.scale),
        output_final_state=bool(call.output_final_state),
        state_v_first=bool(call.state_v_first),
        use_qk_l2norm=bool(call.use_qk_l2norm_in_kernel),
        use_gate=bool(call.use_gate_in_kernel),
        use_beta_sigmoid=bool(call.use_beta_sigmoid_in_kernel),
        allow_neg_eigval=bool(call.allow_neg_eigval),
        form=form,
        backend=call.backend,
        block_dv=0 if call.plan is None else call.plan.block_dv,
        segment_chunks=_segment_chunks(call),
        backward_block_dv=0 if call.plan is None else call.plan.backward_cut.block_dv,
        backward_segment_chunks=_backward_segment_chunks(call),
        cp_threshold=None if call.cp_threshold is None else float(call.cp_threshold),
    )
    return operands, options


def _segment_chunks(call: Call) -> int:
    """What the call says about segments: 0 none, -1 the plan that is yet to be made chooses."""
    if call.context_parallel is False:
        return 0
    if call.plan is None or (call.context_parallel is True and not call.plan.segment_chunks):
        return -1
    return call.plan.segment_chunks


def _backward_segment_chunks(call: Call) -> int:
    if call.context_parallel is False:
        return 0
    return -1 if call.plan is None else call.plan.backward_cut.segment_chunks
