"""Launching the Hopper backward: what it allocates, its three kernels, and the gradients of the activations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..plan import CP_THRESHOLD, Plan
from . import gated_inverse
from .chunk_forward import NO_SEGMENTS
from .compile import kernel
from .launch import activation_flags, dtype_name, gate_rows, offsets_of, tiles
from .segments import num_segments


def backward(
    do: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    needed: Sequence[bool],
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    use_qk_l2norm: bool,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    cp_threshold: float | None = CP_THRESHOLD,
    plan: Plan,
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
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    operands = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    offsets = offsets_of(B, T, q.device) if cu_seqlens is None else cu_seqlens.to(torch.int32)
    N = offsets.numel() - 1
    if N == 0 or T == 0:  # nothing to launch: the state passes through
        gradients = [torch.zeros_like(x) if x is not None else None for x in operands]
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
    heads = gated_inverse.heads_per_item(H, HV)
    flags = activation_flags(use_gate, dt_bias, use_beta_sigmoid, allow_neg_eigval, use_qk_l2norm)
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
        kernel(
            "gated_inverse",
            dtype=dtype_name(q),
            gate_dtype=dtype_name(g_rows),
            head_dim=K,
            heads=heads,
            beta_dtype=dtype_name(beta_rows),
        )(
            k,
            g_rows,
            beta_rows,
            nothing if A_log is None else A_log.float().contiguous(),
            nothing if dt_bias is None else dt_bias.float().contiguous(),
            offsets,
            inverse,
            gates,
            flags,
            gated_inverse.grid_size(slots, HV, K, heads, plan.sm_count),
        )
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
            float(scale),
            -math.inf if cp_threshold is None else cp_threshold * math.log2(math.e),
            cut.segment_chunks or NO_SEGMENTS,
            num_segments(B * T, N, cut.segment_chunks) if cut.segment_chunks else N,
            int(chunk_gradients),
            int(initial is not None),
            int(dfinal is not None),
            int(dinitial is not None),
            int(use_qk_l2norm),
        )
        if chunk_gradients:
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
                float(scale),
                flags,
                min(plan.sm_count, slots * H),
            )
    dA_log = ddt_bias = None
    if dg is not None:
        dg, dbeta = dg.view(B, T, HV), dbeta.view(B, T, HV)
        if use_gate:
            dg, dA_log, ddt_bias = reference.gate_backward(dg, _without_padding(g, offsets, cu_seqlens), A_log, dt_bias)
        if use_beta_sigmoid:
            raw = _without_padding(beta, offsets, cu_seqlens)
            dbeta = reference.beta_activation_backward(dbeta, raw, allow_neg_eigval)
    if dinitial is not None and state_v_first:
        dinitial = dinitial.mT
    gradients = (dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial)
    return [
        gradient.view(operand.shape).to(operand.dtype) if wanted and operand is not None else None
        for gradient, operand, wanted in zip(gradients, operands, needed, strict=True)
    ]


def _without_padding(raw: Tensor, offsets: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Raw gates ``[B, T, HV]`` with zeros behind the last sequence, where they may be NaN and the gradients are 0."""
    if cu_seqlens is None:
        return raw
    token = torch.arange(raw.shape[1], device=raw.device)
    return torch.where((token < offsets[-1])[None, :, None], raw, 0)
