"""Launching the Hopper backward: what it allocates, its three kernels, and the gradients of the activations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..operands import NUM_DIFFERENTIABLE, Operands, Options
from ..plan import Plan
from . import gated_inverse
from .compile import kernel
from .launch import activation_flags, dtype_name, gate_rows, launch_inverse, offsets_of, tiles
from .pieces import NO_SEGMENTS
from .segments import num_segments


def backward(
    do: Tensor | None,
    dht: Tensor | None,
    operands: Operands,
    options: Options,
    plan: Plan,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of a call that `launch.refusals` has let through, in the order and the dtypes of the operands.

    Saves nothing from the forward: inverses, states and corrected values are computed once more. Three launches on the
    current stream, two where only the gradients of v and the initial state are needed; nothing waits for the device.

    Args:
        do: gradient of the output ``[B, T, HV, V]``, any strides, or None for zeros.
        dht: gradient of the final state, laid out as it, or None for zeros.
        needed: one flag for each of q, k, v, g, beta, A_log, dt_bias and the initial state.

    Returns:
        dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial_state; None where not needed.
    """
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, _ = operands
    differentiable = operands[:NUM_DIFFERENTIABLE]
    state_v_first = options.state_v_first
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    offsets = offsets_of(B, T, q.device) if cu_seqlens is None else cu_seqlens.to(torch.int32)
    N = offsets.numel() - 1
    if N == 0 or T == 0:  # nothing to launch: the state passes through
        gradients = [torch.zeros_like(x) if x is not None else None for x in differentiable]
        if dht is not None and initial_state is not None:
            gradients[-1].copy_(dht)
        return [gradient if wanted else None for gradient, wanted in zip(gradients, needed, strict=True)]

    C, dtype = plan.chunk_size, q.dtype
    do = torch.zeros(1, dtype=dtype, device=q.device).expand(B, T, HV, V) if do is None else do.to(dtype)
    do, q, k, v = (tiles(x) for x in (do, q, k, v))
    g_rows, beta_rows = gate_rows(g), gate_rows(beta)
    slots = gated_inverse.num_slots(B * T, N)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=do.device)

    f32 = torch.float32
    nothing = empty(1, dtype=f32)
    no_state = nothing.expand(N, HV, K, V)
    dinitial = None
    if needed[7]:
        dinitial = empty(N, HV, V, K, dtype=f32).mT if state_v_first else empty(N, HV, K, V, dtype=f32)
    initial = None if initial_state is None else initial_state.float()
    dfinal = None if dht is None else dht.float()
    if state_v_first:
        initial, dfinal = (None if x is None else x.mT for x in (initial, dfinal))
    inverse, gates = empty(slots, HV, C, C), empty(slots, HV, 2, C, dtype=f32)
    dv, dstates, frames = empty(B * T, HV, V), empty(slots, HV, V, K), empty(slots, HV, 2, dtype=f32)
    flags = activation_flags(operands, options)
    flags += gated_inverse.GATED + gated_inverse.BETA_FLOOR
    sizes = {"dtype": dtype_name(q), "head_dim_k": K, "head_dim_v": V}
    dq = dk = dg = dbeta = None
    chunk_gradients = any(needed[i] for i in (0, 1, 3, 4, 5, 6))
    if chunk_gradients:
        states, values = empty(slots, HV, V, K), empty(slots, HV, C, V)
        chunks = empty(slots, 2, dtype=torch.int32)
    else:  # not written: anything of the shape
        states, values = dstates, dstates.view(-1)[: slots * HV * C * V].view(slots, HV, C, V)
        chunks = frames.view(torch.int32).view(-1, 2)[:slots]
    with torch.cuda.device(q.device):
        launch_inverse(k, g_rows, beta_rows, A_log, dt_bias, offsets, inverse, gates, nothing, flags, plan.sm_count)
        cut = plan.backward_cut
        kernel("backward_chains", **sizes, block_dv=cut.block_dv)(
            q,
            k,
            v,
            do,
            inverse,
            gates,
            offsets,
            no_state if initial is None else initial,
            no_state if dfinal is None else dfinal,
            dv,
            dstates,
            states,
            values,
            frames,
            chunks,
            no_state if dinitial is None else dinitial,
            float(options.scale),
            -math.inf if options.cp_threshold is None else options.cp_threshold * math.log2(math.e),
            cut.segment_chunks or NO_SEGMENTS,
            num_segments(B * T, N, cut.segment_chunks) if cut.segment_chunks else N,
            int(chunk_gradients),
            int(initial is not None),
            int(dfinal is not None),
            int(dinitial is not None),
            int(options.use_qk_l2norm),
        )
        if chunk_gradients:
            del inverse  # its memory does for dq or dk
            dq, dk = empty(B * T, H, K), empty(B * T, H, K)
            dg, dbeta = empty(B * T, HV, dtype=f32), empty(B * T, HV, dtype=f32)
            kernel("backward_chunk", **sizes, beta_dtype=dtype_name(beta_rows))(
                q,
                k,
                do,
                dv,
                values,
                states,
                dstates,
                frames,
                chunks,
                gates,
                beta_rows,
                offsets,
                dq,
                dk,
                dg,
                dbeta,
                float(options.scale),
                flags,
                min(plan.sm_count, slots * H),
            )
    dA_log = ddt_bias = None
    if dg is not None:
        dg, dbeta = dg.view(B, T, HV), dbeta.view(B, T, HV)
        if options.use_gate:
            dg, dA_log, ddt_bias = reference.gate_backward(dg, _without_padding(g, offsets, cu_seqlens), A_log, dt_bias)
        if options.use_beta_sigmoid:
            raw = _without_padding(beta, offsets, cu_seqlens)
            dbeta = reference.beta_activation_backward(dbeta, raw, options.allow_neg_eigval)
    if dinitial is not None and state_v_first:
        dinitial = dinitial.mT
    gradients = (dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial)
    return [
        gradient.view(operand.shape).to(operand.dtype) if wanted and operand is not None else None
        for gradient, operand, wanted in zip(gradients, differentiable, needed, strict=True)
    ]


def _without_padding(raw: Tensor, offsets: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Raw gates ``[B, T, HV]`` with zeros behind the last sequence, where they may be NaN and the gradients are 0."""
    if cu_seqlens is None:
        return raw
    token = torch.arange(raw.shape[1], device=raw.device)
    return torch.where((token < offsets[-1])[None, :, None], raw, 0)
