"""Long sequences cut into segments that are computed side by side (derivations, eqs. 7.1 to 7.5).

The effect of a segment on the state is an affine map, S -> M S + N. All maps are computed at once, a scan over the
segments of a sequence gives the state at the start of each, and from there on segments are sequences of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashqla.reference.backward import Gradients, adjoint_chain, differentiate, new_gradients
from flashqla.reference.chunked import Chunks, chunk_form, cut, read_out, state_chain
from flashqla.reference.layout import Layout, compute_dtype, without_autocast


def segment(layout: Layout, segment_chunks: int) -> tuple[Layout, list[slice]]:
    """Layout whose sequences are the segments of `layout`, and the segments of each step of the scan.

    Step s holds segment s of the longest sequences (by rank of `layout`), so it too is a slice.
    """
    if segment_chunks < 1:
        raise ValueError(f"segment_chunks: must be at least 1, got {segment_chunks}")
    span = segment_chunks * layout.chunk_size
    order = layout.order or range(layout.num_sequences)
    starts, lengths, scan = [], [], []
    for step, count in enumerate(layout.counts[::segment_chunks]):
        scan.append(slice(len(starts), len(starts) + count))
        for sequence in order[:count]:
            starts.append(layout.starts[sequence] + step * span)
            lengths.append(min(span, layout.lengths[sequence] - step * span))
    return Layout.build(layout.batch, layout.tokens, layout.chunk_size, starts, lengths), scan


def warm_up(steps: list[slice], log_carry: Tensor, num_segments: int, threshold: float | None) -> tuple[Tensor, Tensor]:
    """Which chunks a local state needs, walking along `steps` until the log decay falls below `threshold` (eq. 7.4).

    log_carry: `[num_chunks,HV]`. Returns kept `[num_chunks,HV]`, and whole `[num_segments,HV]`: the segments (by rank)
    that never fall below the threshold, so that their transition counts. Both are masks of 0.0 and 1.0.
    """
    if threshold is not None and threshold >= 0:
        raise ValueError(f"threshold: must be a negative log decay or None, got {threshold}")
    kept = torch.ones_like(log_carry)
    passed = log_carry.new_zeros(num_segments, log_carry.shape[1])
    if threshold is None:
        return kept, torch.ones_like(passed)
    for rows in steps:
        along = passed[: rows.stop - rows.start]
        kept[rows] = (along >= threshold).to(kept.dtype)
        along += log_carry[rows]
    return kept, (passed >= threshold).to(kept.dtype)


def segment_maps(segments: Layout, chunks: Chunks, threshold: float | None) -> tuple[Tensor, Tensor]:
    """Transition M `[num_segments,HV,K,K]` and offset N `[num_segments,HV,K,V]` in scan order (eqs. 7.1, 7.2 and 7.4).

    The columns of a state never mix, so one chain gives both: N starts from 0, M starts from the identity with V = 0.
    """
    heads, (key_dim, value_dim) = chunks.log_carry.shape[1], (chunks.k.shape[-1], chunks.v.shape[-1])
    kept, whole = warm_up(segments.steps(1)[::-1], chunks.log_carry, segments.num_sequences, threshold)
    both = chunks._replace(
        v=torch.nn.functional.pad(chunks.v, (key_dim, 0)), k_write=chunks.k_write * kept.view(-1, 1, 1)
    )
    state = chunks.v.new_zeros(segments.num_sequences, heads, key_dim, key_dim + value_dim)
    state.diagonal(dim1=-2, dim2=-1).fill_(1)
    maps = state_chain(segments, both, state).final
    transition, offset = maps.split([key_dim, value_dim], dim=-1)
    return segments.to_sequences(transition * whole[..., None, None]), segments.to_sequences(offset)


def segment_starts(scan: list[slice], transition: Tensor, offset: Tensor, state: Tensor) -> Tensor:
    """Eq. 7.3: the state at the start of every segment `[num_segments,HV,K,V]`, in scan order, from the initial
    `state [N,HV,K,V]` by rank."""
    starts = torch.empty_like(offset)
    for rows in scan:
        state = state[: rows.stop - rows.start]
        starts[rows] = state
        state = offset[rows] + transition[rows] @ state
    return starts


def segment_ends(scan: list[slice], transition: Tensor, offset: Tensor, d_state: Tensor) -> Tensor:
    """Eq. 7.5: the gradient of the state at the end of every segment, in scan order, from the gradient of the final
    state, `d_state [N,HV,K,V]` by rank."""
    ends, d_state = torch.empty_like(offset), d_state.clone()
    for rows in reversed(scan):
        active = d_state[: rows.stop - rows.start]
        ends[rows] = active
        active.copy_(offset[rows] + transition[rows].mT @ active)
    return ends


@chunk_form
def split(
    layout: Layout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    state: Tensor,
    output: Tensor,
    *,
    segment_chunks: int = 8,
    threshold: float | None = None,
) -> None:
    """`chunked` by segments of `segment_chunks` chunks: same arguments, same result.

    threshold: None is exact. A negative log decay, e.g. -8.0, cuts the local states short: for each segment and head
    they start from zero as late as the decay to the segment's end allows, and the transition is dropped. The state at a
    boundary is then off by at most `exp(threshold)` times the norm of the state it forgot, given |k| <= 1 and
    0 <= beta <= 2. A segment that decays less than that keeps its exact transition.
    """
    segments, scan = segment(layout, segment_chunks)
    chunks = cut(segments, q, k, v, g, beta, scale)
    starts = segment_starts(scan, *segment_maps(segments, chunks, threshold), state)
    states = segments.to_ranks(starts).contiguous()
    segments.scatter(read_out(segments, chunks, states), output)
    ends = segments.to_sequences(states)
    for rows in scan:
        state[: rows.stop - rows.start] = ends[rows]


@without_autocast
@torch.no_grad()
def split_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor,
    *,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    form: str = "adjoint",
    segment_chunks: int = 8,
    threshold: float | None = None,
) -> Gradients:
    """`backward` by segments: the mirror of `split`, with the same options; the adjoint of a segment's map is
    dS -> M^T dS + N', so the transitions serve both directions (eq. 7.5).
    """
    layout = Layout.of(q, cu_seqlens, chunk_size)
    segments, scan = segment(layout, segment_chunks)
    like = q.new_empty(0, dtype=compute_dtype(q))
    shape = (v.shape[2], q.shape[-1], v.shape[-1])
    chunks = cut(segments, q, k, v, g, beta, scale)
    transition, offset = segment_maps(segments, chunks, threshold)
    initial = layout.read_state(initial_state, shape, state_v_first, like)
    starts = segment_starts(scan, transition, offset, initial)

    d_output = segments.gather(do, like.dtype)
    kept, _ = warm_up(segments.steps(1), chunks.log_carry, segments.num_sequences, threshold)
    local = adjoint_chain(segments, chunks, d_output * kept.view(-1, 1, 1), like.new_zeros(starts.shape)).initial
    d_state = layout.read_state(dht, shape, state_v_first, like)
    ends = segment_ends(scan, transition, segments.to_sequences(local), d_state)

    starts, ends = (segments.to_ranks(states).contiguous() for states in (starts, ends))
    gradients = differentiate(segments, chunks, d_output, starts, ends, form)
    d_starts = segments.to_sequences(ends)
    for rows in scan[:1]:
        d_state[rows] = d_starts[rows]
    d_initial = None if initial_state is None else layout.write_state(d_state, state_v_first)
    return Gradients(*map(segments.scatter, gradients, new_gradients(layout, q, v)), d_initial)
