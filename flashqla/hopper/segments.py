"""Launching what context parallelism adds: the state at the end of every segment (eq. 7.1, 7.3 and 7.4)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .compile import kernel
from .pieces import CHUNK_SIZE, NO_SEGMENTS


class Segments(NamedTuple):
    """Segments of the sequences of one call, by the numbers of `segments.cuh`.

    chunks: of a segment; the last of a sequence may have fewer.
    count: numbers that there may be.
    states: `[count, HV, V, K]` fp32: the state at the end of each, transposed; undefined for a sequence's last segment.
    transitions: `[count, HV, K, K]` fp16, M - gamma I transposed; defined where `decays` > 0.
    decays: `[count, HV]` fp32, gamma; 0 where M does not count.
    """

    chunks: int
    count: int
    states: Tensor
    transitions: Tensor | None = None
    decays: Tensor | None = None

    @classmethod
    def none(cls, N: int, HV: int, K: int, V: int, device: torch.device) -> Segments:
        """Every sequence whole; `states` is not read."""
        return cls(NO_SEGMENTS, N, torch.empty(1, HV, V, K, dtype=torch.float32, device=device))


def num_segments(num_tokens: int, num_sequences: int, segment_chunks: int) -> int:
    """A bound that needs no lengths: a segment for each sequence, and those beyond the first."""
    return num_sequences + num_tokens // (segment_chunks * CHUNK_SIZE)


def segment_ends(
    k: Tensor,
    v: Tensor,
    inverse: Tensor,
    gates: Tensor,
    cu_seqlens: Tensor,
    initial: Tensor | None,
    segment_chunks: int,
    threshold: float | None,
) -> Segments:
    """Three launches on the current stream, after `gated_inverse`, with its operands and results.

    Args:
        k, v: `[T, H, K]`, `[T, HV, V]`, as TMA takes them.
        inverse, gates: of `gated_inverse`.
        cu_seqlens: `[N + 1]` int32.
        initial: `[N, HV, K, V]` fp32 or None.
        segment_chunks: chunks of a segment.
        threshold: log decay below which the past is forgotten (eq. 7.4); None: never.
    """
    T, _, K = k.shape
    HV, V = v.shape[1:]
    N = cu_seqlens.numel() - 1
    count = num_segments(T, N, segment_chunks)
    dtype = str(k.dtype).removeprefix("torch.")
    segments = Segments(
        segment_chunks,
        count,
        states=torch.empty(count, HV, V, K, dtype=torch.float32, device=k.device),
        transitions=torch.empty(count, HV, K, K, dtype=torch.float16, device=k.device),
        decays=torch.empty(count, HV, dtype=torch.float32, device=k.device),
    )
    needed = torch.empty(count, HV, dtype=torch.int32, device=k.device)
    order = torch.empty(count * HV, dtype=torch.int32, device=k.device)
    log2_threshold = -math.inf if threshold is None else threshold * math.log2(math.e)
    kernel("segment_order")(gates, cu_seqlens, needed, segments.decays, order, log2_threshold, segment_chunks)
    kernel("segment_states", dtype=dtype, head_dim_k=K, head_dim_v=V)(
        k,
        v,
        inverse,
        gates,
        cu_seqlens,
        torch.empty(1, dtype=torch.float32, device=k.device).expand(N, HV, K, V) if initial is None else initial,
        needed,
        segments.decays,
        order,
        segments.states,
        segments.transitions,
        segment_chunks,
        int(initial is not None),
    )
    kernel("segment_scan", head_dim_k=K, head_dim_v=V)(
        segments.states, segments.transitions, segments.decays, cu_seqlens, segment_chunks
    )
    return segments
