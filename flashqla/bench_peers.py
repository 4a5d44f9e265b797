"""Rows and contenders of the GPU benchmark: this library, FLA, flash-qla and FlashInfer.

All of them get the same bfloat16 inputs with K = V = 128: packed sequences, an initial state given, a final state asked
for. `flashqla.bench_race` judges and times them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import flashqla
from flashqla import testing
from flashqla.operands import device_sm_count
from flashqla.plan import CHUNK_SIZE, Plan

OURS = "flashqla"
HEAD_DIM = 128

TABLE = (
    *("2/8 1x32768", "2/8 1x8192", "2/8 1x2048", "2/8 4x8192", "2/8 8x1024", "2/8 1x131072", "2/8 1x262144"),
    *("8/32 1x32768", "16/32 1x8192", "16/32 4x2048"),
    *("16/64 1x32768", "16/64 1x8192", "16/64 1x2048", "16/64 24576+8192", "16/64 4x8192", "16/64 8x1024"),
    *("4/16 1x32768", "8/24 1x32768", "16/48 1x32768", "16/16 1x32768", "32/32 1x32768"),
    *("4/8 1x32768", "2/4 1x32768"),
)
TRAINING_TABLE = (
    *("16/32 1x8192", "16/32 1x32768", "4/8 1x8192", "4/8 1x32768"),
    *("16/64 1x8192", "16/64 1x32768", "16/64 4x2048", "16/64 8x1024"),
    *("4/16 1x32768", "8/24 1x32768", "16/48 1x32768", "16/16 1x32768", "32/32 1x32768", "2/4 1x32768"),
    *("2/8 1x131072", "2/8 1x262144"),
)
TABLES = {"forward": TABLE, "backward": TRAINING_TABLE, "step": TRAINING_TABLE}
"""Names of the rows of each pass; a step is a forward and its backward."""

FLOPS_PER_MS, BYTES_PER_MS = 790e9, 4.3e9
"""What one H200 was measured to reach; the floors count with these."""


# ----------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Row:
    """One shape: query/key heads, value heads, and the lengths of the packed sequences."""

    heads: int
    value_heads: int
    lengths: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> Row:
        """The row called `name`, as in "2/8 1x32768" or "16/64 24576+2x4096"; ValueError when it is no such name."""
        number = "[1-9][0-9]*"
        run = f"(?:{number}x)?{number}"
        match = re.fullmatch(rf"({number})/({number}) ({run}(?:\+{run})*)", name)
        if not match or int(match[2]) % int(match[1]):
            raise ValueError(f"{name!r} is no row; rows are called like 2/8 4x8192 or 16/64 24576+8192")
        lengths = []
        for text in match[3].split("+"):
            count, _, length = text.rpartition("x")
            lengths += [int(length)] * int(count or 1)
        return cls(int(match[1]), int(match[2]), tuple(lengths))

    @property
    def name(self) -> str:
        """What :meth:`parse` reads."""
        runs = [(length, len(list(same))) for length, same in itertools.groupby(self.lengths)]
        texts = [f"{count}x{length}" if count > 1 or len(runs) == 1 else str(length) for length, count in runs]
        return f"{self.heads}/{self.value_heads} {'+'.join(texts)}"

    @property
    def tokens(self) -> int:
        """Of all sequences together."""
        return sum(self.lengths)

    @property
    def chunks(self) -> int:
        """Chunks of one head over all sequences."""
        return sum(-(-length // CHUNK_SIZE) for length in self.lengths)

    def floor_ms(self, direction: str) -> float:
        """The time that neither tensor cores nor memory allow to beat, by the fewest products and bytes known.

        The backward gets U of the forward and a checkpoint of the state every 16 chunks.
        """
        if direction == "step":
            return self.floor_ms("forward") + self.floor_ms("backward")
        chunk_heads = self.chunks * self.value_heads
        if direction == "backward":
            flops = 24.1e6 * chunk_heads
            traffic = CHUNK_SIZE * chunk_heads * (976 + 1024 * self.heads / self.value_heads)
        else:
            flops = 10.49e6 * chunk_heads
            per_token = 2 * HEAD_DIM * (2 * self.heads + 2 * self.value_heads) + 2 * 4 * self.value_heads
            traffic = self.tokens * per_token + 2 * 4 * len(self.lengths) * self.value_heads * HEAD_DIM**2
        return max(flops / FLOPS_PER_MS, traffic / BYTES_PER_MS)


def shared_inputs(rows: Sequence[Row], device: torch.device | str) -> testing.Inputs:
    """Inputs long enough for every one of the rows, which have the same heads: drawing the numbers takes a while."""
    tokens, sequences = max(row.tokens for row in rows), max(len(row.lengths) for row in rows)
    sizes = (1, tokens, rows[0].heads, rows[0].value_heads, HEAD_DIM, HEAD_DIM)
    return testing.inputs(*sizes, lengths=(0,) * sequences, dtype=torch.bfloat16, device=device)


def inputs_of(row: Row, shared: testing.Inputs) -> testing.Inputs:
    """The first tokens and states of the shared inputs, and the row's offsets (int32)."""
    per_token = {name: getattr(shared, name)[:, : row.tokens] for name in (*testing.PER_TOKEN, "do")}
    states = {name: getattr(shared, name)[: len(row.lengths)] for name in ("initial_state", "dht")}
    offsets = torch.tensor([0, *itertools.accumulate(row.lengths)], dtype=torch.int32, device=shared.q.device)
    return dataclasses.replace(shared, **per_token, **states, cu_seqlens=offsets)


