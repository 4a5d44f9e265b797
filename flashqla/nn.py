"""Layers made of the gated delta rule: `GatedDeltaNet` and a small `LanguageModel` of it.

The layer is the one of Gated DeltaNet (arXiv 2412.06464) as Qwen3-Next and Qwen3.5 run it:

    q, k, v = SiLU(causal depthwise convolution(x W_qkv))       short: 4 tokens
    g       = -exp(A_log) * softplus(x W_a + dt_bias)           eq. 2.3, in float32
    beta    = sigmoid(x W_b)                                    eq. 2.5
    o       = gated delta rule(l2norm(q), l2norm(k), v, g, beta)   eq. 1.1 to 1.3, 2.4
    y       = (RMSNorm(o) * SiLU(x W_z)) W_out

Parameters bear Qwen3.5's names and shapes (`in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`, `conv1d`, `A_log`,
`dt_bias`, `norm`, `out_proj`).

Everything runs on three layouts with one code path: dense `[B, T, D]`, packed `[1, T, D]` with `cu_seqlens`, and one
token a sequence (`step`). A state handed from one call to the next makes them continue each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashqla.api import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

__all__ = ["GatedDeltaNet", "LanguageModel", "LayerState", "ModelConfig", "RMSNormGated", "causal_convolution"]


class LayerState(NamedTuple):
    """What one layer remembers of N sequences: enough to continue them token by token.

    convolution: `[N, width - 1, channels]`, the last inputs of the convolution, oldest first, in the layer's dtype.
    delta:       `[N, HV, K, V]`, the state S of eq. 1.1, float32.
    """

    convolution: Tensor
    delta: Tensor


def causal_convolution(
    x: Tensor, weight: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution that never looks across the boundary of a sequence.

    y_t = sum_i weight[i] * x_{t - (width - 1) + i}, where tokens before the first one come from `state` (or are 0).

    Args:
        x: `[B, T, D]`; with `cu_seqlens`, B = 1 and the sequences lie one after another.
        weight: `[D, 1, width]`, as `nn.Conv1d` stores a depthwise kernel.
        state: `[N, width - 1, D]`, the inputs before the first token of each sequence, oldest first. N is B, or
            `len(cu_seqlens) - 1`.
        cu_seqlens: `[N + 1]` integer boundaries; tokens after the last one are padding and yield 0.
    Returns:
        y `[B, T, D]` in x's dtype (summed in float32 at least), and the state after the last token.
    """
    batch, length, channels = x.shape
    memory = weight.shape[-1] - 1
    if cu_seqlens is None:
        cu_seqlens = torch.arange(batch + 1, device=x.device) * length
    cu_seqlens = cu_seqlens.to(torch.int64)
    num_sequences = cu_seqlens.numel() - 1
    if state is None:
        state = x.new_zeros(num_sequences, memory, channels)

    # All inputs in one list of rows: row 0 is zero, then `memory` remembered rows a sequence, then the tokens.
    rows = torch.cat([x.new_zeros(1, channels), state.to(x.dtype).flatten(0, 1), x.flatten(0, 1)])
    first_token = 1 + num_sequences * memory

    token = torch.arange(batch * length, device=x.device)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    padding = sequence >= num_sequences
    sequence = sequence.clamp(max=num_sequences - 1)
    position = token - cu_seqlens[sequence]
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(batch * length, channels, dtype=compute_dtype, device=x.device)
    for i in range(memory + 1):
        delay = memory - i
        remembered = 1 + sequence * memory + memory + position - delay
        source = torch.where(position >= delay, first_token + token - delay, remembered)
        tap = rows.index_select(0, source.masked_fill(padding, 0))
        y = y + tap.to(compute_dtype) * weight[:, 0, i].to(compute_dtype)

    last = torch.arange(-memory, 0, device=x.device)  # the rows that the next call must remember
    position = cu_seqlens.diff()[:, None] + last
    remembered = 1 + torch.arange(num_sequences, device=x.device)[:, None] * memory + memory + position
    source = torch.where(position >= 0, first_token + cu_seqlens[:-1, None] + position, remembered)
    new_state = rows.index_select(0, source.flatten()).view(num_sequences, memory, channels)
    return y.view(batch, length, channels).to(x.dtype), new_state


