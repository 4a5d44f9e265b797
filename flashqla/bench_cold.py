"""How long the first call of a fresh process takes: with empty caches, and with what that left on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

ROW = "2/8 1x2048"
LIMIT_S = 600
CACHES = (
    *("TILELANG_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH", "XDG_CACHE_HOME"),
    *("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUTE_DSL_CACHE_DIR"),
)
"""Variables that tell the contenders and their compilers where to keep what they have compiled."""

CHILD = """
import sys, time, torch
from flashqla import bench_peers, bench_race
_, name, row, direction = sys.argv
row = bench_peers.Row.parse(row)
made = bench_peers.inputs_of(row, bench_peers.shared_inputs([row], "cuda"))
made = made if direction == "forward" else made.requires_grad()
torch.cuda.synchronize()
start = time.perf_counter()
with torch.set_grad_enabled(direction != "forward"):
    bench_race.call_of(direction, bench_peers.CONTENDERS[name](made, row.lengths), made)()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def cold_starts(names: Sequence[str], direction: str) -> dict[str, Any]:
    """Seconds of the first call by contender, import and compilation included; a reason where there is none.

    Each contender has two processes: one with empty caches, one with the caches that the first has left.
    """
    found = {"row": ROW, "pass": direction, "empty_caches_s": {}, "warm_disk_s": {}, "skipped": {}}
    for name in tqdm(names, unit="contender", desc="cold starts", leave=False, dynamic_ncols=True):
        with tempfile.TemporaryDirectory() as folder:
            places = {variable: os.path.join(folder, variable.lower()) for variable in CACHES}
            for key in ("empty_caches_s", "warm_disk_s"):
                seconds = first_call(name, direction, places)
                if isinstance(seconds, str):
                    found["skipped"][name] = seconds
                    break
                found[key][name] = seconds
    return found


def first_call(name: str, direction: str, places: dict[str, str]) -> float | str:
    """Seconds of one contender's first call in a process of its own, or why there is no such time."""
    command = [sys.executable, "-c", CHILD, name, ROW, direction]
    try:
        ran = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"not ready after {LIMIT_S} s"
    if ran.returncode:
        return (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1][:300]
    return float(ran.stdout.split()[-1])
