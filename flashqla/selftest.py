"""`python -m flashqla selftest`: forward and backward against float64, over a table of cases, on the device at hand.

Each case makes inputs with `flashqla.testing.inputs`, calls `flashqla.chunk_gated_delta_rule` with gradients on the
device, and compares every result with the float64 token loop under autograd (`flashqla.testing.oracle64`).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import flashqla
from flashqla import testing
from flashqla.console import UserError, environment, pick_device, table, write_json

LIMITS = {
    torch.float64: (1e-11, 1e-10),
    torch.float32: (1e-5, 1e-4),
    torch.float16: (1e-2, 2e-2),
    torch.bfloat16: (1e-2, 2e-2),
}
"""Largest relative L2 of any forward result, and of any gradient, by dtype."""

FLOOR = 1e-3
"""A tensor whose root mean square is smaller is judged as if it were this: behind exp(-20), gradients are noise."""


@dataclass(frozen=True)
class Case:
    """One row of the table: sizes and values for `testing.inputs`, and flags for the call.

    A share `resets` of the tokens has a log decay of -300, which forgets the state. With `lengths` the sequences are
    packed, and `tokens` beyond their sum are padding full of NaN. A gate, l2norm or beta activation inside the call
    gets raw inputs instead of finished ones.
    """

    name: str
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    tokens: int = 150
    heads: tuple[int, int] = (2, 4)
    head_dims: tuple[int, int] = (128, 128)
    lengths: tuple[int, ...] | None = None
    recipe: str = "bench"
    gate: float | None = None
    initial_state: bool = True
    flags: dict[str, bool] = field(default_factory=dict)
    scale: float | None = None
    resets: float = 0.0
    seed: int = 0

    def arguments(self, device: torch.device) -> tuple[dict[str, Any], list[Tensor]]:
        """Arguments of the call (leaves where gradients are due) and the gradients of its two results."""
        made = testing.inputs(
            self.batch,
            self.tokens,
            *self.heads,
            *self.head_dims,
            recipe=self.recipe,
            gate=self.gate,
            lengths=self.lengths,
            initial_state=self.initial_state,
            dtype=self.dtype,
            seed=self.seed,
        )
        arguments = made.arguments(output_final_state=True, scale=self.scale, **self.flags)
        dht = made.dht
        generator = torch.Generator().manual_seed(self.seed + 1)
        if self.resets:
            arguments["g"][torch.rand(made.g.shape, generator=generator) < self.resets] = -300.0
        value_heads = self.heads[1]
        if self.flags.get("use_qk_l2norm_in_kernel"):
            arguments["q"], arguments["k"] = 3 * arguments["q"], 5 * arguments["k"]
        if self.flags.get("use_gate_in_kernel"):
            arguments["g"] = torch.randn(made.g.shape, generator=generator, dtype=made.g.dtype)
            arguments["A_log"] = torch.linspace(-3, 2, value_heads, dtype=made.g.dtype)
            arguments["dt_bias"] = torch.randn(value_heads, generator=generator, dtype=made.g.dtype)
        if self.flags.get("use_beta_sigmoid_in_kernel"):
            arguments["beta"] = torch.randn(made.beta.shape, generator=generator, dtype=made.beta.dtype)
        if self.flags.get("state_v_first"):
            dht = dht.mT.contiguous()
            if made.initial_state is not None:
                arguments["initial_state"] = made.initial_state.mT.contiguous()
        if self.lengths is not None:
            for name in testing.PER_TOKEN:
                arguments[name][:, sum(self.lengths) :] = torch.nan
        moved = {
            name: value.detach().to(device).requires_grad_(value.is_floating_point())
            if isinstance(value, Tensor)
            else value
            for name, value in arguments.items()
        }
        return moved, [made.do.to(device), dht.to(device)]


def _flags(*names: str) -> dict[str, bool]:
    return dict.fromkeys(names, True)


L2NORM, GATE, BETA = "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"
NEGATIVE, V_FIRST = "allow_neg_eigval", "state_v_first"
RAGGED = (0, 73, 1, 0, 46, 20)
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64

QUICK = [
    Case("dense"),
    Case("packed, empty sequences, padding", lengths=RAGGED),
    Case("everything in the op, packed", lengths=RAGGED, flags=_flags(L2NORM, GATE, BETA, NEGATIVE, V_FIRST)),
    Case("float16", HALF),
    Case("float32", SINGLE, head_dims=(64, 64)),
    Case("float64, packed", DOUBLE, lengths=RAGGED, head_dims=(64, 64)),
]
"""The cases of the demo."""

CASES = [
    *QUICK,
    Case("1 token", tokens=1),
    Case("63 tokens", tokens=63),
    Case("64 tokens: one chunk", tokens=64),
    Case("65 tokens", tokens=65),
    Case("batch of 3", batch=3, tokens=100),
    Case("no initial state", initial_state=False),
    Case("as many value heads", heads=(2, 2)),
    Case("3 value heads a key head", heads=(2, 6)),
    Case("7 value heads on one", heads=(1, 7), tokens=100),
    Case("K = V = 64", head_dims=(64, 64)),
    Case("K = 64, V = 128", head_dims=(64, 128)),
    Case("K = 128, V = 64", head_dims=(128, 64)),
    Case("K = 48, V = 80", head_dims=(48, 80)),
    Case("40 sequences of 1 to 5", lengths=(1, 2, 3, 4, 5) * 8),
    Case("whole chunks, packed", tokens=192, lengths=(64, 128)),
    Case("packed without initial state", lengths=RAGGED, initial_state=False),
    Case("no decay", gate=0.0),
    Case("decay exp(-1) a token", gate=-1.0),
    Case("decay exp(-5) a token", gate=-5.0),
    Case("decay exp(-20) a token", gate=-20.0),
    Case("correlated keys", recipe="correlated"),
    Case("correlated keys, no decay", recipe="correlated", gate=0.0),
    Case("l2norm in the op", flags=_flags(L2NORM)),
    Case("gate in the op", flags=_flags(GATE)),
    Case("beta in the op", flags=_flags(BETA)),
    Case("beta up to 2", flags=_flags(L2NORM, BETA, NEGATIVE)),
    Case("states [V, K]", flags=_flags(V_FIRST)),
    Case("float16, correlated keys", HALF, recipe="correlated"),
    Case("float16, exp(-5) a token", HALF, gate=-5.0),
    Case("float32, K = 48, V = 80", SINGLE, head_dims=(48, 80), lengths=RAGGED),
    Case("float64, everything in the op", DOUBLE, head_dims=(32, 48), flags=_flags(L2NORM, GATE, BETA, V_FIRST)),
    Case("15 tokens", tokens=15),
    Case("128 tokens: two chunks", tokens=128),
    Case("129 tokens", tokens=129),
    Case("600 tokens", tokens=600, heads=(1, 2)),
    Case("3 sequences around a chunk", lengths=(63, 64, 23)),
    Case("one long, many short", tokens=230, lengths=(150, *[5] * 16)),
    Case("60 sequences of 1", tokens=60, lengths=(1,) * 60),
    Case("one token among empty sequences", tokens=9, lengths=(0, 1, 0)),
    Case("batch of 4 short ones", batch=4, tokens=33, heads=(1, 4)),
    Case("4 value heads a key head", heads=(1, 4)),
    Case("8 value heads a key head", heads=(1, 8), tokens=80),
    Case("1 head", heads=(1, 1)),
    Case("weak decay, exp(-1e-4) a token", gate=-1e-4, tokens=300, heads=(1, 2)),
    Case("decay exp(-0.3) a token", gate=-0.3),
    Case("hard resets", resets=0.05),
    Case("hard resets, no other decay", resets=0.02, gate=0.0, tokens=300, heads=(1, 2)),
    Case("hard resets, packed", resets=0.1, lengths=RAGGED),
    Case("scale 1", scale=1.0),
    Case("scale 0.5, states [V, K]", scale=0.5, flags=_flags(V_FIRST)),
    Case("recipe of the faults", recipe="faults"),
    Case("float16, packed", HALF, lengths=RAGGED),
    Case("float16, everything in the op", HALF, flags=_flags(L2NORM, GATE, BETA, NEGATIVE)),
    Case("float16, K = V = 64", HALF, head_dims=(64, 64)),
    Case("float32, hard resets", SINGLE, head_dims=(64, 64), resets=0.05),
]
"""The whole table."""


def main(arguments: argparse.Namespace) -> int:
    """The command; arguments as `flashqla.cli` defines them. Returns 1 when a limit is broken."""
    if arguments.fuzz is not None:
        from flashqla import fuzz

        return fuzz.main(arguments)
    device = pick_device(arguments.device)
    cases = [case for case in CASES if arguments.only in case.name]
    if not cases:
        raise UserError(f"--only {arguments.only!r} matches none of {[case.name for case in CASES]}")
    rows = run(cases, device, arguments.backend)
    if arguments.json:
        write_json(arguments.json, {"env": environment(device), "backend": arguments.backend, "rows": rows})
    return 0 if report(rows) else 1


def run(cases: Iterable[Case], device: torch.device, backend: str = "auto") -> list[dict[str, Any]]:
    """Run the cases; one row of JSON-ready results each. On one CPU thread: tokens are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = tqdm(list(cases), unit="case", leave=False, dynamic_ncols=True)
        return [judge(case, device, backend) for case in cases]
    finally:
        torch.set_num_threads(threads)


