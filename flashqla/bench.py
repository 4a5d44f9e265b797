"""`python -m flashqla bench`: times next to those of rivals, on the same inputs, after a check that they are right.

A row is one shape ("4/8 1x4096": heads / value heads, sequences x tokens) and one direction, with a time for every
contender: the kernels of other libraries (`flashqla.bench_peers`), each judged by float64 (`flashqla.bench_race`). On a
CPU the chunked form races the token loop (`flashqla.bench_cpu`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from flashqla import bench_cpu
from flashqla.bench_cold import cold_starts
from flashqla.bench_peers import OURS, PEERS, TABLES, Row, inputs_of, shared_inputs
from flashqla.bench_race import measure
from flashqla.console import UserError, environment, first_line, table, version_of, write_json

DISTRIBUTIONS = {"fla": "fla-core", "flash_qla": "flash-qla", "flashinfer": "flashinfer-python"}
CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def main(arguments: argparse.Namespace) -> int:
    """The command; arguments as `flashqla.cli` defines them. Returns 1 when contenders disagree on the CPU, or when
    the library has no time for a row on the GPU, where the peers race row by row.

    The result file is complete after every row, whatever becomes of the next one.
    """
    if arguments.decode:
        return importlib.import_module("flashqla.bench_decode").main(arguments)
    if arguments.cpu:
        return bench_cpu.main(arguments)
    peers = [name for name in arguments.peers.split(",") if name not in ("", "none")]
    if unknown := set(peers) - set(PEERS):
        raise UserError(f"--peers: {sorted(unknown)} not among {list(PEERS)}")
    jobs = choose_jobs(passes_of(arguments), arguments.rows)
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
    if arguments.cold:
        results["cold_start"] = [cold_starts((OURS, *peers), direction) for direction in passes_of(arguments)]
        report_cold_starts(results["cold_start"])
        if arguments.json:
            write_json(arguments.json, results)
    for direction in dict.fromkeys(row["pass"] for row in rows):
        report_on_gpu(direction, [row for row in rows if row["pass"] == direction], peers)
    if arguments.plot:
        plot(rows, arguments.plot)
    return 0 if all(OURS in row["time_ms"] for row in rows) else 1


def passes_of(arguments: argparse.Namespace) -> list[str]:
    """The passes asked for; the forward if none was."""
    return [name for name in TABLES if getattr(arguments, name)] or ["forward"]


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
        if waiting := [row["name"] for row in rows if name in row["eager"]]:
            print(
                f"{name} cannot be captured in a CUDA graph for {', '.join(waiting)}: times of its launches one by one"
            )
        errors = [error for row in rows for error in row["error"].get(name, {}).values()]
        if errors:
            worst = "not finite" if None in errors else f"{max(errors):.1e}"
            print(f"{name}: relative L2 against float64 at most {worst}")
        if peaks := [f"{row['name']} {row['peak_mib'][name]:.0f}" for row in rows if name in row["peak_mib"]]:
            print(f"{name}: MiB of memory beyond the inputs: {', '.join(peaks)}")
    labels = {"plan reused": f"{OURS}, plan reused", "plan made": f"{OURS}, plan made"}
    labels |= {name: name for name in peers}
    for label, shown in labels.items():
        if samples := [row["host_us"][label] for row in rows if label in row["host_us"]]:
            print(f"{shown}: {statistics.median(samples):.0f} us of the host a call")
    if gains:
        print(f"best peer / {OURS}: geometric mean {math.exp(statistics.fmean(map(math.log, gains))):.2f}")
    print(f"{direction}, K = V = 128, bfloat16, ms")
    print(table(("row", *names, "best peer", "ours/best", "floor", "ours/floor"), lines))


def report_cold_starts(starts: Sequence[dict[str, Any]]) -> None:
    """Print how long first calls take, a table a pass."""
    for start in starts:
        print(f"{start['pass']} {start['row']}: seconds of the first call of a process")
        names = dict.fromkeys((*start["empty_caches_s"], *start["skipped"]))
        cells = [[start[key].get(name) for key in ("empty_caches_s", "warm_disk_s")] for name in names]
        lines = [
            (name, *("-" if seconds is None else f"{seconds:.1f}" for seconds in pair), start["skipped"].get(name, ""))
            for name, pair in zip(names, cells, strict=True)
        ]
        print(table(("contender", "empty caches", "warm disk", ""), lines))


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
