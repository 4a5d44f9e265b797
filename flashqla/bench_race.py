"""Judge and stopwatch of the GPU benchmark: who is right, and how long each of them takes.

A contender of `flashqla.bench_peers` is timed only after its results have been compared with float64 in the same run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashqla import reference, testing
from flashqla.bench_peers import CONTENDERS, OURS, Row, Run

LEAVES = (*testing.PER_TOKEN, "initial_state")
LIMITS = {"o": 6e-3, "final_state": 6e-3} | dict.fromkeys((f"d{name}" for name in LEAVES), 2e-2)
"""Largest relative L2 of each result against float64; bfloat16 kernels stand at 4e-3 for the first two."""

PIECE = 8192
"""Chunks times value heads that the float64 reference handles at a time, to bound its memory."""

REPLAY_MS, RACE_MS = 2.0, 1500.0
"""Aimed at: the time of one replay, and of all replays of a row."""


def call_of(direction: str, run: Run, made: testing.Inputs) -> Callable[[], dict[str, Tensor]]:
    """What is timed: the forward, its backward alone, or both; gives every result under its name."""
    if direction == "forward":
        return lambda: dict(zip(("o", "final_state"), run(), strict=True))
    leaves = {f"d{name}": getattr(made, name) for name in LEAVES}

    def gradients(results: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        found = torch.autograd.grad(results, list(leaves.values()), (made.do, made.dht), retain_graph=True)
        return dict(zip(leaves, found, strict=True))

    def step() -> dict[str, Tensor]:
        o, final_state = run()
        return {"o": o.detach(), "final_state": final_state.detach()} | gradients((o, final_state))

    if direction == "step":
        return step
    results = run()
    return lambda: gradients(results)


# ---------------------------------------------------------------------------------------------------------------- judge


def errors_of(
    row: Row, made: testing.Inputs, direction: str, found: dict[str, dict[str, Tensor]]
) -> dict[str, dict[str, float]]:
    """Relative L2 of every contender's results against the float64 reference on their device; NaN stays NaN.

    Heads are independent: the reference takes as many key heads at a time, with their value heads, as `PIECE` allows.
    """
    group, offsets = row.value_heads // row.heads, made.cu_seqlens.cpu()
    size = max(1, PIECE // (row.chunks * group))
    sums = {(name, result): torch.zeros(2, dtype=torch.float64) for name in found for result in found[name]}
    for first in range(0, row.heads, size):
        count = min(size, row.heads - first)

        def part(name: str, tensor: Tensor, first: int = first, count: int = count) -> Tensor:
            share = 1 if name in ("q", "k", "dq", "dk") else group
            axis = 1 if name.endswith("state") or name == "dht" else 2
            return tensor.detach().narrow(axis, first * share, count * share).double()

        exact = {name: part(name, getattr(made, name)) for name in (*LEAVES, "do", "dht")}
        for result, expected in exact_results(exact, offsets, direction).items():
            square = expected.square().sum()
            for name in found:
                difference = part(result, found[name][result]) - expected
                sums[name, result] += torch.stack([difference.square().sum(), square]).cpu()
    errors = {name: {} for name in found}
    for (name, result), (difference, square) in sums.items():
        errors[name][result] = (difference / square).sqrt().item()
    return errors


@torch.no_grad()
def exact_results(exact: dict[str, Tensor], offsets: Tensor, direction: str) -> dict[str, Tensor]:
    """All results of a pass by the reference in float64; offsets on the host."""
    inputs, found = [exact[name] for name in testing.PER_TOKEN], {}
    keywords = {"initial_state": exact["initial_state"], "cu_seqlens": offsets}
    if direction != "backward":
        result = reference.chunked(*inputs, output_final_state=True, **keywords)
        found |= {"o": result.output, "final_state": result.final_state}
    if direction != "forward":
        found |= reference.backward(*inputs, exact["do"], dht=exact["dht"], **keywords)._asdict()
    return found


def broken_limits(errors: dict[str, float]) -> str:
    """Which results are too far from float64, in words; empty when none is."""
    broken = [result for result, error in errors.items() if not error <= LIMITS[result]]
    return "; ".join(f"wrong: relative L2 of {name} is {errors[name]:.1e}, limit {LIMITS[name]:.0e}" for name in broken)


# ------------------------------------------------------------------------------------------------------------ stopwatch


class Replay(NamedTuple):
    """Something to time: `run` makes `calls` calls and takes about `milliseconds`."""

    run: Callable[[], Any]
    calls: int
    milliseconds: float


def timed(run: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events before and after, on the current stream; nothing waits."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    return begin, end


def milliseconds(run: Callable[[], Any]) -> float:
    """The time of one run on the GPU, waiting for it."""
    torch.cuda.synchronize()
    begin, end = timed(run)
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def captured(call: Callable[[], Any]) -> Replay:
    """Several calls as one CUDA graph, so that no time of the host is measured; about `REPLAY_MS` a replay.

    Captured on the current stream, as a backward runs on that of its forward; on another one if it is the default.
    """
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    calls = min(20, max(3, round(REPLAY_MS / milliseconds(call))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    graph.replay()
    return Replay(graph.replay, calls, milliseconds(graph.replay))


def race(replays: dict[str, Replay]) -> dict[str, list[float]]:
    """Milliseconds a call, ascending: the contenders take turns, and another one begins each time.

    Everything is queued at once, so the GPU never waits for the host; the first round does not count.
    """
    names, events = list(replays), {name: [] for name in replays}
    total = sum(replay.milliseconds for replay in replays.values())
    for turn in range(1 + min(50, max(5, round(RACE_MS / max(total, 1e-3))))):
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
            events[name].append(timed(replays[name].run))
    torch.cuda.synchronize()
    return {
        name: sorted(begin.elapsed_time(end) / replays[name].calls for begin, end in pairs[1:])
        for name, pairs in events.items()
    }


def host_us(run: Callable[[], Any], repetitions: int = 50) -> float:
    """Median microseconds until a call returns, made while the GPU is idle."""
    samples = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        run()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(samples)


# -------------------------------------------------------------------------------------------------------------- one row


def replay_of(call: Callable[[], Any]) -> tuple[Replay, str]:
    """A graph of the call; where it cannot be captured, the call itself, and why."""
    try:
        return captured(call), ""
    except Exception as error:  # it waits for the GPU, for one
        torch.cuda.synchronize()
        return Replay(call, 1, milliseconds(call)), reason(error)


def measure(row: Row, made: testing.Inputs, direction: str, peers: Sequence[str]) -> dict[str, Any]:
    """One row as JSON: errors, then times (median, and 10th and 90th percentile) of those who are right.

    `eager` says whose calls could not be captured, and why: their times are those of the host where it is slower.
    `skipped` says why a contender has no time, `first_call_s` how long its first call took (import and compilation,
    where this row is the first to need them), `peak_mib` what memory a call needs beyond its inputs, `host_us` what a
    call costs the host: ours with a plan and without, and each peer's.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return _measure(row, made if direction == "forward" else made.requires_grad(), direction, peers)


