"""How one call is cut into chunks and thread blocks, decided from host numbers alone.

A :class:`Plan` is built from shapes, and from sequence lengths when the host knows them. It never reads a device
tensor, so building one costs no synchronisation, and a plan may be reused for every call of the same shapes, also
inside a captured CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .costs import Cut, Estimate, Fixed, Work, candidates, cheapest, cheapest_backward, estimate, mean_cost

CHUNK_SIZE = 64
"""Tokens per chunk (C)."""

DEFAULT_SM_COUNT = 132
"""Streaming multiprocessors of an H100 SXM or H200; the default where no GPU is present."""

CP_THRESHOLD = -10.0
"""Log decay over which a segment forgets what came before it (eq. 7.4), unless a call says otherwise."""

ALTERNATIVES = 4
"""Other cuts that `Plan.explain` names, besides that of whole sequences."""


def sequence_lengths(offsets: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Lengths of packed sequences from their cumulative offsets.

    Args:
        offsets: the ``N + 1`` values of ``cu_seqlens``, on the host.
        num_tokens: T, the length of the packed token axis; tokens past ``offsets[-1]`` are padding.

    Raises:
        ValueError: naming every way in which the values are wrong: a first value other than 0, a decrease, an end past
            T.
    """
    wrong = []
    if offsets[0] != 0:
        wrong.append(f"must start with 0, got {offsets[0]}")
    lengths = tuple(end - start for start, end in itertools.pairwise(offsets))
    decrease = next((index for index, length in enumerate(lengths) if length < 0), None)
    if decrease is not None:
        pair = f"{offsets[decrease]} is followed by {offsets[decrease + 1]}"
        wrong.append(f"must never decrease, got a negative length for sequence {decrease} ({pair})")
    if offsets[-1] > num_tokens:
        wrong.append(f"must end at or before T = {num_tokens}, got {offsets[-1]}")
    if wrong:
        raise ValueError("cu_seqlens: " + "; ".join(wrong))
    return lengths


