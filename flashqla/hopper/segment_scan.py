"""Segment scan: from the local end states of `segment_states` to the true ones, in place.

Inputs, by the number of the segment (segments.cuh)
    transitions  [segments, HV, K, K]   fp16: M - gamma I transposed
    decays       [segments, HV]         fp32: gamma; 0: the state is true already
    cu_seqlens   [N + 1]                int32, on the device
    segment_chunks   int32: chunks of a segment
In and out
    states       [segments, HV, V, K]   fp32, transposed: N, becomes S_end; of all but a sequence's last segment
Definition
    S_end = N + gamma S_start + (M - gamma I) S_start, S_start = S_end of the segment before (eq. 7.3). Only the last
    product is rounded: S to fp16, after a scale that brings the largest element of a quarter column to 1.

Grid: N * HV * V / 16 CTAs: state columns are independent, and the fewer a CTA has, the shorter its step. Most find
nothing to do: heads that decay, sequences of one or two segments.
Roles: four warps, each with a quarter of the rows of the state; mma.sync, one barrier a step. The matrices come by
cp.async three steps ahead, N one step ahead. The routine is CUDA, in segment_scan.cuh.
Shared memory, K = 128: four stages of a matrix (32 KB), the shared state, decays: 141 KB.
"""

from pathlib import Path

import tilelang.language as T

from .pieces import PASS_CONFIGS

__all__ = ["PASS_CONFIGS", "build"]
THREADS = 128
ROWS = 16  # state columns of a CTA
STAGES = 4
SOURCE = Path(__file__).with_suffix(".cuh").read_text()


def shared_bytes(head_dim: int) -> int:
    """Of `Shared<K>` in segment_scan.cuh."""
    return 2 * STAGES * head_dim**2 + 2 * 2 * ROWS * (head_dim + 8) + 4 * 2 * 4 * ROWS + 4 * 1024


def build(head_dim_k: int = 128, head_dim_v: int = 128):
    """The kernel as a TileLang PrimFunc.

    Args:
        head_dim_k, head_dim_v: K and V, 64 or 128.
    """
    DK, DV = head_dim_k, head_dim_v
    blocks = DV // ROWS
    f32, i32 = "float32", "int32"
    HV, N_plus_1, segments = T.dynamic("HV, N_plus_1, segments")

    @T.prim_func
    def segment_scan(
        states: T.Tensor((segments, HV, DV, DK), f32),
        transitions: T.Tensor((segments, HV, DK, DK), "float16"),
        decays: T.Tensor((segments, HV), f32),
        cu_seqlens: T.Tensor((N_plus_1,), i32),
        segment_chunks: T.int32,
    ):
        with T.Kernel((N_plus_1 - 1) * HV * blocks, threads=THREADS) as block:
            T.import_source(SOURCE)
            memory = T.alloc_shared((shared_bytes(DK),), "uint8")
            i_n = T.alloc_var(i32)
            i_h = T.alloc_var(i32)
            i_n = T.truncdiv(block, HV * blocks)
            i_h = T.truncdiv(block - i_n * (HV * blocks), blocks)
            T.pdl_trigger()
            T.pdl_sync()
            T.evaluate(
                T.call_extern(
                    "handle", f"segment_scan::run<{DK}>", T.address_of(states[0, 0, 0, 0]),
                    T.address_of(transitions[0, 0, 0, 0]), T.address_of(decays[0, 0]), T.address_of(cu_seqlens[0]),
                    N_plus_1 - 1, HV, DV, segment_chunks, i_n, i_h,
                    (block - i_n * (HV * blocks) - i_h * blocks) * ROWS,
                    T.access_ptr(memory[0], "rw", shared_bytes(DK)),
                )
            )  # fmt: skip

    return segment_scan
