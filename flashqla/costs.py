"""What a call costs when it is cut in one way or another: a model of the kernels' times, in microseconds.

Its coefficients are measurements, `costs.json`; ``python -m flashqla calibrate`` makes them anew. Nothing here reads a
device: sequence lengths, heads and the number of multiprocessors are all it knows. The gates it cannot know, so it
takes a quarter of the heads to be those that do not decay within a segment (`STEADY`), the others to need `WARM_UP`
chunks.
"""

from __future__ import annotations

import functools
import heapq
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

STEADY = 0.25
WARM_UP = 4
BLOCK_COLUMNS = 64  # of a CTA of the segment kernels
MOST_SIMULATED = 2048  # CTAs; beyond, their number makes up for not knowing where each one runs
WORTH_IT = 0.97  # segments must be expected to save this much before sequences are cut; the model is not exact
SEGMENT_COUNTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 16, 18, 20, 24, 28, 32, 40, 48, 64)
"""How many segments of the longest sequence are tried."""

Run = tuple[int, int]
"""So many chunks each, so many sequences or thread blocks."""


class Cut(NamedTuple):
    """State columns of a thread block, and chunks of a segment (0: sequences stay whole)."""

    block_dv: int
    segment_chunks: int


class Fixed(NamedTuple):
    """What of a :class:`Cut` may not be chosen; None for what may."""

    block_dv: int | None
    segment_chunks: int | None


class Work(NamedTuple):
    """One call: its sequences, in order, and its heads."""

    sequences: tuple[Run, ...]
    num_heads: int
    num_value_heads: int
    head_dim_k: int
    head_dim_v: int

    @property
    def longest(self) -> int:
        """Chunks of the longest sequence."""
        return max((chunks for chunks, _ in self.sequences), default=0)


class Estimate(NamedTuple):
    """Microseconds of the four kernels and of launching them."""

    inverse: float
    states: float
    scan: float
    output: float
    launches: float

    @property
    def total(self) -> float:
        """The call, from the start of the first kernel to the end of the last."""
        return sum(self)

    def __str__(self) -> str:
        parts = [f"{name} {time:.0f}" for name, time in self._asdict().items() if time]
        return f"{self.total:.0f} us ({', '.join(parts)})"


@functools.cache
def coefficients() -> dict:
    """The measured coefficients of the model, all in microseconds:

    launch: between two kernels. inverse: of a call, and of a chunk and value head that has a key head to itself, with
    `sm_count` multiprocessors. states: of the two kernels that make local states; of a chunk, with nearly all
    multiprocessors idle or none. scan: of the kernel, of a segment. output, by state columns: of a block; of a chunk;
    what is added to that when all multiprocessors are busy. chains, by state columns: the same of the backward's two
    chains, with a chunk of each.
    """
    return json.loads(Path(__file__).with_suffix(".json").read_text())


def candidates(works: Sequence[Work]) -> list[Cut]:
    """The cuts worth comparing: each split of d_v, whole sequences first, then ever shorter segments of the longest."""
    longest = max(work.longest for work in works)
    blocks = [columns for columns in (128, 64) if works[0].head_dim_v % columns == 0]
    lengths = [_ceil(longest, count) for count in SEGMENT_COUNTS if count <= longest]
    return [Cut(columns, chunks) for chunks in dict.fromkeys([0, *lengths]) for columns in blocks]


def _allowed(works: Sequence[Work], fixed: Fixed, must_cut: bool) -> list[Cut]:
    """The candidates that agree with what is fixed; without whole sequences if something must be cut."""
    cuts = candidates(works)
    if fixed.segment_chunks is not None:
        cuts = [Cut(columns, fixed.segment_chunks) for columns in dict.fromkeys(cut.block_dv for cut in cuts)]
    return [cut for cut in cuts if fixed.block_dv in (None, cut.block_dv) and (cut.segment_chunks or not must_cut)]


