"""`python -m flashqla bench`: times next to those of rivals, on the same inputs, after a check that they are right.

A row is one shape ("4/8 1x4096": heads / value heads, sequences x tokens) and one direction, with a time for every
contender. On a GPU they are the kernels of other libraries (`flashqla.bench_peers`, `flashqla.bench_race`), each judged
by float64; on the CPU the chunked form races the token loop, and a row whose contenders disagree has no times.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import flashqla
from flashqla import reference, testing
from flashqla.bench_peers import OURS, PEERS, TABLES, Row, inputs_of, shared_inputs
from flashqla.bench_race import measure
from flashqla.console import UserError, environment, first_line, table, version_of, write_json
from flashqla.selftest import results

AGREEMENT = 1e-4  # relative L2 in float32 between two contenders, for outputs and gradients
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
    """The command; arguments as `flashqla.cli` defines them. Returns 1 when contenders disagree on the CPU, or when
    the library has no time for a row on the GPU."""
    if arguments.decode:
        return importlib.import_module("flashqla.bench_decode").main(arguments)
    if not arguments.cpu:
        return main_on_gpu(arguments)
    rows = cpu_rows([Shape(4, 8, 1, arguments.tokens)])
    if arguments.json:
        write_json(arguments.json, {"env": environment(torch.device("cpu")), "rows": rows})
    return 0 if report(rows) else 1


# ------------------------------------------------------------------------------------------------------------------ CPU


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

        rows.append(race(shape, "forward+backward", {"chunked": (chunked, 5), "token loop": (token_loop, 1)}))
    return rows


def race(shape: Shape, direction: str, contenders: dict[str, tuple[Callable[[], dict[str, Tensor]], int]]) -> dict:
    """One row: compare every contender's results with the last one's, then give the median time of its repetitions.

    The slowest contenders run once; those that repeat have run once before they are timed.
    """
    times, found = {}, {}
    for name, (run, repetitions) in contenders.items():
        if repetitions > 1:
            run()
        samples = []
        for _ in range(repetitions):
            start = time.perf_counter()
            found[name] = run()
            samples.append(1e3 * (time.perf_counter() - start))
        times[name] = statistics.median(samples)
    *others, measure = found
    error = max(
        testing.compare(mine, found[measure][name]).relative_l2
        for other in others
        for name, mine in found[other].items()
    )
    row = {"name": shape.name, "direction": direction, "dtype": "float32", "head_dim": shape.head_dim, "error": error}
    if error > AGREEMENT:
        return row | {"ok": False, "limit": AGREEMENT}
    return row | {"ok": True, "ms": times, "speedup": {name: times[measure] / times[name] for name in others}}


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


# ------------------------------------------------------------------------------------------------------------------ GPU

DISTRIBUTIONS = {"fla": "fla-core", "flash_qla": "flash-qla", "flashinfer": "flashinfer-python"}
CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def main_on_gpu(arguments: argparse.Namespace) -> int:
    """Race the peers row by row. The result file is complete after every row, whatever becomes of the next one."""
    peers = [name for name in arguments.peers.split(",") if name not in ("", "none")]
    if unknown := set(peers) - set(PEERS):
        raise UserError(f"--peers: {sorted(unknown)} not among {list(PEERS)}")
    jobs = choose_jobs([name for name in TABLES if getattr(arguments, name)] or ["forward"], arguments.rows)
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs the package matplotlib (pip install matplotlib)")
    if not torch.cuda.is_available():
        raise UserError(
            "the rivals need an NVIDIA GPU, none is available here; python -m flashqla bench --cpu needs none"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    results = {"env": gpu_environment(device), "rows": rows}
    if arguments.json:
        write_json(arguments.json, results)
    for row in gpu_rows(jobs, peers, device):
        rows.append(row)
        results["env"]["clocks"] = clocks()
        if arguments.json:
            write_json(arguments.json, results)
    for direction in dict.fromkeys(row["pass"] for row in rows):
        report_on_gpu(direction, [row for row in rows if row["pass"] == direction], peers)
    if arguments.plot:
        plot(rows, arguments.plot)
    return 0 if all(OURS in row["time_ms"] for row in rows) else 1


def choose_jobs(passes: Sequence[str], names: str | None) -> dict[tuple[int, int], list[tuple[str, Row]]]:
    """Passes and rows by (heads, value heads), which share inputs and compiled kernels.

    Without names, each pass has the rows of its table; a name without lengths ("16/64") takes those of its heads, and
    any other row ("16/64 3x1000") can be called by its name.
    """
    jobs = {}
    for direction in passes:
        chosen = list(TABLES[direction])
        if names:
            chosen = []
            for name in filter(None, map(str.strip, names.split(","))):
                same_heads = [known for known in TABLES[direction] if known.split()[0] == name]
                chosen += same_heads or [name]
        for name in dict.fromkeys(chosen):
            try:
                row = Row.parse(name)
            except ValueError as error:
                raise UserError(f"--rows: {error}; the {direction} table has {', '.join(TABLES[direction])}") from error
            jobs.setdefault((row.heads, row.value_heads), []).append((direction, row))
    return jobs


def gpu_rows(
    jobs: dict[tuple[int, int], list[tuple[str, Row]]], peers: Sequence[str], device: torch.device
) -> Iterator[dict[str, Any]]:
    """Measure one row after the other, with a progress bar and a line for each."""
    with tqdm(total=sum(map(len, jobs.values())), unit="row", leave=False, dynamic_ncols=True) as bar:
        for same_heads in jobs.values():
            shared = shared_inputs([row for _, row in same_heads], device)
            for direction, row in same_heads:
                bar.set_description(f"{row.name} {direction}")
                start = time.perf_counter()
                measured = measure(row, inputs_of(row, shared), direction, peers)
                times = ", ".join(f"{name} {ms:.3f}" for name, ms in measured["time_ms"].items()) or "no times"
                bar.write(f"{row.name} {direction}: {times} ({time.perf_counter() - start:.0f} s)")
                bar.update()
                yield measured
            del shared
            torch.cuda.empty_cache()


def gpu_environment(device: torch.device) -> dict[str, Any]:
    """The environment of any result file, the rivals' versions, and the clocks, which are updated after each row."""
    rivals = {name: version_of(distribution) for name, distribution in DISTRIBUTIONS.items()}
    return environment(device) | {"peers": rivals, "clocks": clocks()}