def judge(
    case: Case, device: torch.device, backend: str = "auto", oracle: Callable = testing.oracle64
) -> dict[str, Any]:
    """Run one case: every result's error against the oracle in float64, the limits, and whether they hold. A refused
    call counts as a failure."""
    arguments, gradients = case.arguments(device)
    row = {"name": case.name, "dtype": str(case.dtype).removeprefix("torch."), "case": describe(case)}
    forward_limit, backward_limit = LIMITS[case.dtype]
    try:
        supported, reasons = flashqla.is_supported(**arguments, backend="hopper")
        row |= {"hopper": supported, "hopper_refusals": reasons}
        mine = results(flashqla.chunk_gated_delta_rule, arguments | {"backend": backend}, gradients)
    except (TypeError, ValueError, NotImplementedError) as error:
        return row | {"ok": False, "refused": str(error)}
    expected = results(oracle, *exact(case, arguments, gradients))

    errors = {name: measure(tensor, expected[name]) for name, tensor in mine.items()}
    forward = {name: error["error"] for name, error in errors.items() if not name.startswith("d_")}
    backward = {name: error["error"] for name, error in errors.items() if name.startswith("d_")}
    ok = max(forward.values()) <= forward_limit and max(backward.values()) <= backward_limit
    ok = ok and not any(error["disagreements"] for error in errors.values())
    return row | {
        "ok": ok,
        "forward": max(forward.values()),
        "forward_limit": forward_limit,
        "backward": max(backward.values()),
        "backward_limit": backward_limit,
        "worst_gradient": max(backward, key=backward.get),
        "errors": errors,
    }