def _measure(row: Row, made: testing.Inputs, direction: str, peers: Sequence[str]) -> dict[str, Any]:
    measured = {"pass": direction, "name": row.name, "hk": row.heads, "hv": row.value_heads}
    measured |= {"seqlens": list(row.lengths), "floor_ms": row.floor_ms(direction)}
    tables = ("time_ms", "spread_ms", "error", "skipped", "eager", "first_call_s", "host_us", "peak_mib")
    times, spread, errors, skipped, eager, first_call, host, peak = (measured.setdefault(name, {}) for name in tables)
    calls, found, replays = {}, {}, {}
    with torch.set_grad_enabled(direction != "forward"):
        for name in (OURS, *peers):
            try:
                start = time.perf_counter()
                calls[name] = call_of(direction, CONTENDERS[name](made, row.lengths), made)
                calls[name]()
                torch.cuda.synchronize()
                first_call[name] = time.perf_counter() - start
                leave_nan(made)
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                found[name] = calls[name]()
                torch.cuda.synchronize()
                peak[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            except Exception as error:  # whatever a rival raises, the others go on
                skipped[name] = reason(error)
        for name, errors_found in errors_of(row, made, direction, found).items():
            errors[name] = {result: error if math.isfinite(error) else None for result, error in errors_found.items()}
            if broken := broken_limits(errors_found):
                skipped[name] = broken
        found.clear()
        for name, call in calls.items():
            if name in skipped:
                continue
            replays[name], why = replay_of(call)
            if why:
                eager[name] = why
        for name, samples in race(replays).items():
            times[name] = statistics.median(samples)
            deciles = statistics.quantiles(samples, n=10)
            spread[name] = [deciles[0], deciles[-1]]
        for key, reuse_plan in (("plan reused", True), ("plan made", False)) if OURS in times else ():
            host[key] = host_us(call_of(direction, CONTENDERS[OURS](made, row.lengths, reuse_plan), made))
        for name in times.keys() & set(peers):
            host[name] = host_us(calls[name])
    return measured


def leave_nan(made: testing.Inputs) -> None:
    """Fill memory that the next results will probably get with NaN, to show what nobody writes."""
    for tensor in (made.q, made.v, made.g, made.initial_state):
        torch.full_like(tensor, torch.nan)


def reason(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
