"""`python -m flashqla bench --decode`: one or a few tokens of many sequences, against fla-core's recurrent kernel."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

import flashqla
from flashqla import backends, testing
from flashqla.bench_race import captured, race
from flashqla.console import UserError, environment, table, write_json

ROWS = [(heads, N, tokens) for heads in (8, 16, 32, 64) for N in (1, 16, 64, 256) for tokens in (1, 8)]
"""Value heads (four to a key head), sequences, tokens; K = V = 128, bfloat16, states given and returned in float32."""
LIMITS = {"o": 4e-3, "final_state": 1e-5}
"""Relative L2 from float64: o is rounded to 16 bits, the state is float32 throughout."""
CONTENDERS = ("flashqla", "v_first", "in_place", "fla")


def main(arguments: argparse.Namespace) -> int:
    """Times every row; 1 if a result is wrong, and nothing is timed then."""
    reasons = backends.device_refusals()
    if reasons:
        raise UserError(f"bench --decode: {'; '.join(reasons)}")
    fla = None if backends.fla_refusals() else __import__("fla.ops.gated_delta_rule", fromlist=["fla"])
    errors = gate()
    rows = []
    for heads, N, tokens in ROWS:
        made = inputs(heads, N, tokens)
        times = race({name: captured(run) for name, run in contenders(made, fla).items()})
        medians = {name: statistics.median(values) for name, values in times.items()}
        moved = 2 * made["initial_state"].numel() * 4 / medians["in_place"] / 1e9
        rows.append({"name": f"{heads // 4}/{heads} {N}x{tokens}", "time_ms": medians, "state_tb_per_s": moved})
    if arguments.json:
        write_json(arguments.json, {"env": environment(torch.device("cuda")), "error": errors, "rows": rows})
    print(table(("microseconds", *CONTENDERS, "fla / flashqla", "state TB/s"), [cells(row) for row in rows]))
    return 0


def inputs(heads: int, N: int, tokens: int) -> dict[str, Any]:
    """Made on the GPU: the states of the last rows are gigabytes."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k, v = (randn(N, tokens, each, 128).bfloat16() for each in (heads // 4, heads // 4, heads))
    g, beta = -randn(N, tokens, heads).abs() / 16, randn(N, tokens, heads).sigmoid()
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": randn(N, heads, 128, 128)}


def contenders(made: dict[str, Any], fla: Any) -> dict[str, Callable[[], Any]]:
    """What is timed: states read and others written, values first, states overwritten; fla-core if it is there."""
    call, options = flashqla.fused_recurrent_gated_delta_rule, {"use_qk_l2norm_in_kernel": True}
    ours = options | {"backend": "hopper"}
    runs = {
        "flashqla": lambda: call(**made, **ours, output_final_state=True),
        "v_first": lambda: call(**made, **ours, output_final_state=True, state_v_first=True),
        "in_place": lambda: call(**made, **ours, inplace_final_state=True),
    }
    if fla is not None:
        runs["fla"] = lambda: fla.fused_recurrent_gated_delta_rule(**made, **options, output_final_state=True)
    return runs


def gate() -> dict[str, float]:
    """Errors on a small case; UserError where the result is wrong: a wrong kernel is not worth a time."""
    made = testing.inputs(5, 8, 2, 8, 128, 128, dtype=torch.bfloat16, device="cuda")
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    mine = flashqla.fused_recurrent_gated_delta_rule(**made.arguments(backend="hopper"), **options)
    exact = testing.oracle64(**made.arguments(), **options)
    errors = {name: testing.compare(x, y).relative_l2 for name, x, y in zip(LIMITS, mine, exact, strict=True)}
    if broken := {name: error for name, error in errors.items() if not error <= LIMITS[name]}:
        raise UserError(f"bench --decode: wrong results, relative L2 {broken}, limits {LIMITS}")
    return errors


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the report."""
    times = row["time_ms"]
    ratio = f"{times['fla'] / times['flashqla']:.2f}" if "fla" in times else "-"
    shown = [f"{1000 * times[name]:.1f}" if name in times else "-" for name in CONTENDERS]
    return row["name"], *shown, ratio, f"{row['state_tb_per_s']:.2f}"
