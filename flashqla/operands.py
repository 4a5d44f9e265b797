"""One call as the operators see it: its tensors, its options, its gradients, and the plan made from their shapes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .plan import DEFAULT_SM_COUNT, Plan, sequence_lengths


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
    scan). ``block_dv`` fixes the plan's split of d_v; 0 lets the plan choose. ``segment_chunks`` fixes how many chunks
    a segment has; 0: no segments, -1: the plan chooses. ``backward_block_dv`` and ``backward_segment_chunks`` are the
    same for the backward. ``cp_threshold`` is that of eq. 7.4, None: exact.
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
    segment_chunks: int
    backward_block_dv: int
    backward_segment_chunks: int
    cp_threshold: float | None


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


def make_plan(operands: Operands, options: Options) -> Plan:
    """The plan of a call; exact when the offsets lie on the host.

    Raises:
        ValueError: when the offsets on the host are not those of packed sequences.
    """
    offsets, lengths = _offsets_on_host(operands), None
    if offsets is not None:
        lengths = sequence_lengths(offsets.tolist(), operands.q.shape[1])
    return _plan_of(
        operands.q.shape,
        operands.v.shape,
        None if operands.cu_seqlens is None else operands.cu_seqlens.shape,
        lengths,
        device_sm_count(operands.q.device),
        options.block_dv or None,
        True if options.form == "split" else "auto" if options.segment_chunks else False,
        None if options.segment_chunks < 0 else options.segment_chunks,
    )


@functools.lru_cache(maxsize=512)
def _plan_of(q_shape, v_shape, cu_seqlens_shape, lengths, sm_count, block_dv, context_parallel, segment_chunks) -> Plan:
    """Plans are values: calls of the same shapes share one."""
    return Plan.build(
        q_shape, v_shape, cu_seqlens_shape, lengths, sm_count, block_dv, context_parallel, segment_chunks
    )  # fmt: skip


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
