"""`python -m flashqla calibrate`: measures the coefficients of `flashqla.costs` on this GPU.

Every kernel is timed alone at two sizes; a coefficient is the slope between them, or what remains.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
from collections.abc import Callable
from unittest import mock

import torch

import flashqla
from flashqla import backends, testing
from flashqla.console import UserError, environment, table, write_json
from flashqla.plan import CHUNK_SIZE, Plan

REPETITIONS = 7


def main(arguments: argparse.Namespace) -> int:
    """The command; arguments as `flashqla.cli` defines them."""
    device = torch.device("cuda")
    if reasons := backends.device_refusals(device):
        raise UserError(f"calibrate: {'; '.join(reasons)}")
    measured = coefficients(device)
    flat = [(f"{name} {part}", f"{value:.4g}") for name, value in measured.items() for part, value in _parts(value)]
    print(table(("coefficient", "us"), flat))
    if arguments.json:
        described = environment(device)
        about = {name: described[name] for name in ("gpu", "driver", "date", "flashqla", "torch") if name in described}
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        write_json(arguments.json, about | {"sm_count": sm_count} | measured)
    return 0


def _parts(value: float | dict) -> list[tuple[str, float]]:
    if not isinstance(value, dict):
        return [("", value)]
    return [(f"{name} {part}".strip(), number) for name, inner in value.items() for part, number in _parts(inner)]


def coefficients(device: torch.device) -> dict:
    """All coefficients, as `flashqla.costs.coefficients` describes them."""
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    output, chains = {}, {}
    for columns in (64, 128):
        few, many = 8, sm_count * columns // 128  # value heads that leave nearly all, or none, of the SMs idle
        start, chunk = line(
            lambda n, heads=few, columns=columns: times(device, heads, n, columns, 0)["chunk_forward"], 32, 256
        )
        _, busy = line(
            lambda n, heads=many, columns=columns: times(device, heads, n, columns, 0)["chunk_forward"], 32, 256
        )
        output[str(columns)] = {"start": start, "chunk": chunk, "busy": max(busy - chunk, 0.0)}
        chains[str(columns)] = chain_times(device, columns, few, many)
    # three segments a head: two blocks of N twice, of M once
    start, chunk = line(lambda n: states_and_order(device, 4, n), 16, 128)
    _, shared = line(lambda n: states_and_order(device, sm_count // 6, n), 16, 128)
    share = 4 * 6 / sm_count
    states = {"start": start, "chunk": (chunk - share * shared) / (1 - share), "shared": shared}
    scan_start, segment = line(lambda count: times(device, 8, 4 * (count + 2), 64, 4)["segment_scan"], 8, 56)
    small, large = (times(device, heads, 256, 64, 0)["gated_inverse"] for heads in (8, 64))
    per_chunk_head = (large - small) / (256 * (64 - 8) * (1 + 2 / 4) / 3)
    inverse = {"start": max(small - per_chunk_head * 256 * 8 * (1 + 2 / 4) / 3, 0.0), "chunk_head": per_chunk_head}
    return {
        "launch": launch_gap(device),
        "inverse": inverse,
        "states": states,
        "scan": {"start": scan_start, "segment": segment},
        "output": output,
        "chains": chains,
    }


def chain_times(device: torch.device, columns: int, few: int, many: int) -> dict[str, float]:
    """Of the backward's two chains: with few value heads, and with as many as fill the multiprocessors."""

    def time(chunks: int, heads: int, gradients: str) -> float:
        return backward_times(device, heads, chunks, columns, gradients)["backward_chains"]

    start, gradient = line(lambda n: time(n, few, "v"), 32, 256)
    _, busy = line(lambda n: time(n, many, "v"), 32, 256)
    _, both = line(lambda n: time(n, many, "all"), 32, 256)  # first the ones, then the others
    return {
        "start": start,
        "gradient": gradient,
        "state": both - busy - max(busy - gradient, 0.0),
        "busy": max(busy - gradient, 0.0),
    }


def states_and_order(device: torch.device, heads: int, n: int) -> float:
    """Of three segments."""
    found = times(device, heads, 3 * n, 64, n)
    return found["segment_order"] + found["segment_states"]


