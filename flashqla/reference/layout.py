"""Host side of the chunked references: which tokens form which chunk, and in which order chunks are computed.

All chunked references work on one flat list of chunks, *step-major*: first chunk 0 of every sequence, then chunk 1 of
every sequence that has one, and so on. Sequences are ranked by length, longest first, so the sequences that are still
alive at step c are the first `counts[c]` ones and every step is one contiguous slice. That makes the state chain a loop
over steps whose body handles all sequences and heads at once, and everything else a single batched product.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def compute_dtype(q: Tensor) -> torch.dtype:
    """float64 stays float64, everything else is computed in float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def without_autocast(function):
    """Run `function` with autocast off on the device of its first argument: a specification chooses its own dtypes."""

    @functools.wraps(function)
    def wrapper(q: Tensor, *args, **kwargs):
        with torch.autocast(q.device.type, enabled=False):
            return function(q, *args, **kwargs)

    return wrapper


@dataclass(frozen=True)
class Layout:
    """Cut of `N` sequences, stored in a `[batch, tokens]` array, into chunks of `chunk_size` tokens.

    starts, lengths: first token (in the flattened `batch * tokens`) and number of tokens of each sequence.
    order: sequence of each rank (longest first), or None where rank and sequence agree.
    counts: counts[c] is the number of sequences with more than c chunks, so `sum(counts) == num_chunks`.
    """

    batch: int
    tokens: int
    chunk_size: int
    starts: list[int]
    lengths: list[int]
    order: list[int] | None
    counts: list[int]

    @classmethod
    def of(cls, q: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> Layout:
        """Layout of a call with queries `q [B,T,H,K]`; `cu_seqlens [N+1]` packs N sequences into B == 1."""
        batch, tokens = q.shape[:2]
        dense = [sequence * tokens for sequence in range(batch + 1)]
        bounds = dense if cu_seqlens is None else cu_seqlens.tolist()
        lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
        return cls.build(batch, tokens, chunk_size, bounds[:-1], lengths)

    @classmethod
    def build(cls, batch: int, tokens: int, chunk_size: int, starts: list[int], lengths: list[int]) -> Layout:
        """Rank the sequences and count the chunks of every step."""
        chunks = [-(-length // chunk_size) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda sequence: -chunks[sequence])
        steps = max(chunks, default=0)
        ending = [0] * (steps + 1)
        for number in chunks:
            ending[number] += 1
        counts = [len(lengths) - ended for ended in itertools.accumulate(ending[:steps])]
        ranked = order == list(range(len(lengths)))
        return cls(batch, tokens, chunk_size, starts, lengths, None if ranked else order, counts)

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_chunks(self) -> int:
        return sum(self.counts)

    def steps(self, heads: int) -> list[slice]:
        """Rows of each step in a tensor whose first axis is (chunk, head)."""
        bounds = itertools.accumulate(self.counts, initial=0)
        return [slice(start * heads, stop * heads) for start, stop in itertools.pairwise(bounds)]

    def blocks(self, chunks: int) -> Iterator[Layout]:
        """The same chunks cut along the steps, as layouts of at most `chunks` chunks each (at least one step).

        The sequences of a block are the first ranks of the whole, in this order: their states are its first rows.
        """
        first, order = 0, self.order or range(self.num_sequences)
        while first < len(self.counts):
            alive, offset = order[: self.counts[first]], first * self.chunk_size
            span = max(1, chunks // len(alive))
            lengths = [min(span * self.chunk_size, self.lengths[sequence] - offset) for sequence in alive]
            starts = [self.starts[sequence] + offset for sequence in alive]
            yield Layout.build(self.batch, self.tokens, self.chunk_size, starts, lengths)
            first += span

    @functools.cached_property
    def _stride(self) -> int | None:
        """Distance between the starts of equal sequences of whole chunks, None if they are not so: gathering is then
        one transposing copy, without an index."""
        length = self.lengths[0] if self.num_chunks else 0
        stride = self.starts[1] - self.starts[0] if len(self.starts) > 1 else length
        regular = length > 0 and length % self.chunk_size == 0 and stride >= length
        regular = regular and all(own == length for own in self.lengths)
        regular = regular and all(start == self.starts[0] + i * stride for i, start in enumerate(self.starts))
        return stride if regular else None

    def _view(self, flat: Tensor) -> Tensor:
        """Tokens `[batch * tokens,H,...]` of regular sequences seen as `[steps,N,H,C,...]`."""
        token, head, *trailing = flat.stride()
        size = (len(self.counts), self.num_sequences, flat.shape[1], self.chunk_size, *flat.shape[2:])
        stride = (self.chunk_size * token, self._stride * token, head, token, *trailing)
        return flat.as_strided(size, stride, flat.storage_offset() + self.starts[0] * token)

    @functools.cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        """Token of every row of every chunk `[num_chunks * C]`, and whether the row is one of the sequence; those that
        are not repeat the first token of their chunk."""
        with torch.device("cpu"):  # whatever the default device is: these come from the host
            order = range(self.num_sequences) if self.order is None else self.order
            starts, lengths, counts, order = (
                torch.tensor(numbers, dtype=torch.int64) for numbers in (self.starts, self.lengths, self.counts, order)
            )
            step = torch.repeat_interleave(torch.arange(len(self.counts)), counts)
            sequence = order[torch.arange(self.num_chunks) - (counts.cumsum(0) - counts)[step]]
            first = (starts[sequence] + step * self.chunk_size)[:, None]
            token = first + torch.arange(self.chunk_size)
            valid = token < (starts + lengths)[sequence][:, None]
            return torch.where(valid, token, first).flatten(), valid.flatten()

    def collapsible(self, x: Tensor) -> Tensor:
        """`x [B,T,...]` itself where its first two axes can be viewed as one, else a copy: not one for every block."""
        return x.reshape(self.batch * self.tokens, *x.shape[2:]).view(x.shape)

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Tokens `[B,T,H,D]` (or `[B,T,H]`) as a new tensor over chunk-heads, `[num_chunks * H,C,D]` (or
        `[num_chunks * H,C]`); rows past the end of a sequence are 0."""
        heads, trailing = x.shape[2], x.shape[3:]
        flat = x.reshape(self.batch * self.tokens, heads, *trailing)
        if self._stride is not None:
            rows = self._view(flat)
        else:
            token, valid = (index.to(x.device) for index in self._index)
            rows = flat.index_select(0, token)
            rows = rows.masked_fill(~valid.view(-1, *[1] * (rows.ndim - 1)), 0)
            rows = rows.view(self.num_chunks, self.chunk_size, heads, *trailing).transpose(1, 2)
        chunks = torch.empty(rows.shape, dtype=dtype, device=x.device).copy_(rows)
        return chunks.view(self.num_chunks * heads, self.chunk_size, *trailing)

    def new_tokens(self, *dims: int, like: Tensor) -> Tensor:
        """Room `[B,T,*dims]` for `scatter`, of the dtype and device of `like`; 0 for tokens of no sequence."""
        covered = sum(self.lengths) == self.batch * self.tokens
        return (like.new_empty if covered else like.new_zeros)((self.batch, self.tokens, *dims))

    def scatter(self, chunks: Tensor, tokens: Tensor) -> Tensor:
        """Inverse of `gather`: write into `tokens [B,T,H,...]`, contiguous and of any dtype, and return it."""
        heads, trailing = tokens.shape[2], tokens.shape[3:]
        flat = tokens.view(self.batch * self.tokens, heads, *trailing)
        if self._stride is not None:
            rows = chunks.view(len(self.counts), self.num_sequences, heads, self.chunk_size, *trailing)
            self._view(flat).copy_(rows)
        else:
            token, valid = (index.to(chunks.device) for index in self._index)
            rows = chunks.view(self.num_chunks, heads, self.chunk_size, *trailing).transpose(1, 2)
            rows = rows.reshape(self.num_chunks * self.chunk_size, heads, *trailing)[valid].to(tokens.dtype)
            flat.index_copy_(0, token[valid], rows)
        return tokens

    def to_ranks(self, states: Tensor) -> Tensor:
        """Reorder the first axis from sequences to ranks."""
        return states if self.order is None else states[torch.tensor(self.order, device=states.device)]

    def to_sequences(self, states: Tensor) -> Tensor:
        """Reorder the first axis from ranks to sequences."""
        return states if self.order is None else states[torch.tensor(self.order, device=states.device).argsort()]

    def read_state(self, state: Tensor | None, shape: tuple[int, int, int], v_first: bool, like: Tensor) -> Tensor:
        """State at the boundary of a call, `[N,HV,K,V]` (`[N,HV,V,K]` if `v_first`) or None for zeros, as a new
        `[N,HV,K,V]` in rank order; `shape` is (HV, K, V), dtype and device are those of `like`."""
        if state is None:
            return like.new_zeros(self.num_sequences, *shape)
        ranked = self.to_ranks(state.transpose(-1, -2) if v_first else state)
        return torch.empty(ranked.shape, dtype=like.dtype, device=like.device).copy_(ranked)

    def write_state(self, state: Tensor, v_first: bool) -> Tensor:
        """Inverse of `read_state`, contiguous."""
        state = self.to_sequences(state)
        return (state.transpose(-1, -2) if v_first else state).contiguous()
