"""Recipes RR: determinism, invariance, torch.compile, import hygiene."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flashqla import chunk_gated_delta_rule
from flashqla.testing import compare, inputs, outcome

DIMS = {"heads": 2, "value_heads": 4, "head_dim_k": 64, "head_dim_v": 64, "recipe": "faults"}
PER_TOKEN = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("tokens, lengths", [(64, None), (33, None), (300, (63, 1, 0, 136, 100))])
def test_rr2_repeat(device, dtype, poisoned, tokens, lengths):
    made = inputs(tokens=tokens, lengths=lengths, dtype=dtype, device=device, **DIMS)
    first = outcome(chunk_gated_delta_rule, made)
    for _ in range(20 if device.type == "cpu" else 1000):
        again = outcome(chunk_gated_delta_rule, made)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_rr3_batch_invariance(device, dtype, poisoned):
    made = inputs(batch=8, tokens=150, dtype=dtype, device=device, **DIMS)
    batch_o, batch_state = chunk_gated_delta_rule(**made.arguments(output_final_state=True))
    limit = 1e-13 if dtype == torch.float64 else 1e-3
    for index in (0, 3, 7):
        alone = {name: getattr(made, name)[index : index + 1] for name in (*PER_TOKEN, "initial_state")}
        o, state = chunk_gated_delta_rule(**alone, output_final_state=True)
        assert compare(batch_o[index : index + 1], o).relative_l2 <= limit
        assert compare(batch_state[index : index + 1], state).relative_l2 <= limit


@pytest.mark.parametrize("cut", [64, 100, 128])
def test_rr3_cut_invariance(device, dtype, rerun_limit, poisoned, cut):
    made = inputs(tokens=150, dtype=dtype, device=device, **DIMS)
    o, state = chunk_gated_delta_rule(**made.arguments(output_final_state=True))
    parts, carried = [], made.initial_state
    for rows in (slice(0, cut), slice(cut, 150)):
        part = {name: getattr(made, name)[:, rows] for name in PER_TOKEN}
        part_o, carried = chunk_gated_delta_rule(**part, initial_state=carried, output_final_state=True)
        parts.append(part_o)
    assert compare(torch.cat(parts, 1), o).relative_l2 <= rerun_limit
    assert compare(carried, state).relative_l2 <= rerun_limit


@pytest.mark.parametrize("lengths", [False, True], ids=["dense", "packed"])
def test_rr7_compile(device, lengths):
    """One graph, few recompilations over five lengths, the same values and gradients as without."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend=counter)
    for tokens in (64, 65, 130, 200, 333):
        pieces = (tokens - 40, 0, 30) if lengths else None
        made = inputs(tokens=tokens, lengths=pieces, device=device, **DIMS)
        mine, expected = outcome(compiled, made), outcome(chunk_gated_delta_rule, made)
        assert all(torch.equal(mine[name], expected[name]) for name in expected)
    assert counter.frame_count <= 2


ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def test_rr10_import_without_gpu():
    script = (
        "import flashqla, torch\n"
        "ok, reasons = flashqla.is_supported()\n"
        "assert not ok and reasons, (ok, reasons)\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(reasons[0])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "CUDA device" in ran.stdout


def _use_in_child(queue) -> None:
    made = inputs(tokens=8, **DIMS)
    queue.put(float(chunk_gated_delta_rule(**made.arguments())[0].double().norm()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_rr10_use_after(method):
    script = (
        "import multiprocessing, sys\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_runtime import _use_in_child\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    queue = context.SimpleQueue()\n"
        "    child = context.Process(target=_use_in_child, args=(queue,))\n"
        "    child.start(); print(queue.get()); child.join(); sys.exit(child.exitcode)\n"
    )
    assert method in multiprocessing.get_all_start_methods()
    ran = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) > 0
