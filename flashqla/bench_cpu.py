"""`python -m flashqla bench --cpu`: the chunked path against the token loop with autograd, once they agree."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import flashqla
from flashqla import reference, testing
from flashqla.console import UserError, environment, table, write_json
from flashqla.selftest import results

AGREEMENT = 1e-4  # relative L2 in float32 between two contenders, for outputs and gradients
ROUNDS = 3  # in which every contender has its turn
LOOP_STATES = 6  # states of one token that autograd keeps alive for the token loop, rounded up


@dataclass(frozen=True)
class Shape:
    """Sizes of one row."""

    heads: int
    value_heads: int
    sequences: int
    tokens: int
    head_dim: int = 128

    @property
    def name(self) -> str:
        """As rows are called everywhere: "heads/value heads sequences x tokens"."""
        return f"{self.heads}/{self.value_heads} {self.sequences}x{self.tokens}"

    def inputs(self, **options: Any) -> testing.Inputs:
        """Dense inputs of this shape."""
        sizes = (self.sequences, self.tokens, self.heads, self.value_heads, self.head_dim, self.head_dim)
        return testing.inputs(*sizes, **options)


def main(arguments: argparse.Namespace) -> int:
    """The CPU part of the command. Returns 1 when contenders disagree."""
    rows = cpu_rows([Shape(4, 8, 1, arguments.tokens)])
    if arguments.json:
        write_json(arguments.json, {"env": environment(torch.device("cpu")), "rows": rows})
    return 0 if report(rows) else 1


def cpu_rows(shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Forward and backward in float32: the public function's chunked path against the token loop under autograd."""
    rows = []
    for shape in shapes:
        require_memory(4 * LOOP_STATES * shape.sequences * shape.tokens * shape.value_heads * shape.head_dim**2, shape)
        made = shape.inputs().requires_grad()
        gradients = [made.do, made.dht]

        def chunked(made: testing.Inputs = made, gradients: list[Tensor] = gradients) -> dict[str, Tensor]:
            arguments = made.arguments(output_final_state=True, backend="reference")
            return results(flashqla.chunk_gated_delta_rule, arguments, gradients)

        def token_loop(made: testing.Inputs = made, gradients: list[Tensor] = gradients) -> dict[str, Tensor]:
            return results(reference.recurrent, made.arguments(output_final_state=True), gradients)

        rows.append(race(shape, "forward+backward", {"chunked": (chunked, 8), "token loop": (token_loop, 1)}))
    return rows


def race(shape: Shape, direction: str, contenders: dict[str, tuple[Callable[[], dict[str, Tensor]], int]]) -> dict:
    """One row: compare every contender's results with the last one's, then time them.

    All have run once before; then they take turns, each with its number of repetitions, and the median of all its times
    counts. The first token loop of a process would cost several times as much as the next ones.
    """
    found = {name: run() for name, (run, _) in contenders.items()}
    *others, measure = found
    error = max(
        testing.compare(mine, found[measure][name]).relative_l2
        for other in others
        for name, mine in found[other].items()
    )
    found.clear()
    row = {"name": shape.name, "direction": direction, "dtype": "float32", "head_dim": shape.head_dim, "error": error}
    if error > AGREEMENT:
        return row | {"ok": False, "limit": AGREEMENT}
    samples = {name: [] for name in contenders}
    for _ in tqdm(range(ROUNDS), unit="round", leave=False, dynamic_ncols=True):
        for name, (run, repetitions) in contenders.items():
            for _ in range(repetitions):
                start = time.perf_counter()
                run()
                samples[name].append(1e3 * (time.perf_counter() - start))
    times = {name: statistics.median(values) for name, values in samples.items()}
    spread = {name: [min(values), max(values)] for name, values in samples.items()}
    speedup = {name: times[measure] / times[name] for name in others}
    return row | {"ok": True, "ms": times, "spread_ms": spread, "speedup": speedup}


def require_memory(need: int, shape: Shape) -> None:
    """UserError when the token loop's states would not fit into the free memory of this machine (Linux tells)."""
    try:
        with open("/proc/meminfo") as file:
            free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return
    if need > free:
        gib = f"{need / 2**30:.0f} GiB, free are {free / 2**30:.0f}"
        raise UserError(f"{shape.name}: the token loop under autograd needs about {gib}; choose fewer --tokens")


def report(rows: Sequence[dict[str, Any]]) -> bool:
    """Print the rows; True when all contenders agree."""
    for row in rows:
        print(f"{row['name']}, K = V = {row['head_dim']}, {row['dtype']}, {row['direction']}")
        if not row["ok"]:
            print(f"  FAILED: results differ, relative L2 {row['error']:.1e} (limit {row['limit']:.0e}); no times")
            continue
        slowest = max(row["ms"].values())
        lines = [(name, f"{ms:.1f}", f"{slowest / ms:.1f}x") for name, ms in row["ms"].items()]
        print(table(("contender", "ms", "speed"), lines))
        print(f"results agree: relative L2 {row['error']:.1e}")
    return all(row["ok"] for row in rows)
