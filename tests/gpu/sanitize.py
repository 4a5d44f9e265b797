"""Run small cases of the Hopper kernels under compute-sanitizer: python tests/gpu/sanitize.py [tool ...]

Needs an SM90 GPU and compute-sanitizer on PATH. Prints a line a tool; exit code 1 if one of them found something.
"""

import shutil
import subprocess
import sys

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CASE = """
import sys
import torch
from flashqla.hopper import pieces
pieces.LANES = int(sys.argv[1])
from flashqla import Plan, chunk_gated_delta_rule, testing
cases = ((2, 4), (65, 0, 1, 130), None, 0), ((1, 1), (200,), -5.0, 2), ((2, 8), (64, 3), 0.0, 0), ((1, 2), (250,), 0, 1)
for heads, lengths, gate, segment_chunks in cases:
    made = testing.inputs(1, sum(lengths) + 5, *heads, 128, 128, lengths=lengths, gate=gate, dtype=torch.bfloat16,
                          device="cuda").requires_grad()
    plan = Plan.build(made.q.shape, made.v.shape, made.cu_seqlens.shape, segment_chunks=segment_chunks)
    arguments = made.arguments(output_final_state=True, backend="hopper", use_qk_l2norm_in_kernel=True, plan=plan)
    results = chunk_gated_delta_rule(**arguments)
    wanted = [getattr(made, name) for name in (*testing.PER_TOKEN, "initial_state")]
    results += torch.autograd.grad(results, wanted, (made.do, made.dht))
    if sys.argv[2] == "read":
        assert all(result.isfinite().all() for result in results)
torch.cuda.synchronize()
"""


def main(tools: list[str]) -> int:
    if not shutil.which("compute-sanitizer"):
        print("sanitize: compute-sanitizer is not on PATH")
        return 2
    failed = False
    for tool in tools:
        # Only the kernels of this package: torch's own are not under test. initcheck does not see what TMA writes, so
        # that it would take any reader of the results for a reader of nothing.
        names = ("chunk_forward", "gated_inverse", "segment_states", "segment_scan", "segment_order")
        names += ("backward_chains", "backward_chunk")
        filters = [f"--kernel-name=kernel_substring={name}" for name in names]
        arguments = ["32" if tool == "racecheck" else "1", "skip" if tool == "initcheck" else "read"]
        command = ["compute-sanitizer", "--tool", tool, *filters, "--error-exitcode", "9", sys.executable, "-c", CASE]
        run = subprocess.run([*command, *arguments], capture_output=True, text=True)
        lines = (run.stdout + run.stderr).splitlines()
        summary = next((line for line in reversed(lines) if "SUMMARY" in line), lines[-1] if lines else "no output")
        print(f"{tool}: exit code {run.returncode}; {summary.strip('= ')}")
        if run.returncode:
            failed = True
            print("\n".join(lines[:40]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(TOOLS)))