class RMSNormGated(nn.Module):
    """RMSNorm over the last dimension, then times SiLU(gate); computed in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = F.rms_norm(wide, (wide.shape[-1],), self.weight.to(wide.dtype), self.eps)
        return (normed * F.silu(gate.to(wide.dtype))).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """The Gated DeltaNet token mixer; the module's docstring has its equations.

    Args:
        hidden_size: width D of the residual stream.
        num_heads, num_value_heads: H query/key heads and HV value heads, HV a multiple of H.
        head_dim_k, head_dim_v: K and V.
        conv_kernel_size: tokens that the convolution sees.
        backend: as in `flashqla.chunk_gated_delta_rule`.

    Keep the parameters in float32 and use `torch.autocast` for mixed precision: A_log and dt_bias must not be rounded.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_value_heads: int | None = None,
        head_dim_k: int = 128,
        head_dim_v: int = 128,
        conv_kernel_size: int = 4,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ):
        super().__init__()
        num_value_heads = num_heads if num_value_heads is None else num_value_heads
        if num_heads < 1 or num_value_heads % num_heads:
            raise ValueError(f"num_value_heads must be a multiple of num_heads={num_heads}, was {num_value_heads}")
        if conv_kernel_size < 1:
            raise ValueError(f"conv_kernel_size must be at least 1, was {conv_kernel_size}")
        self.num_heads, self.num_value_heads = num_heads, num_value_heads
        self.head_dim_k, self.head_dim_v = head_dim_k, head_dim_v
        self.backend = backend
        self.key_size, self.value_size = num_heads * head_dim_k, num_value_heads * head_dim_v
        channels = 2 * self.key_size + self.value_size

        self.in_proj_qkv = nn.Linear(hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden_size, self.value_size, bias=False)
        self.in_proj_b = nn.Linear(hidden_size, num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden_size, num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, conv_kernel_size, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads))
        self.norm = RMSNormGated(head_dim_v, norm_eps)
        self.out_proj = nn.Linear(self.value_size, hidden_size, bias=False)
        self.reset_gate()

    @torch.no_grad()
    def reset_gate(self) -> None:
        """Draw A from (0, 16) and the step size softplus(dt_bias) log-uniformly from [0.001, 0.1], as Mamba-2 does."""
        self.A_log.copy_(torch.empty_like(self.A_log).uniform_(1e-3, 16).log())
        step_size = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(step_size + torch.log(-torch.expm1(-step_size)))  # the inverse of softplus

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        state: LayerState | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, LayerState | None]:
        """Mix whole sequences.

        Args:
            x: `[B, T, D]`; with `cu_seqlens`, `[1, T, D]`.
            cu_seqlens: `[N + 1]` boundaries of packed sequences.
            state: what an earlier call returned for these N sequences; they continue from there.
            return_state: whether the state after the last token is wanted.
        Returns:
            y `[B, T, D]` and the state, or None when not asked for.
        """
        return self._mix(chunk_gated_delta_rule, x, cu_seqlens, state, return_state)

    def step(self, x: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """One token of each sequence, x `[N, D]` -> y `[N, D]`, by the recurrence itself (eq. 1.1 to 1.3)."""
        y, state = self._mix(fused_recurrent_gated_delta_rule, x[:, None], None, state, True)
        return y[:, 0], cast(LayerState, state)

    def _mix(
        self, rule: Callable, x: Tensor, cu_seqlens: Tensor | None, state: LayerState | None, return_state: bool
    ) -> tuple[Tensor, LayerState | None]:
        convolution, delta = (None, None) if state is None else state
        qkv, convolution = causal_convolution(self.in_proj_qkv(x), self.conv1d.weight, convolution, cu_seqlens)
        q, k, v = F.silu(qkv).split([self.key_size, self.key_size, self.value_size], dim=-1)
        o, delta = rule(
            q.unflatten(-1, (self.num_heads, self.head_dim_k)),
            k.unflatten(-1, (self.num_heads, self.head_dim_k)),
            v.unflatten(-1, (self.num_value_heads, self.head_dim_v)),
            g=self.in_proj_a(x),
            beta=self.in_proj_b(x),
            initial_state=delta,
            output_final_state=return_state,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        z = self.in_proj_z(x).unflatten(-1, (self.num_value_heads, self.head_dim_v))
        y = self.out_proj(self.norm(o, z).flatten(-2))
        return y, LayerState(convolution, delta) if return_state else None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a `LanguageModel`. The defaults are a byte model that two CPU cores can train."""

    vocab_size: int = 256
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 2
    num_value_heads: int = 4
    head_dim_k: int = 32
    head_dim_v: int = 32
    mlp_size: int = 256
    conv_kernel_size: int = 4


class SwiGLU(nn.Module):
    """The feed-forward part of a block: (SiLU(x W_gate) * x W_up) W_down."""

    def __init__(self, hidden_size: int, mlp_size: int):
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * mlp_size, bias=False)
        self.down_proj = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """x + GatedDeltaNet(RMSNorm(x)), then x + SwiGLU(RMSNorm(x))."""

    def __init__(self, config: ModelConfig, backend: str):
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.mixer = GatedDeltaNet(
            config.hidden_size,
            config.num_heads,
            config.num_value_heads,
            config.head_dim_k,
            config.head_dim_v,
            config.conv_kernel_size,
            backend=backend,
        )
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.mlp = SwiGLU(config.hidden_size, config.mlp_size)

    def forward(self, x: Tensor, **options) -> tuple[Tensor, LayerState | None]:
        return self._add(x, *self.mixer(self.mixer_norm(x), **options))

    def step(self, x: Tensor, state: LayerState | None) -> tuple[Tensor, LayerState]:
        y, state = self._add(x, *self.mixer.step(self.mixer_norm(x), state))
        return y, cast(LayerState, state)

    def _add(self, x: Tensor, mixed: Tensor, state: LayerState | None) -> tuple[Tensor, LayerState | None]:
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, and a head tied to the embedding.

    `forward` reads whole sequences (training, prefill), `step` one token of each (decoding); both return logits and
    a state for the other to continue from: a list with one `LayerState` a layer.
    """

    def __init__(self, config: ModelConfig | None = None, backend: str = "auto"):
        super().__init__()
        self.config = config or ModelConfig()
        self.embedding = nn.Embedding(self.config.vocab_size, self.config.hidden_size)
        self.blocks = nn.ModuleList(Block(self.config, backend) for _ in range(self.config.num_layers))
        self.norm = nn.RMSNorm(self.config.hidden_size, eps=1e-6)
        nn.init.normal_(self.embedding.weight, std=0.02)  # the head shares it: the first loss is log(vocab_size)

    def forward(
        self,
        tokens: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        state: list[LayerState] | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, list[LayerState] | None]:
        """tokens `[B, T]` (or `[1, T]` with `cu_seqlens`) -> logits `[B, T, vocab_size]`, state or None."""

        def read(block: Block, x: Tensor, layer_state: LayerState | None) -> tuple[Tensor, LayerState | None]:
            return block(x, cu_seqlens=cu_seqlens, state=layer_state, return_state=return_state)

        logits, new_state = self._through(read, tokens, state)
        return logits, new_state if return_state else None

    def step(self, tokens: Tensor, state: list[LayerState] | None = None) -> tuple[Tensor, list[LayerState]]:
        """tokens `[N]`, one a sequence -> logits `[N, vocab_size]`, state."""
        return self._through(Block.step, tokens, state)

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, *, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Prefill the prompt `[N, T]` (T > 0), then decode for ever.

        Yields the next tokens `[N]` and the logits `[N, vocab_size]` that they were drawn from.
        Temperature 0 takes the likeliest token; otherwise `generator` makes the draw repeatable.
        """
        logits, state = self(prompt, return_state=True)
        logits = logits[:, -1]
        while True:
            if temperature == 0:
                tokens = logits.argmax(-1)
            else:
                chances = torch.softmax(logits.float() / temperature, dim=-1)
                tokens = torch.multinomial(chances, 1, generator=generator)[:, 0]
            yield tokens, logits
            logits, state = self.step(tokens, state)

    def _through(self, run: Callable, tokens: Tensor, state: list[LayerState] | None) -> tuple[Tensor, list]:
        """Logits of `tokens` after `run(block, x, layer_state)` of every block, and the new states."""
        x, new_state = self.embedding(tokens), []
        states: Sequence[LayerState | None] = state or [None] * len(self.blocks)
        for block, layer_state in zip(self.blocks, states, strict=True):
            x, layer_state = run(block, x, layer_state)
            new_state.append(layer_state)
        return F.linear(self.norm(x), self.embedding.weight), new_state
