"""The definition: the Gated Delta Rule one token at a time (derivations, eqs. 1.1 to 1.3)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashqla.reference.layout import Layout, compute_dtype, without_autocast


class Result(NamedTuple):
    """Outputs of a forward reference.

    output: `[B,T,HV,V]`, dtype of q; 0 for tokens that belong to no sequence.
    final_state: `[N,HV,K,V]` (`[N,HV,V,K]` with `state_v_first`), float64 if q is float64, else float32; None unless
    asked for.
    """

    output: Tensor
    final_state: Tensor | None


@without_autocast
def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Token loop; autograd differentiates it, which makes it the oracle of every gradient.

    q, k: `[B,T,H,K]`; v: `[B,T,HV,V]`; g (log decay, <= 0), beta: `[B,T,HV]`. Value head j reads key head
    `j // (HV // H)`.
    scale: factor of the output, `K ** -0.5` if None.
    initial_state: `[N,HV,K,V]`, or `[N,HV,V,K]` with `state_v_first`; zeros if None.
    cu_seqlens: `[N+1]` bounds of N packed sequences, needs B == 1; tokens after the last bound are never read.
    Computed in float64 if q is float64, else in float32.
    """
    layout = Layout.of(q, cu_seqlens, chunk_size=1)
    dtype = compute_dtype(q)
    num_heads, key_dim, value_heads, value_dim = *q.shape[2:], *v.shape[2:]
    scale = key_dim**-0.5 if scale is None else scale

    def per_token(x: Tensor) -> tuple[Tensor, ...]:
        """Tokens of each step: `[sequences alive, HV, 1, D]`."""
        return layout.gather(x, dtype).view(layout.num_chunks, value_heads, 1, x.shape[-1]).split(layout.counts)

    def per_value_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(value_heads // num_heads, dim=2)

    inputs = map(per_token, (per_value_head(q), per_value_head(k), v, g.unsqueeze(-1), beta.unsqueeze(-1)))
    shape, like = (value_heads, key_dim, value_dim), q.new_empty(0, dtype=dtype)
    state = layout.read_state(initial_state, shape, state_v_first, like)
    outputs, finished = [like.view(0, 1, value_dim)], []
    for q_t, k_t, v_t, g_t, beta_t in zip(*inputs, strict=True):
        if len(q_t) < len(state):
            finished.append(state[len(q_t) :])
            state = state[: len(q_t)]
        state = g_t.exp() * state  # eq. 1.1
        u_t = beta_t * (v_t - k_t @ state)  # eq. 1.2
        state = state + k_t.mT @ u_t  # eq. 1.1
        outputs.append(scale * (q_t @ state).flatten(0, 1))  # eq. 1.3
    output = layout.scatter(torch.cat(outputs), layout.new_tokens(value_heads, value_dim, like=q))
    final = torch.cat([state, *reversed(finished)])
    return Result(output, layout.write_state(final, state_v_first) if output_final_state else None)