def cheapest(works: Sequence[Work], sm_count: int, fixed: Fixed, must_cut: bool) -> Cut | None:
    """The cut of the least mean cost over what a call may be; whole sequences unless another is `WORTH_IT`.

    Args:
        fixed: what may not be chosen.
        must_cut: no whole sequences.

    Returns:
        None where there is nothing to choose from.
    """
    cuts = _allowed(works, fixed, must_cut)
    whole = [(mean_cost(works, cut, sm_count), cut) for cut in cuts if not cut.segment_chunks]
    best = None
    limit = WORTH_IT * min(whole)[0] if whole else float("inf")
    for bound, cut in sorted((mean_cost(works, cut, sm_count, least), cut) for cut in cuts if cut.segment_chunks):
        if bound >= limit:
            break
        cost = mean_cost(works, cut, sm_count)
        if cost < limit:
            best, limit = cut, cost
    return best or (min(whole)[1] if whole else None)


def cheapest_backward(works: Sequence[Work], sm_count: int, fixed: Fixed, must_cut: bool) -> Cut | None:
    """The cut of the backward's chains, as `cheapest` chooses that of the forward.

    Thread blocks of heads that do not decay walk whole sequences, as they do uncut. So that such heads lose next to
    nothing, every block must have a multiprocessor, and even then the more of these are busy the slower each is.
    """
    cuts = _allowed(works, fixed, must_cut)
    whole = min(((_chains(works, cut, sm_count), cut) for cut in cuts if not cut.segment_chunks), default=None)
    parts = [cut for cut in cuts if cut.segment_chunks]
    if whole:
        parts = [cut for cut in parts if _steady_chains(works, cut, sm_count) * WORTH_IT <= whole[0]]
    best = min(((_chains(works, cut, sm_count), cut) for cut in parts), default=None)
    if best and whole and best[0] > WORTH_IT * whole[0]:
        best = None
    return (best or whole or (0, None))[1]


def _chains(works: Sequence[Work], cut: Cut, sm_count: int) -> float:
    return sum(chains_time(work, cut, sm_count) for work in works)


def _steady_chains(works: Sequence[Work], cut: Cut, sm_count: int) -> float:
    """The same where every block walks the longest sequence; infinite where blocks have to wait for others."""
    known = coefficients()["chains"][str(cut.block_dv)]
    blocks = [2 * sum(count for _, count in output_blocks(work, cut)) for work in works]
    if max(blocks) > sm_count:
        return math.inf
    return sum(
        known["start"] + (known["gradient"] + known["busy"] * count / sm_count) * work.longest
        for work, count in zip(works, blocks, strict=True)
    )


def chains_time(work: Work, cut: Cut, sm_count: int) -> float:
    """Microseconds of the backward's two chains, whose thread blocks share the multiprocessors."""
    known, blocks = coefficients()["chains"][str(cut.block_dv)], list(output_blocks(work, cut))
    busy = min(2 * sum(count for _, count in blocks) / sm_count, 1)
    warm_up = WARM_UP if cut.segment_chunks else 0
    times = [
        (known["start"] + (known[chain] + known["busy"] * busy) * (chunks + warm_up), count)
        for chain in ("gradient", "state")
        for chunks, count in blocks
    ]
    return makespan(times, sm_count)


def mean_cost(works: Sequence[Work], cut: Cut, sm_count: int, span: Callable | None = None) -> float:
    """Microseconds of a call that may be any of `works`; `span` as for `estimate`."""
    return sum(estimate(work, cut, sm_count, span).total for work in works) / len(works)


def estimate(work: Work, cut: Cut, sm_count: int, span: Callable | None = None) -> Estimate:
    """The time of one call. A thread block of the output kernel has a multiprocessor to itself. `span` says when the
    blocks of a kernel end: `makespan`, or `least`, which is quick."""
    span = span or makespan
    known = coefficients()
    chunk_heads = work.num_value_heads * sum(chunks * count for chunks, count in work.sequences)
    # it writes A of a value head and reads K of a key head, twice as large
    weight = (1 + 2 * work.num_heads / work.num_value_heads) / 3
    inverse = known["inverse"]["start"] + known["inverse"]["chunk_head"] * chunk_heads * weight * (
        known["sm_count"] / sm_count
    )
    output = span(block_times(work, cut, sm_count), sm_count)
    if not cut.segment_chunks:
        return Estimate(inverse, 0, 0, output, known["launch"])
    return Estimate(inverse, _states(work, cut, sm_count), _scan(work, cut, sm_count), output, 4 * known["launch"])


