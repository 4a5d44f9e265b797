"""How one call is cut into chunks and thread blocks, decided from host numbers alone.

A :class:`Plan` is built from shapes, and from sequence lengths when the host knows them. It never reads a device
tensor, so building one costs no synchronisation, and a plan may be reused for every call of the same shapes, also
inside a captured CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

CHUNK_SIZE = 64
"""Tokens per chunk (C)."""

DEFAULT_SM_COUNT = 132
"""Streaming multiprocessors of an H100 SXM or H200; the default where no GPU is present."""

COST_PER_CHUNK = {128: 2.0, 64: 1.35}
"""Microseconds a thread block needs per chunk on an H200, by the number of state columns (``block_dv``) it owns."""


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
    ) -> Plan:
        """Make the plan of a call.

        Args:
            q_shape: ``(B, T, H, K)``.
            v_shape: ``(B, T, HV, V)``.
            cu_seqlens_shape: ``(N + 1,)`` for packed sequences.
            lengths: the N lengths of packed sequences, when the host knows them; makes the plan exact.
            sm_count: streaming multiprocessors of the device.
            block_dv: fixes the split of d_v instead of choosing the cheapest.

        Raises:
            ValueError: when a shape is not one of a call, ``lengths`` do not fit the shapes, ``block_dv`` does not
                divide V, or there is no multiprocessor.
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
        if block_dv is None:
            costs = split_costs(num_sequences * num_value_heads, head_dim_v, sm_count)
            block_dv = min(costs, key=costs.__getitem__, default=head_dim_v)
        elif block_dv < 1 or head_dim_v % block_dv:
            raise ValueError(f"block_dv: must divide V = {head_dim_v}, got {block_dv}")
        return cls(
            num_sequences=num_sequences,
            num_tokens=batch * tokens,
            max_seqlen=max_seqlen,
            num_heads=num_heads,
            num_value_heads=num_value_heads,
            head_dim_k=head_dim_k,
            head_dim_v=head_dim_v,
            sm_count=sm_count,
            block_dv=block_dv,
            num_chunks=num_chunks,
            lengths=lengths,
            packed=packed,
        )

    @property
    def chains(self) -> int:
        """Independent recurrences: one per sequence and value head."""
        return self.num_sequences * self.num_value_heads

    @property
    def blocks(self) -> int:
        """Thread blocks: every chain is shared by ``V / block_dv`` of them."""
        return self.chains * self.head_dim_v // self.block_dv

    def mismatches(
        self, q_shape: Sequence[int], v_shape: Sequence[int], cu_seqlens_shape: Sequence[int] | None = None
    ) -> list[str]:
        """What keeps this plan from serving a call of these shapes; empty when it fits."""
        other = Plan.build(q_shape, v_shape, cu_seqlens_shape, sm_count=self.sm_count)
        names = ["packed", "num_sequences", "num_tokens", "num_heads", "num_value_heads", "head_dim_k", "head_dim_v"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [
            f"was made for {name} = {planned}, this call has {actual}"
            for name, planned, actual in pairs
            if planned != actual
        ]

    def explain(self) -> str:
        """The plan in plain words, with what the alternatives would cost."""
        kind = "packed" if self.packed else "dense"
        known = (
            "known to the host"
            if self.lengths is not None or not self.packed
            else "known only to the device (upper bounds)"
        )
        lines = [
            f"{self.num_sequences} {kind} sequences over {self.num_tokens} tokens, none longer than {self.max_seqlen}",
            f"sequence lengths {known}",
            f"{self.num_heads} query/key heads with K = {self.head_dim_k}, "
            f"{self.num_value_heads} value heads with V = {self.head_dim_v}",
            f"{self.num_chunks} chunks of {self.chunk_size} tokens a value head, {self.chains} independent chains",
            f"{self.blocks} thread blocks of {self.block_dv} state columns on {self.sm_count} SMs",
        ]
        costs = split_costs(self.chains, self.head_dim_v, self.sm_count)
        if not costs:
            lines.append(f"V = {self.head_dim_v} is not a multiple of 64: no split of d_v to choose from")
        for columns, cost in costs.items():
            verdict = "chosen" if columns == self.block_dv else "alternative"
            waves = _ceil_divide(self.chains * self.head_dim_v // columns, self.sm_count)
            lines.append(
                f"  {columns} columns a block: {waves} waves x {COST_PER_CHUNK[columns]} = {cost:.2f} ({verdict})"
            )
        return "\n".join(lines)


def split_costs(chains: int, head_dim_v: int, sm_count: int) -> dict[int, float]:
    """Relative cost of one chunk step for every possible ``block_dv``: waves over the SMs times the time a block
    needs."""
    return {
        columns: _ceil_divide(chains * head_dim_v // columns, sm_count) * cost
        for columns, cost in COST_PER_CHUNK.items()
        if head_dim_v % columns == 0
    }


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
