"""Launching the Hopper recurrence, token by token: what it refuses, what it allocates, and its one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operands import Operands, Options
from . import recurrent
from .compile import kernel
from .launch import ALIGNMENT, HEAD_DIMS, activation_flags, dtype_name, gate_rows, operand_refusals, tiles


def refusals(
    operands: Operands,
    *,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    inplace_final_state: bool = False,
    out: Tensor | None = None,
) -> list[str]:
    """Reasons why the kernel cannot run this call; none: it can. The device fits, and shapes are validated.

    States that are written in place or picked from a pool, and ``out``, are used where they lie: never copied.
    """
    reasons, initial_state = operand_refusals(operands), operands.initial_state
    if initial_state is not None and (inplace_final_state or state_indices is not None):
        if initial_state.dtype != torch.float32:
            reasons.append(f"initial_state: a pool must be float32 for the kernels, got {initial_state.dtype}")
        elif not _vectors(initial_state):
            reasons.append(
                "initial_state: a pool needs a contiguous last dimension, and other strides and an address of "
                f"multiples of {ALIGNMENT} bytes, got strides {list(initial_state.stride())}"
            )
    return reasons if out is None else reasons + out_refusals(out)


def out_refusals(out: Tensor) -> list[str]:
    """Why a kernel cannot write its output to this buffer; empty when it can."""
    if _vectors(out) and _flat(out):
        return []
    return [
        "out: needs a contiguous last dimension, tokens at one stride, and other strides and an address of "
        f"multiples of {ALIGNMENT} bytes, got strides {list(out.stride())}"
    ]


def forward(
    operands: Operands,
    options: Options,
    *,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    inplace_final_state: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Output ``[B, T, HV, V]`` (``out`` if given) and final state (``initial_state`` in place, fp32, or None).

    One launch on the current stream; nothing waits for the device, nothing is read back from it.
    """
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, _ = operands
    state_v_first = options.state_v_first
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    o = torch.empty(B, T, HV, V, dtype=q.dtype, device=q.device) if out is None else out
    initial = initial_state
    if initial is not None and not inplace_final_state and state_indices is None:
        initial = initial.float()
        initial = initial if _vectors(initial) else initial.contiguous()
    if inplace_final_state:
        final = initial
    elif options.output_final_state:
        final = torch.empty((N, HV, V, K) if state_v_first else (N, HV, K, V), device=q.device, dtype=torch.float32)
    else:
        final = None
    if N == 0:
        return o.zero_(), final
    g, beta = gate_rows(g), gate_rows(beta)
    nothing = torch.empty(max(HEAD_DIMS), device=q.device, dtype=torch.float32)
    no_fp32, no_bf16 = nothing[:1].view(1, 1), nothing.view(torch.bfloat16)[:1].view(1, 1)
    no_state = nothing.as_strided((1, HV, *((V, K) if state_v_first else (K, V))), (0, 0, 0, 1))
    no_int = nothing.view(torch.int32)
    flags = (
        activation_flags(operands, options)
        + recurrent.G_IS_BF16 * (g.dtype == torch.bfloat16)
        + recurrent.BETA_IS_BF16 * (beta.dtype == torch.bfloat16)
        + recurrent.HAS_INITIAL * (initial is not None)
        + recurrent.WRITE_FINAL * (final is not None)
        + recurrent.HAS_INDICES * (state_indices is not None)
        + recurrent.FINAL_AT_SLOT * inplace_final_state
        + recurrent.HAS_MASK * (has_initial_state is not None)
    )
    with torch.cuda.device(q.device):
        kernel("recurrent", dtype=dtype_name(q), head_dim_k=K, head_dim_v=V, state_v_first=state_v_first)(
            *(tiles(x) for x in (q, k, v)),
            *_by_dtype(g, no_fp32, no_bf16),
            *_by_dtype(beta, no_fp32, no_bf16),
            nothing if A_log is None else A_log.float().contiguous(),
            nothing if dt_bias is None else dt_bias.float().contiguous(),
            no_int if cu_seqlens is None else cu_seqlens.to(torch.int32),
            no_int if state_indices is None else state_indices.to(torch.int32),
            nothing.view(torch.uint8) if has_initial_state is None else has_initial_state.view(torch.uint8),
            no_state if initial is None else initial,
            no_state if final is None else final,
            o.as_strided((B * T, HV, V), (o.stride(1), o.stride(2), 1)),
            float(options.scale),
            flags,
            T if cu_seqlens is None else 0,
            N,
        )
    return o, final


def _by_dtype(gate: Tensor, no_fp32: Tensor, no_bf16: Tensor) -> tuple[Tensor, Tensor]:
    """The two arguments of a gate: in the one of its dtype, with nothing in the other."""
    return (no_fp32, gate) if gate.dtype == torch.bfloat16 else (gate, no_bf16)


def _vectors(x: Tensor) -> bool:
    """Whether every row can be read and written 16 bytes at a time."""
    unit = ALIGNMENT // x.element_size()
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return x.stride(-1) == 1 and x.data_ptr() % ALIGNMENT == 0 and all(stride % unit == 0 for stride in strides)


def _flat(x: Tensor) -> bool:
    """Whether batch and tokens can be one dimension."""
    return x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