def block_times(work: Work, cut: Cut, sm_count: int) -> list[tuple[float, int]]:
    """Microseconds of the thread blocks of the output kernel, and how many of each, in launch order."""
    known, blocks = coefficients()["output"][str(cut.block_dv)], list(output_blocks(work, cut))
    busy = min(sum(count for _, count in blocks) / sm_count, 1)
    chunk = known["chunk"] + known["busy"] * busy
    return [(known["start"] + chunk * chunks, count) for chunks, count in blocks]


def output_blocks(work: Work, cut: Cut) -> Iterator[Run]:
    """Chunks of the thread blocks of the output kernel, in launch order: first segments, then the further ones."""
    share = work.num_value_heads * work.head_dim_v // cut.block_dv
    segment = cut.segment_chunks or work.longest
    for chunks, count in work.sequences:
        yield min(chunks, segment), count * share
    for chunks, count in work.sequences:
        whole, rest = divmod(max(chunks - segment, 0), segment or 1)
        if whole:
            yield segment, whole * count * share
        if rest:
            yield rest, count * share


def steady_heads(work: Work) -> int:
    """Value heads taken to need their transitions."""
    return _ceil(work.num_value_heads, round(1 / STEADY))


def _states(work: Work, cut: Cut, sm_count: int) -> float:
    known, n = coefficients()["states"], cut.segment_chunks
    offsets = transitions = 0  # segments that need N, and M
    for chunks, count in work.sequences:
        segments = _ceil(chunks, n)
        offsets += count * max(segments - 1, 0)
        transitions += count * max(segments - 2, 0)
    columns_v, columns_k = work.head_dim_v // BLOCK_COLUMNS, work.head_dim_k // BLOCK_COLUMNS
    steady = steady_heads(work)
    long = steady * (offsets * columns_v + transitions * columns_k)
    short = (work.num_value_heads - steady) * offsets * columns_v
    if not offsets:
        return known["start"]
    share = long / sm_count  # they are bound by latency when few, by the L2 cache from one a multiprocessor on
    chunk = known["chunk"] + min(share, 1) * (known["shared"] - known["chunk"])
    return known["start"] + chunk * (n * max(share, 1) + min(WARM_UP, n) * short / (2 * sm_count))


def _scan(work: Work, cut: Cut, sm_count: int) -> float:
    known = coefficients()["scan"]
    share = steady_heads(work) * work.head_dim_v // BLOCK_COLUMNS
    times = [
        (known["segment"] * (_ceil(chunks, cut.segment_chunks) - 2), count * share)
        for chunks, count in work.sequences
        if chunks > 2 * cut.segment_chunks
    ]
    return known["start"] + makespan(times, sm_count)


def makespan(times: Sequence[tuple[float, int]], slots: int) -> float:
    """When the last of many tasks ends: (time of each, number) in the order in which free slots take them."""
    if len({time for time, _ in times}) < 2:
        return max((time for time, _ in times), default=0.0) * _ceil(sum(count for _, count in times), slots)
    if sum(count for _, count in times) > MOST_SIMULATED:
        longest = max(time for time, _ in times)
        return sum(time * count for time, count in times) / slots + longest * (1 - 1 / slots) / 2
    free = [0.0] * slots
    for time, count in times:
        for _ in range(count):
            heapq.heapreplace(free, free[0] + time)
    return max(free)


def least(times: Sequence[tuple[float, int]], slots: int) -> float:
    """No schedule ends before."""
    longest = max((time for time, _ in times), default=0.0)
    return max(longest, sum(time * count for time, count in times) / slots)


def schedule(times: Iterable[tuple[float, int]], slots: int) -> Iterator[tuple[int, float, float]]:
    """(slot, start, end) of each task that `makespan` places, in order."""
    free = [(0.0, slot) for slot in range(slots)]
    for time, count in times:
        for _ in range(count):
            start, slot = free[0]
            heapq.heapreplace(free, (start + time, slot))
            yield slot, start, start + time


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