@dataclass(frozen=True)
class Plan:
    """The cut of one call into sequences, chunks and thread blocks. Build it with :meth:`build`.

    Attributes:
        num_sequences: N, packed sequences or the batch size.
        num_tokens: tokens of the call, padding included (B * T).
        max_seqlen: no sequence is longer than this.
        num_heads, num_value_heads: H and HV.
        head_dim_k, head_dim_v: K and V.
        sm_count: streaming multiprocessors the plan was made for.
        block_dv: state columns owned by one thread block; ``head_dim_v // block_dv`` blocks share one chain.
        segment_chunks: chunks of a segment; 0: sequences are not cut.
        backward_cut: the same two numbers for the chains of the backward.
        num_chunks: chunks of one value head over all sequences; exact when ``lengths`` are known, else an upper bound.
        chunk_size: C.
        lengths: sequence lengths if the host knows them.
        packed: whether the call uses ``cu_seqlens``.
    """

    num_sequences: int
    num_tokens: int
    max_seqlen: int
    num_heads: int
    num_value_heads: int
    head_dim_k: int
    head_dim_v: int
    sm_count: int
    block_dv: int
    segment_chunks: int
    backward_cut: Cut
    num_chunks: int
    chunk_size: int = CHUNK_SIZE
    lengths: tuple[int, ...] | None = None
    packed: bool = False

    @classmethod
    def build(
        cls,
        q_shape: Sequence[int],
        v_shape: Sequence[int],
        cu_seqlens_shape: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        sm_count: int = DEFAULT_SM_COUNT,
        block_dv: int | None = None,
        context_parallel: bool | str = "auto",
        segment_chunks: int | None = None,
    ) -> Plan:
        """Make the plan of a call.

        Args:
            q_shape: ``(B, T, H, K)``.
            v_shape: ``(B, T, HV, V)``.
            cu_seqlens_shape: ``(N + 1,)`` for packed sequences.
            lengths: the N lengths of packed sequences, when the host knows them; makes the plan exact.
            sm_count: streaming multiprocessors of the device.
            block_dv: fixes the split of d_v instead of choosing the cheapest.
            context_parallel: "auto" cuts sequences into segments where that is expected to pay; True wherever a
                sequence has two chunks, False nowhere.
            segment_chunks: fixes the length of a segment instead of choosing the cheapest; 0: no segments.

        Raises:
            ValueError: when a shape is not one of a call, ``lengths`` do not fit the shapes, ``block_dv`` does not
                divide V, ``segment_chunks`` is negative or contradicts ``context_parallel``, or there is no
                multiprocessor.
        """
        q_shape, v_shape = _check_shape("q_shape", q_shape), _check_shape("v_shape", v_shape)
        batch, tokens, num_heads, head_dim_k = q_shape
        num_value_heads, head_dim_v = v_shape[2:]
        if sm_count < 1:
            raise ValueError(f"sm_count: must be at least 1, got {sm_count}")
        packed = cu_seqlens_shape is not None or lengths is not None
        if lengths is not None:
            lengths = tuple(int(length) for length in lengths)
            _check_lengths(lengths, tokens, cu_seqlens_shape)
            num_sequences, max_seqlen = len(lengths), max(lengths, default=0)
            num_chunks = sum(_chunks(length) for length in lengths)
        elif cu_seqlens_shape is not None:
            num_sequences, max_seqlen = int(cu_seqlens_shape[0]) - 1, tokens
            num_chunks = tokens // CHUNK_SIZE + num_sequences
        else:
            num_sequences, max_seqlen = batch, tokens
            num_chunks = batch * _chunks(tokens)
        if block_dv is not None and (block_dv < 1 or head_dim_v % block_dv):
            raise ValueError(f"block_dv: must divide V = {head_dim_v}, got {block_dv}")
        if context_parallel not in ("auto", True, False):
            raise ValueError(f'context_parallel: must be "auto", True or False, got {context_parallel!r}')
        if segment_chunks is not None and (segment_chunks < 0 or (context_parallel is False and segment_chunks)):
            most = "be 0 without context_parallel" if context_parallel is False else "not be negative"
            raise ValueError(f"segment_chunks: must {most}, got {segment_chunks}")
        plan = cls(
            num_sequences=num_sequences,
            num_tokens=batch * tokens,
            max_seqlen=max_seqlen,
            num_heads=num_heads,
            num_value_heads=num_value_heads,
            head_dim_k=head_dim_k,
            head_dim_v=head_dim_v,
            sm_count=sm_count,
            block_dv=block_dv or head_dim_v,
            segment_chunks=segment_chunks or 0,
            backward_cut=Cut(block_dv or head_dim_v, segment_chunks or 0),
            num_chunks=num_chunks,
            lengths=lengths,
            packed=packed,
        )
        if plan.chains and (block_dv is None or segment_chunks is None):
            fixed = Fixed(block_dv, 0 if context_parallel is False else segment_chunks)
            works, must_cut = plan._works(), context_parallel is True
            cut = cheapest(works, sm_count, fixed, must_cut) or plan.backward_cut
            back = cheapest_backward(works, sm_count, fixed, must_cut) or plan.backward_cut
            plan = replace(plan, block_dv=cut.block_dv, segment_chunks=cut.segment_chunks, backward_cut=back)
        return plan

    @property
    def chains(self) -> int:
        """Independent recurrences: one per sequence and value head."""
        return self.num_sequences * self.num_value_heads

    @property
    def blocks(self) -> int:
        """Thread blocks of the output: every segment of a chain is shared by ``V / block_dv`` of them. Without known
        lengths a bound."""
        return self.num_segments * self.num_value_heads * self.head_dim_v // self.block_dv

    @property
    def num_segments(self) -> int:
        """Segments over all sequences, a whole sequence being one. Without known lengths a bound."""
        if not self.segment_chunks:
            return self.num_sequences
        if self.packed and self.lengths is None:
            return self.num_sequences + self.num_tokens // (self.segment_chunks * self.chunk_size)
        lengths = (self.max_seqlen,) * self.num_sequences if self.lengths is None else self.lengths
        return sum(max(1, _ceil_divide(_chunks(length), self.segment_chunks)) for length in lengths)

    def _works(self) -> list[Work]:
        """What the call may be: one, or where only the device knows the lengths, equal ones and a single long one."""
        n = self.num_sequences
        if self.lengths is not None:
            cases = [[(_chunks(length), 1) for length in self.lengths]]
        elif not self.packed or n < 2:
            cases = [[(_chunks(self.max_seqlen), n)]]
        else:
            total = _chunks(self.num_tokens)
            cases = [[(_ceil_divide(total, n), n)], [(max(total - n + 1, 1), 1), (1, n - 1)]]
        heads = (self.num_heads, self.num_value_heads, self.head_dim_k, self.head_dim_v)
        return [Work(_runs(case), *heads) for case in cases]

    def estimates(self, cut: Cut | None = None) -> list[Estimate]:
        """Expected times of the kernels with this cut (default: the plan's), for each thing that the call may be."""
        cut = cut or Cut(self.block_dv, self.segment_chunks)
        return [estimate(work, cut, self.sm_count) for work in self._works()]

    def cost(self, cut: Cut | None = None) -> float:
        """Expected microseconds of a call with this cut (default: the plan's)."""
        return mean_cost(self._works(), cut or Cut(self.block_dv, self.segment_chunks), self.sm_count)

    def costs(self) -> dict[Cut, float]:
        """Expected microseconds of every cut that `build` compares."""
        works = self._works()
        return {cut: mean_cost(works, cut, self.sm_count) for cut in candidates(works)} if self.chains else {}

    def mismatches(
        self, q_shape: Sequence[int], v_shape: Sequence[int], cu_seqlens_shape: Sequence[int] | None = None
    ) -> list[str]:
        """What keeps this plan from serving a call of these shapes; empty when it fits."""
        other = Plan.build(q_shape, v_shape, cu_seqlens_shape, block_dv=int(v_shape[3]) or 1, segment_chunks=0)
        names = ["packed", "num_sequences", "num_tokens", "num_heads", "num_value_heads", "head_dim_k", "head_dim_v"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [
            f"was made for {name} = {planned}, this call has {actual}"
            for name, planned, actual in pairs
            if planned != actual
        ]

    def explain(self) -> str:
        """The plan in plain words, with what the alternatives would cost."""
        kind = f"{'packed' if self.packed else 'dense'} sequence{'s' if self.num_sequences != 1 else ''}"
        known = (
            "known to the host"
            if self.lengths is not None or not self.packed
            else "known only to the device (upper bounds)"
        )
        lines = [
            f"{self.num_sequences} {kind} over {self.num_tokens} tokens, none longer than {self.max_seqlen}",
            f"sequence lengths {known}",
            f"{self.num_heads} query/key heads with K = {self.head_dim_k}, "
            f"{self.num_value_heads} value heads with V = {self.head_dim_v}",
            f"{self.num_chunks} chunks of {self.chunk_size} tokens a value head, {self.chains} independent chains",
            f"{self.num_segments} segments"
            + (f" of at most {self.segment_chunks} chunks" if self.segment_chunks else ", each a whole sequence")
            + f", {self.blocks} thread blocks of {self.block_dv} state columns on {self.sm_count} SMs",
        ]
        costs = self.costs()
        if not costs:
            return "\n".join(lines)
        mine = Cut(self.block_dv, self.segment_chunks)
        lines.append(f"expected: {' or '.join(map(str, self.estimates()))}; with other cuts:")
        best: dict[int, tuple[float, Cut]] = {}  # of each length of a segment, its best split of d_v
        for cut, cost in costs.items():
            if cut != mine and cost < best.get(cut.segment_chunks, (cost + 1,))[0]:
                best[cut.segment_chunks] = (cost, cut)
        for cost, cut in sorted(best.values())[:ALTERNATIVES]:
            lines.append(f"  {cost:.0f} us  {_describe(cut)}")
        if 0 in best and best[0] not in sorted(best.values())[:ALTERNATIVES]:
            lines.append(f"  {best[0][0]:.0f} us  {_describe(best[0][1])}")
        lines.append(f"backward: {_describe(self.backward_cut)}")
        return "\n".join(lines)

    def plot(self, axes: Any = None) -> Any:
        """The expected schedule: a row for each SM, a bar for each thread block of the output, the kernels before it as
        bands over all SMs. Draws on matplotlib axes, new ones by default, and returns them."""
        from .gantt import draw

        return draw(self._works()[0], Cut(self.block_dv, self.segment_chunks), self.sm_count, axes)


def _describe(cut: Cut) -> str:
    cut_or_not = f"segments of {cut.segment_chunks} chunks" if cut.segment_chunks else "whole sequences"
    return f"{cut_or_not}, {cut.block_dv} columns a block"


def _runs(sequences: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbours of the same number of chunks joined; those without a chunk left out."""
    groups = itertools.groupby((pair for pair in sequences if pair[0] and pair[1]), key=lambda pair: pair[0])
    return tuple((chunks, sum(count for _, count in group)) for chunks, group in groups)


def _chunks(length: int) -> int:
    return _ceil_divide(length, CHUNK_SIZE)


def _ceil_divide(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _check_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in shape)
    if len(sizes) != 4 or min(sizes) < 0:
        raise ValueError(f"{name}: must be 4 sizes, none of them negative, got {list(sizes)}")
    return sizes


def _check_lengths(lengths: tuple[int, ...], tokens: int, cu_seqlens_shape: Sequence[int] | None) -> None:
    wrong = []
    if any(length < 0 for length in lengths):
        wrong.append(f"must not be negative, got {min(lengths)}")
    if sum(lengths) > tokens:
        wrong.append(f"must add up to at most T = {tokens}, got {sum(lengths)}")
    if cu_seqlens_shape is not None and len(lengths) != cu_seqlens_shape[0] - 1:
        wrong.append(f"must be {cu_seqlens_shape[0] - 1} in number (cu_seqlens has one more), got {len(lengths)}")
    if wrong:
        raise ValueError("lengths: " + "; ".join(wrong))