def line(time: Callable[[int], float], small: int, large: int) -> tuple[float, float]:
    """Intercept and slope."""
    low, high = time(small), time(large)
    slope = (high - low) / (large - small)
    return max(low - slope * small, 0.0), slope


def long_inputs(device: torch.device, heads: int, chunks: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One sequence whose heads do not decay, four value heads a key head where they can be, and an initial state."""
    group = 4 if heads % 4 == 0 else 1
    made = testing.inputs(
        1, 64, heads // group, heads, 128, 128, gate=0.0, lengths=(64,), dtype=torch.bfloat16, device=device
    )
    long = {name: getattr(made, name).repeat(1, chunks * CHUNK_SIZE // 64, *[1] * (getattr(made, name).dim() - 2))
            for name in testing.PER_TOKEN}  # fmt: skip
    return long, made.initial_state


def call(device: torch.device, heads: int, chunks: int, columns: int, segment_chunks: int) -> Callable[[], object]:
    """A forward of `long_inputs`."""
    long, initial_state = long_inputs(device, heads, chunks)
    plan = Plan.build(long["q"].shape, long["v"].shape, block_dv=columns, segment_chunks=segment_chunks)
    options = {"initial_state": initial_state, "output_final_state": True, "backend": "hopper", "plan": plan}

    def run() -> object:
        with torch.no_grad():
            return flashqla.chunk_gated_delta_rule(**long, **options)

    return run


def times(device: torch.device, heads: int, chunks: int, columns: int, segment_chunks: int) -> dict[str, float]:
    """Microseconds of each kernel of a call, launched alone and again and again."""
    return {name: replayed(again) for name, again in kernels_of(call(device, heads, chunks, columns, segment_chunks))}


def backward_times(device: torch.device, heads: int, chunks: int, columns: int, gradients: str) -> dict[str, float]:
    """As `times`, of the backward; `gradients` is "v", which leaves out the chain of the state, or "all"."""
    long, _ = long_inputs(device, heads, chunks)
    leaves = [long[name].requires_grad_() for name in (testing.PER_TOKEN if gradients == "all" else ["v"])]
    plan = Plan.build(long["q"].shape, long["v"].shape, block_dv=columns, segment_chunks=0)
    o, _ = flashqla.chunk_gated_delta_rule(**long, backend="hopper", plan=plan)

    def run() -> object:
        return torch.autograd.grad(o, leaves, long["v"].detach(), retain_graph=True)

    return {name: replayed(again) for name, again in kernels_of(run)}


def kernels_of(run: Callable[[], object]) -> list[tuple[str, Callable[[], object]]]:
    """Name of each kernel that `run` launches, and how to launch it again with the same arguments."""
    from flashqla.hopper import launch, launch_backward, segments
    from flashqla.hopper.compile import kernel

    launched = []

    def recording(name: str, **options: object) -> Callable:
        def launch_it(*arguments: object) -> object:
            launched.append((name, functools.partial(kernel(name, **options), *arguments)))
            return launched[-1][1]()

        return launch_it

    with contextlib.ExitStack() as patches:
        for module in (launch, launch_backward, segments):
            patches.enter_context(mock.patch.object(module, "kernel", recording))
        run()
    return launched


def replayed(run: Callable[[], object]) -> float:
    """Median microseconds of a run in a CUDA graph. Between two runs something else keeps them from overlapping, and is
    not counted."""
    nothing = torch.zeros(1, device="cuda")

    def both() -> None:
        nothing.zero_()
        run()

    return timed(both) - timed(nothing.zero_)


def timed(run: Callable[[], object]) -> float:
    """Median microseconds of one of `REPETITIONS` runs in a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPETITIONS):
            run()
    samples = []
    for _ in range(REPETITIONS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1e3 * begin.elapsed_time(end) / REPETITIONS)
    return statistics.median(samples)


def launch_gap(device: torch.device) -> float:
    """What a call takes beyond its kernels alone, for each of them but the first."""
    run = call(device, 8, 512, 128, 32)
    alone = kernels_of(run)
    return max((replayed(run) - sum(replayed(again) for _, again in alone)) / (len(alone) - 1), 0.0)
