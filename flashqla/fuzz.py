"""`python -m flashqla selftest --fuzz SECONDS --seed N`: random cases against float64, forward and backward.

A trial is all in its seed: shapes, lengths, gates, flags, dtype and numbers. Trials take the seeds N, N + 1, ... until
the time is over, and a failure prints the command that repeats it alone.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tqdm import tqdm

import flashqla
from flashqla import testing
from flashqla.console import environment, pick_device, table, write_json
from flashqla.selftest import BETA, GATE, L2NORM, NEGATIVE, V_FIRST, Case, judge

LOOP_TOKENS = 4000
"""Tokens times value heads up to which the token loop is the judge; beyond, the chunk form in float64 on the CPU."""

DTYPES = {torch.bfloat16: 6, torch.float16: 3, torch.float32: 1}
HEAD_DIMS = {(128, 128): 6, (64, 64): 2, (64, 128): 1, (128, 64): 1, (48, 80): 1, (7, 20): 1}
GATES = {None: 8, 0.0: 1, -1e-4: 1, -0.3: 1, -1.0: 1, -5.0: 1, -20.0: 1}
RECIPES = {"bench": 4, "faults": 2, "correlated": 1}


def draw(seed: int, longest: int) -> Case:
    """The case of a seed, with at most about `longest` tokens."""
    dice = random.Random(seed)

    def one_of(weights: dict[Any, int]) -> Any:
        return dice.choices(list(weights), list(weights.values()))[0]

    heads = dice.choice((1, 1, 2, 3, 4))
    value_heads = heads * dice.choice((1, 2, 3, 4, 7, 8))
    tokens = round(math.exp(dice.uniform(0, math.log(longest))))
    batch, lengths = 1, None
    if dice.random() < 0.6:
        cuts = sorted(dice.randint(0, tokens) for _ in range(dice.choice((0, 1, 3, 10, 40))))
        lengths = tuple(end - start for start, end in zip([0, *cuts], [*cuts, tokens], strict=True))
        tokens += dice.choice((0, 0, 1, 40))
    else:
        batch = dice.choice((1, 1, 2, 3))
    flags = {name: dice.random() < 0.3 for name in (L2NORM, GATE, BETA, V_FIRST)}
    flags[NEGATIVE] = flags[BETA] and dice.random() < 0.5
    dtype, resets = one_of(DTYPES), dice.choice((0.0, 0.0, 0.0, 0.02, 0.2))
    if flags[GATE]:
        resets = 0.0
    if dtype == torch.float32:
        resets = min(resets, 0.02)  # each adds 110 to a chunk's prefix sum, which costs the others float32 digits
    return Case(
        name=f"seed {seed}",
        dtype=dtype,
        batch=batch,
        tokens=tokens,
        heads=(heads, value_heads),
        head_dims=one_of(HEAD_DIMS),
        lengths=lengths,
        recipe=one_of(RECIPES),
        gate=one_of(GATES),
        initial_state=dice.random() < 0.7,
        flags={name: True for name in flags if flags[name]},
        scale=dice.choice((None, None, 1.0, 0.25)),
        resets=resets,
        seed=seed,
    )


def oracle_of(case: Case) -> Callable:
    """Who is right about a case: the token loop in float64, or the chunk form where that would take too long."""
    if case.batch * case.tokens * case.heads[1] <= LOOP_TOKENS:
        return testing.oracle64
    return lambda **arguments: flashqla.chunk_gated_delta_rule(**arguments, backend="reference")


def trials(seconds: float, seed: int, device: torch.device, backend: str) -> Iterator[dict[str, Any]]:
    """Judge one case after the other until the time is over, at least one."""
    start, longest = time.monotonic(), 8000 if device.type == "cuda" else 200
    with tqdm(total=round(seconds), unit="s", leave=False, dynamic_ncols=True) as bar:
        while True:
            case = draw(seed, longest)
            bar.set_description(case.name)
            try:
                yield judge(case, device, backend, oracle_of(case))
            except torch.AcceleratorError:
                raise  # the device is lost, and so are all later trials
            except Exception as error:
                yield {"name": case.name, "dtype": str(case.dtype), "ok": False, "refused": repr(error)}
            bar.update(min(round(time.monotonic() - start), bar.total) - bar.n)
            seed += 1
            if time.monotonic() - start >= seconds:
                return


def main(arguments: argparse.Namespace) -> int:
    """The command; arguments as `flashqla.cli` defines them. Returns 1 when a trial fails."""
    device = pick_device(arguments.device)
    repeat = f"python -m flashqla selftest --fuzz 0 --device {device} --backend {arguments.backend} --seed "
    count, failed, worst = 0, [], {}
    for row in trials(arguments.fuzz, arguments.seed, device, arguments.backend):
        count += 1
        if not row["ok"]:
            failed.append(row)
            tqdm.write(f"FAILED {complaint(row)}\n  {repeat}{row['name'].removeprefix('seed ')}")
        for kind in ("forward", "backward") if "refused" not in row else ():
            share, key = row[kind] / row[f"{kind}_limit"], (row["dtype"], kind)
            if not share <= worst.get(key, (0.0,))[0]:
                worst[key] = (share, row[kind], row["name"])
        if arguments.json:
            summary = {" ".join(key): {"error": error, "case": name} for key, (_, error, name) in worst.items()}
            results = {"env": environment(device), "backend": arguments.backend, "seed": arguments.seed}
            write_json(arguments.json, results | {"trials": count, "failed": failed, "worst": summary})
    lines = [(*key, f"{error:.1e}", f"{share:.0%}", name) for key, (share, error, name) in sorted(worst.items())]
    print(table(("dtype", "pass", "worst relative L2", "of its limit", "case"), lines))
    print(f"{count - len(failed)} of {count} random cases within their limits, seeds from {arguments.seed}")
    return 1 if failed else 0


def complaint(row: dict[str, Any]) -> str:
    """What went wrong, in one line."""
    if "refused" in row:
        return f"{row['name']}: {row['refused']}"
    wrong = ", ".join(
        f"{name} {error['error']:.1e}" + (f" and {error['disagreements']} NaN" if error["disagreements"] else "")
        for name, error in sorted(row["errors"].items(), key=lambda item: -item[1]["error"])[:3]
    )
    return f"{row['name']} {row['case']}: {wrong}"