# ----------------------------------------------------------------------------------------------------------- contenders

Run = Callable[[], tuple[Tensor, Tensor]]
"""One call: output `[1, T, HV, V]` and final state `[N, HV, K, V]`."""


def ours(made: testing.Inputs, lengths: Sequence[int], reuse_plan: bool = True) -> Run:
    """This library's kernels, never its reference; with a plan made beforehand, or one a call."""
    shapes = (made.q.shape, made.v.shape, made.cu_seqlens.shape)
    plan = Plan.build(*shapes, lengths, device_sm_count(made.q.device)) if reuse_plan else None
    arguments = made.arguments(output_final_state=True, backend="hopper", plan=plan)
    return lambda: flashqla.chunk_gated_delta_rule(**arguments)


def fla(made: testing.Inputs, lengths: Sequence[int]) -> Run:
    """The Triton kernels of flash-linear-attention, which would otherwise hand the call to flash-qla."""
    os.environ["FLA_FLASH_QLA"] = "0"
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    arguments = made.arguments(output_final_state=True, cu_seqlens=made.cu_seqlens.long())
    return lambda: chunk_gated_delta_rule(**arguments)


def flash_qla(made: testing.Inputs, lengths: Sequence[int]) -> Run:
    """The TileLang kernels of flash-qla."""
    from flash_qla import chunk_gated_delta_rule

    arguments = made.arguments(output_final_state=True, cu_seqlens=made.cu_seqlens.long())
    return lambda: chunk_gated_delta_rule(**arguments)


def flashinfer(made: testing.Inputs, lengths: Sequence[int]) -> Run:
    """The CuTe DSL kernels of FlashInfer: no batch axis, the decay instead of its logarithm, states `[N, HV, V, K]`."""
    if made.q.requires_grad:
        raise NotImplementedError("has no backward")
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    arguments = {name: getattr(made, name)[0] for name in testing.PER_TOKEN} | {
        "g": made.g[0].exp(),
        "initial_state": made.initial_state.mT.contiguous(),
        "output_final_state": True,
        "cu_seqlens": made.cu_seqlens.long(),
        "max_seqlen": max(lengths),
    }

    def run() -> tuple[Tensor, Tensor]:
        o, final_state = chunk_gated_delta_rule(**arguments)
        return o[None], final_state.mT

    return run


CONTENDERS = {OURS: ours, "fla": fla, "flash_qla": flash_qla, "flashinfer": flashinfer}
PEERS = tuple(CONTENDERS)[1:]
