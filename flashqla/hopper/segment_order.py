"""Segment order: which chunks the local state of every segment and head needs, and who goes first.

Inputs
    gates        [slots, HV, 2, 64]    fp32, of `gated_inverse`: log2 decay summed over the chunk (G), log2 key scale
    cu_seqlens   [N + 1]               int32, on the device
    threshold    fp32: log2 decay below which what came before it is forgotten; -inf: never
    segment_chunks   int32: chunks of a segment
Outputs, by the number of the segment (segments.cuh)
    needed       [segments, HV]    int32: how many of a segment's last chunks (eq. 7.4); segment_chunks + 1: all, and
                                   the transition; 0 for a sequence's last segment
    decays       [segments, HV]    fp32: gamma of the segment where its transition counts, else 0: in a sequence's first
                                   segment, and where the decay is below the threshold
    order        [segments * HV]   int32: segment * HV + head of those that need something, whole segments first: each
                                   of their thread blocks finds a multiprocessor of its own; then -1
Definition
    Eq. 7.4, walking back from the end of a segment over the decays of its chunks; a chunk outside of its conditions,
    which `gated_inverse` marks, makes the segment an exact one.

Grid: one CTA of 512 threads, a segment and head each. The routine is CUDA, in segments.cuh.
"""

import tilelang.language as T

from .pieces import CHUNK_SIZE, PASS_CONFIGS, SEGMENTS

__all__ = ["PASS_CONFIGS", "build"]
THREADS = 512


def build():
    """The kernel as a TileLang PrimFunc; it has no variants."""
    f32, i32 = "float32", "int32"
    HV, N_plus_1, slots, segments, pairs = T.dynamic("HV, N_plus_1, slots, segments, pairs")

    @T.prim_func
    def segment_order(
        gates: T.Tensor((slots, HV, 2, CHUNK_SIZE), f32),
        cu_seqlens: T.Tensor((N_plus_1,), i32),
        needed: T.Tensor((segments, HV), i32),
        decays: T.Tensor((segments, HV), f32),
        order: T.Tensor((pairs,), i32),
        threshold: T.float32,
        segment_chunks: T.int32,
    ):
        with T.Kernel(1, threads=THREADS):
            T.import_source(SEGMENTS)
            T.pdl_sync()
            T.pdl_trigger()  # not before: the next kernel's long blocks shall find all multiprocessors empty
            T.evaluate(
                T.call_extern(
                    "handle", f"segments::sort<{THREADS}>", T.address_of(cu_seqlens[0]), N_plus_1 - 1, segments, HV,
                    segment_chunks, T.address_of(gates[0, 0, 0, 0]), threshold, T.address_of(needed[0, 0]),
                    T.address_of(decays[0, 0]), T.address_of(order[0]),
                )
            )  # fmt: skip

    return segment_order
