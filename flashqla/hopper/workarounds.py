"""Corrections to TileLang 0.1.15, each with what goes wrong without it."""

from tilelang.cuda.intrinsics.macro.wgmma_macro_generator import TensorCoreIntrinEmitter


def count_accumulators_per_warpgroup() -> None:
    """Let the accumulator fence of a wgmma name the registers of one warpgroup.

    TileLang counts those of all warpgroups of a gemm. With two, the fence reads past the end of the fragment, which
    costs registers, and ptxas then serialises the wgmmas (C7512).
    """

    def registers(emitter) -> int:
        return emitter.wgmma_num_inst_m * emitter.warp_cols * emitter.local_size_out

    TensorCoreIntrinEmitter.wgmma_accum_regs = property(registers)
