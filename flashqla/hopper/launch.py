"""Launching the Hopper forward: what it refuses, what it allocates, and its two kernels, or five with segments."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..operands import Operands, Options
from ..plan import Plan
from . import gated_inverse
from .compile import kernel
from .pieces import CHUNK_SIZE
from .segments import Segments, segment_ends

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
GATE_DTYPES = (torch.float32, torch.bfloat16)
ALIGNMENT = 16  # bytes: of TMA's addresses and strides


def refusals(operands: Operands, plan: Plan) -> list[str]:
    """Reasons why the kernels cannot run this call; none: they can. The device fits, and shapes are validated."""
    reasons = operand_refusals(operands)
    if plan.chunk_size != CHUNK_SIZE:
        reasons.append(f"plan: the kernels need chunks of {CHUNK_SIZE} tokens, got {plan.chunk_size}")
    return reasons


def operand_refusals(operands: Operands) -> list[str]:
    """Dtypes and head dimensions that no kernel takes, token by token or in chunks."""
    reasons = []
    for name in ("q", "k", "v"):
        dtype = getattr(operands, name).dtype
        if dtype not in DTYPES or dtype != operands.q.dtype:
            reasons.append(f"{name}: the kernels need bfloat16 or float16, the same for q, k and v, got {dtype}")
    for name, size in (("K", operands.q.shape[-1]), ("V", operands.v.shape[-1])):
        if size not in HEAD_DIMS:
            reasons.append(f"{name}: the kernels need a head dimension of 64 or 128, got {size}")
    return reasons


def forward(
    operands: Operands, options: Options, plan: Plan, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Output ``[B, T, HV, V]`` (``out`` if given) and final state (fp32, or None) of a call without `refusals`.

    Two launches on the current stream, five if the plan has segments; nothing waits for the device, nothing is read
    back from it.
    """
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, _ = operands
    state_v_first = options.state_v_first
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    o = torch.empty(B, T, HV, V, dtype=q.dtype, device=q.device) if out is None else out
    offsets = offsets_of(B, T, q.device) if cu_seqlens is None else cu_seqlens.to(torch.int32)
    N = offsets.numel() - 1
    final_state = initial = None
    if options.output_final_state:
        final_state = torch.empty(
            (N, HV, V, K) if state_v_first else (N, HV, K, V), device=q.device, dtype=torch.float32
        )
    if initial_state is not None:
        initial = initial_state.float()
        initial = initial.mT if state_v_first else initial
    if N == 0 or T == 0:  # nothing to launch: the states pass through
        if final_state is not None:
            final_state = final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
        return o.zero_(), final_state

    q, k, v = (tiles(x) for x in (q, k, v))
    g, beta = (gate_rows(x) for x in (g, beta))
    nothing = torch.empty(1, device=q.device, dtype=torch.float32)
    no_state = nothing.expand(N, HV, K, V)
    final = no_state if final_state is None else final_state.mT if state_v_first else final_state
    slots = gated_inverse.num_slots(B * T, N)
    inverse = torch.empty(slots, HV, plan.chunk_size, plan.chunk_size, dtype=q.dtype, device=q.device)
    gates = torch.empty(slots, HV, 2, plan.chunk_size, device=q.device, dtype=torch.float32)
    flags = activation_flags(operands, options)
    flags += gated_inverse.GATED * (q.dtype == torch.float16)
    with torch.cuda.device(q.device):
        launch_inverse(k, g, beta, A_log, dt_bias, offsets, inverse, gates, nothing, flags, plan.sm_count)
        if plan.segment_chunks:
            segments = segment_ends(k, v, inverse, gates, offsets, initial, plan.segment_chunks, options.cp_threshold)
        else:
            segments = Segments.none(N, HV, K, V, q.device)
        kernel("chunk_forward", dtype=dtype_name(q), head_dim_k=K, head_dim_v=V, block_dv=plan.block_dv)(
            q,
            k,
            v,
            inverse,
            gates,
            offsets,
            no_state if initial is None else initial,
            final,
            segments.states,
            o.as_strided((B * T, HV, V), (o.stride(1), o.stride(2), 1)),
            float(options.scale),
            segments.chunks,
            segments.count,
            int(initial is not None),
            int(options.output_final_state),
            int(options.use_qk_l2norm),
        )
    return o, final_state


def launch_inverse(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    offsets: Tensor,
    inverse: Tensor,
    gates: Tensor,
    nothing: Tensor,
    flags: int,
    sm_count: int,
) -> None:
    """Launch `gated_inverse`: k is of `tiles`, g and beta are of `gate_rows`; `nothing` is for absent vectors."""
    (H, K), (slots, HV) = k.shape[1:], inverse.shape[:2]
    heads = gated_inverse.heads_per_item(H, HV)
    dtypes = {"dtype": dtype_name(k), "gate_dtype": dtype_name(g), "beta_dtype": dtype_name(beta)}
    kernel("gated_inverse", **dtypes, head_dim=K, heads=heads)(
        k,
        g,
        beta,
        nothing if A_log is None else A_log.float().contiguous(),
        nothing if dt_bias is None else dt_bias.float().contiguous(),
        offsets,
        inverse,
        gates,
        flags,
        gated_inverse.grid_size(slots, HV, K, heads, sm_count),
    )


def activation_flags(operands: Operands, options: Options) -> int:
    """The flags of the kernels that say what is computed inside the operator."""
    return (
        gated_inverse.USE_GATE * options.use_gate
        + gated_inverse.HAS_DT_BIAS * (options.use_gate and operands.dt_bias is not None)
        + gated_inverse.BETA_SIGMOID * options.use_beta_sigmoid
        + gated_inverse.NEG_EIGVAL * options.allow_neg_eigval
        + gated_inverse.L2NORM * options.use_qk_l2norm
    )


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def offsets_of(B: int, T: int, device: torch.device) -> Tensor:
    """int32 `cu_seqlens` of a dense batch. Memory of a graph under capture must not outlive it in the cache."""
    if torch.cuda.is_current_stream_capturing():
        return torch.arange(0, (B + 1) * T, T or 1, dtype=torch.int32, device=device)[: B + 1]
    return _cached_offsets(B, T, device)


@functools.lru_cache(maxsize=64)
def _cached_offsets(B: int, T: int, device: torch.device) -> Tensor:
    return torch.arange(B + 1, dtype=torch.int32, device=device) * T


def tiles(x: Tensor) -> Tensor:
    """``[B, T, heads, D]`` as ``[B * T, heads, D]`` for TMA: in place where its strides allow it, else a copy."""
    B, T, heads, D = x.shape
    token, head = x.stride(1), x.stride(2) if heads > 1 else D
    unit = ALIGNMENT // x.element_size()
    in_place = (
        (x.stride(3) == 1)
        and (B == 1 or x.stride(0) == T * token)
        and token % unit == 0
        and head % unit == 0
        and min(token, head) > 0
        and x.data_ptr() % ALIGNMENT == 0
    )
    if not in_place:
        x = x.clone(memory_format=torch.contiguous_format)
        token, head = heads * D, D
    return x.as_strided((B * T, heads, D), (token, head, 1))


def gate_rows(x: Tensor) -> Tensor:
    """``[B, T, HV]`` as ``[B * T, HV]`` in a dtype the kernel reads."""
    return (x if x.dtype in GATE_DTYPES else x.float()).flatten(0, 1)