def clocks() -> dict[str, str] | None:
    """Clocks and power limit by nvidia-smi; None without it."""
    line = first_line("nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader")
    return line and dict(zip(CLOCKS, line.split(", "), strict=False))


def best_peer(row: dict[str, Any]) -> tuple[str, float] | None:
    """The fastest rival of a row and its time; None when none was timed."""
    times = {name: ms for name, ms in row["time_ms"].items() if name != OURS}
    return min(times.items(), key=lambda item: item[1]) if times else None


def report_on_gpu(direction: str, rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> None:
    """Print why times are missing, how exact the contenders are, the host's time, and the table last."""
    names, lines, gains = (OURS, *peers), [], []
    missing = {}
    for row in rows:
        for name, why in row["skipped"].items():
            missing.setdefault((name, why), []).append(row["name"])
        ours, best, floor = row["time_ms"].get(OURS), best_peer(row), row["floor_ms"]
        if ours and best:
            gains.append(best[1] / ours)
        lines.append(
            (
                row["name"],
                *(f"{row['time_ms'][name]:.3f}" if name in row["time_ms"] else "-" for name in names),
                best[0] if best else "-",
                f"{ours / best[1]:.2f}" if ours and best else "-",
                f"{floor:.3f}",
                f"{ours / floor:.2f}" if ours else "-",
            )
        )
    for (name, why), where in missing.items():
        print(f"{name} has no time for {', '.join(where)}: {why}")
    for name in names:
        errors = [error for row in rows for error in row["error"].get(name, {}).values()]
        if errors:
            worst = "not finite" if None in errors else f"{max(errors):.1e}"
            print(f"{name}: relative L2 against float64 at most {worst}")
    for label in ("plan reused", "plan made"):
        if samples := [row["host_us"][label] for row in rows if label in row["host_us"]]:
            print(f"{OURS}: {statistics.median(samples):.0f} us of the host a call, {label}")
    if gains:
        print(f"best peer / {OURS}: geometric mean {math.exp(statistics.fmean(map(math.log, gains))):.2f}")
    print(f"{direction}, K = V = 128, bfloat16, ms")
    print(table(("row", *names, "best peer", "ours/best", "floor", "ours/floor"), lines))


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """One bar a row: how many times as long as ours the best peer takes. Rows as in the result file."""
    from matplotlib.figure import Figure

    bars = [
        (f"{row['name']} {row['pass']}", best[1] / row["time_ms"][OURS])
        for row in rows
        if (best := best_peer(row)) and OURS in row["time_ms"]
    ]
    figure = Figure(figsize=(8, 1.2 + 0.3 * len(bars)), layout="constrained")
    axes = figure.subplots()
    axes.bar_label(axes.barh([name for name, _ in bars], [gain for _, gain in bars]), fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(f"time of the best peer / time of {OURS}")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {error}") from error