def describe(case: Case) -> dict[str, Any]:
    """The case as JSON."""
    return {**dataclasses.asdict(case), "dtype": str(case.dtype)}


def exact(case: Case, arguments: dict[str, Any], gradients: Sequence[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    """The same call in float64 on the CPU, with fresh leaves; padding, which no call may read, becomes zero."""

    def widen(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach().cpu()
        return value.double().nan_to_num(nan=0.0).requires_grad_() if value.is_floating_point() else value

    return {name: widen(value) for name, value in arguments.items()}, [g.cpu().double() for g in gradients]


def results(rule: Callable, arguments: dict[str, Any], gradients: Sequence[Tensor]) -> dict[str, Tensor]:
    """Output and final state, and as "d_" + name the gradient of every floating-point argument."""
    o, final_state = rule(**arguments)
    leaves = {name: leaf for name, leaf in arguments.items() if isinstance(leaf, Tensor) and leaf.requires_grad}
    found = torch.autograd.grad([o, final_state], list(leaves.values()), gradients)
    return {"o": o, "final_state": final_state} | {
        "d_" + name: gradient for name, gradient in zip(leaves, found, strict=True)
    }


def measure(mine: Tensor, expected: Tensor) -> dict[str, Any]:
    """Relative L2 with the FLOOR, the worst element, and how many elements are NaN or infinite in one of them alone."""
    comparison = testing.compare(mine, expected)
    error, size, floor = comparison.relative_l2, expected.norm().item(), FLOOR * expected.numel() ** 0.5
    if size < floor:
        difference = mine.detach().to("cpu", torch.float64).nan_to_num() - expected
        error = difference.norm().item() / floor
    return {"error": error, "worst": comparison.worst, "disagreements": comparison.disagreements}


def report(rows: Sequence[dict[str, Any]]) -> bool:
    """Print the table; True when every row is within its limits."""
    header = ("case", "dtype", "forward", "limit", "backward", "limit", "worst", "verdict")
    lines, refusals = [], []
    for row in rows:
        if "refused" in row:
            lines.append((row["name"], row["dtype"], *["-"] * 5, "REFUSED"))
            refusals.append(f"{row['name']}: {row['refused']}")
            continue
        numbers = (f"{row[key]:.1e}" for key in ("forward", "forward_limit", "backward", "backward_limit"))
        verdict = "ok" if row["ok"] else "FAILED"
        lines.append((row["name"], row["dtype"], *numbers, row["worst_gradient"], verdict))
    print(table(header, lines))
    print(*refusals, sep="\n", end="\n" if refusals else "")
    passed = sum(row["ok"] for row in rows)
    print(f"{passed} of {len(rows)} cases within their limits (relative L2 against float64)")
    return passed == len(rows)
