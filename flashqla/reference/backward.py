"""Gradients of the chunk form by hand, in two forms (derivations, eqs. 6.1 to 6.14); no autograd inside.

The states are recomputed from the inputs, so a forward pass needs to save nothing else. Where chunks are computed in
blocks (`blocks_of`), a block starts from its first state: `trace` walks there once more, unless the forward `Kept` it.

Both forms share the adjoint state chain and differ in how the triangular system is differentiated: "textbook" goes
through the gradient of the inverse, "adjoint" solves the transposed system and needs no gradient of the inverse.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashqla.reference.chunked import Chunks, Kept, States, Visit, blocks_of, cut, state_chain
from flashqla.reference.layout import Layout, compute_dtype, without_autocast


class Gradients(NamedTuple):
    """Gradients with the shapes of their inputs, in float64 if q is float64, else float32; dinitial_state is None
    without an initial state."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dinitial_state: Tensor | None


class Adjoints(NamedTuple):
    """Result of the adjoint chain: d_corrected dU, multiplier Y, d_values dV `[b,C,V]`; initial dS `[N,HV,K,V]` by
    rank."""

    d_corrected: Tensor
    multiplier: Tensor
    d_values: Tensor
    initial: Tensor


def adjoint_chain(
    layout: Layout, chunks: Chunks, d_output: Tensor, d_state: Tensor, visit: Visit | None = None
) -> Adjoints:
    """Eqs. 6.1 to 6.4 for every chunk, last one first; `d_state [N,HV,K,V]` by rank becomes the initial dS.

    visit: sees dS', the gradient of the state at the end of each chunk.
    """
    flat, steps = d_state.view(-1, *d_state.shape[2:]), layout.steps(d_state.shape[1])
    d_corrected = torch.bmm(chunks.scores.mT, d_output)
    multiplier, d_values = torch.empty_like(d_corrected), torch.empty_like(d_corrected)
    parts = (d_corrected, multiplier, d_values, d_output, chunks.q_read.mT, chunks.k_read.mT, chunks.k_write)
    parts += (chunks.gated_inverse.mT, chunks.beta, chunks.carry)
    sizes = [rows.stop - rows.start for rows in steps]
    every_step = list(zip(steps, *(x.split(sizes) for x in parts), strict=True))
    for rows, du, y, dv, do, q_read, k_read, k_write, gated_inverse, beta, carry in reversed(every_step):
        active = flat[: len(du)]
        if visit is not None:
            visit(rows, active)
        du.baddbmm_(k_write, active)
        torch.bmm(gated_inverse, du, out=y)
        torch.mul(beta, y, out=dv)
        active.mul_(carry).baddbmm_(q_read, do).baddbmm_(k_read, dv, alpha=-1)
    return Adjoints(d_corrected, multiplier, d_values, d_state)


class SystemGradients(NamedTuple):
    """Gradients through the system `(I + Gamma o L) U = diag(beta) W`: d_gram N `[b,C,C]` of K K^T, dbeta `[b,C]`, and
    pairs `[b,C,C]`, whose entry i > j is d loss / d log Gamma_ij."""

    d_gram: Tensor
    dbeta: Tensor
    pairs: Tensor


def adjoint_form(chunks: Chunks, states: States, adjoints: Adjoints) -> SystemGradients:
    """Eqs. 6.9 to 6.11. U = diag(beta) Z with Z = W - (Gamma o gram) U, so dbeta = <Y, Z> needs no division by beta."""
    strict = torch.bmm(adjoints.multiplier, states.corrected.mT).mul_(chunks.decay).tril_(-1)
    exchange = (chunks.per_group(strict) * chunks.gram[:, None]).flatten(0, 1)
    dbeta = (adjoints.multiplier * states.residual).sum(-1) - exchange.sum(-1)
    return SystemGradients(strict.mul_(-chunks.beta), dbeta, exchange.mul_(-chunks.beta))


def textbook_form(chunks: Chunks, states: States, adjoints: Adjoints) -> SystemGradients:
    """Eqs. 6.5 to 6.8: through T = (Gamma o A) diag(beta) and the inverse A."""
    d_mixing = (adjoints.d_corrected @ states.residual.mT).tril_()
    d_gated_inverse = d_mixing * chunks.beta.mT
    transposed = chunks.inverse.mT
    d_lower = (transposed @ (chunks.decay * d_gated_inverse) @ transposed).tril_(-1).neg_()
    d_lower_gram = (chunks.per_group(d_lower) * chunks.gram[:, None]).flatten(0, 1)
    dbeta = (d_mixing * chunks.gated_inverse).sum(-2) + d_lower_gram.sum(-1)
    return SystemGradients(chunks.beta * d_lower, dbeta, d_gated_inverse * chunks.gated_inverse)


FORMS = {"adjoint": adjoint_form, "textbook": textbook_form}


def gate_gradient(pairs: Tensor, read: Tensor, write: Tensor, carried: Tensor) -> Tensor:
    """Eq. 6.14: dg `[b,C]` as the sum of all that crosses the boundary before token t, without any cancellation.

    `dg_t = sum_{i >= t > j} pairs_ij + sum_{i >= t} read_i + sum_{j < t} write_j + carried`; pairs `[b,C,C]` (its
    diagonal and upper part are ignored), read and write `[b,C]`, carried `[b,1]`.
    """
    size = pairs.shape[-1]
    ones = torch.ones(size, size, dtype=pairs.dtype, device=pairs.device)
    lower, before = ones.tril(), ones.triu(1)  # [i,t]: i >= t, and [j,t]: j < t
    crossing = (pairs.flatten(0, 1) @ before).view_as(pairs).mul_(lower).sum(-2)
    return crossing + read @ lower + write @ before + carried


def differentiate(
    layout: Layout, chunks: Chunks, d_output: Tensor, state: Tensor, d_state: Tensor, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Both chains, then all that is left, all chunks at once (eqs. 6.5 to 6.14).

    state, d_state: the initial state and the gradient of the final one, `[N,HV,K,V]` by rank, which are overwritten by
    the final state and the gradient of the initial one.
    Returns dq, dk `[m,C,K]`, dv `[b,C,V]`, dg, dbeta `[b,C]`.
    """
    if form not in FORMS:
        raise ValueError(f"form: must be one of {list(FORMS)}, got {form!r}")
    starts = state.new_empty(len(d_output), *state.shape[2:])
    states = state_chain(layout, chunks, state, starts.__setitem__)
    k_write = torch.empty_like(chunks.k_write)
    crossing = state.new_empty(len(d_output), 1, 1)  # <S, dS'>

    def at_end(rows: slice, end: Tensor) -> None:
        torch.bmm(states.corrected[rows], end.mT, out=k_write[rows])
        torch.sum(starts[rows] * end, (1, 2), keepdim=True, out=crossing[rows])

    adjoints = adjoint_chain(layout, chunks, d_output, d_state, at_end)
    system = FORMS[form](chunks, states, adjoints)
    d_scores = torch.bmm(d_output, states.corrected.mT)
    pairs = (chunks.scores * d_scores).add_(system.pairs)
    d_scores.mul_(chunks.decay)

    def over_group(x: Tensor) -> Tensor:
        return chunks.per_group(x).sum(1)

    def along(rows: Tensor, of_key_head: Tensor) -> Tensor:
        """Row products `[b,C]` of `[b,C,K]` with the `[m,C,K]` of its key head."""
        return (chunks.per_group(rows) * of_key_head[:, None]).sum(-1).flatten(0, 1)

    q_read = torch.bmm(d_output, starts.mT).mul_(chunks.scale * chunks.gamma)
    k_read = torch.bmm(adjoints.d_values, starts.mT).mul_(-chunks.gamma)
    k_write.mul_(chunks.decay[:, -1, :, None])
    read = along(q_read, chunks.q) + along(k_read, chunks.k)
    write = along(k_write, chunks.k)
    dg = gate_gradient(pairs, read, write, (chunks.carry * crossing)[:, 0])

    d_scores = over_group(d_scores).mul_(chunks.scale)
    d_gram = over_group(system.d_gram)
    dq = over_group(q_read).baddbmm_(d_scores, chunks.k)
    dk = over_group(k_read.add_(k_write)).baddbmm_(d_scores.mT, chunks.q).baddbmm_(d_gram + d_gram.mT, chunks.k)
    return dq, dk, adjoints.d_values, dg, system.dbeta


def new_gradients(layout: Layout, q: Tensor, v: Tensor) -> list[Tensor]:
    """Room for dq, dk `[B,T,H,K]`, dv `[B,T,HV,V]`, dg, dbeta `[B,T,HV]` in the compute dtype."""
    like = q.new_empty(0, dtype=compute_dtype(q))
    dims = (q.shape[2:], q.shape[2:], v.shape[2:], v.shape[2:3], v.shape[2:3])
    return [layout.new_tokens(*each, like=like) for each in dims]


def trace(
    blocks: list[Layout], k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, state: Tensor
) -> Kept:
    """What the backward of each block starts from; None for the last inverse, as no chain leads on from there."""
    kept = Kept([], [])
    for block in blocks:
        active = state[: block.num_sequences]
        kept.starts.append(active.clone())
        chunks = None
        if block is not blocks[-1]:
            chunks = cut(block, None, k, v, g, beta, scale)
            state_chain(block, chunks, active)
        kept.inverses.append(None if chunks is None else chunks.inverse)
    return kept


@without_autocast
@torch.no_grad()
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor,
    *,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    form: str = "adjoint",
    kept: Kept | None = None,
) -> Gradients:
    """Gradients of `recurrent`, given those of the output `do [B,T,HV,V]` and of the final state `dht` (laid out like
    the states; zeros if None). The other arguments are those of the forward; `form` is "adjoint" or "textbook".

    kept: what `chunked` filled on the same arguments; without it, a second pass over the chunks finds it again.
    """
    layout = Layout.of(q, cu_seqlens, chunk_size)
    like = q.new_empty(0, dtype=compute_dtype(q))
    shape = (v.shape[2], q.shape[-1], v.shape[-1])
    state, d_state = (layout.read_state(given, shape, state_v_first, like) for given in (initial_state, dht))
    q, k, v, g, beta, do = map(layout.collapsible, (q, k, v, g, beta, do))
    blocks = list(blocks_of(layout, v))
    if kept is None:
        kept = trace(blocks, k, v, g, beta, scale, state)
    gradients = new_gradients(layout, q, v)
    for block, start, inverse in reversed(list(zip(blocks, *kept, strict=True))):
        chunks, d_output = cut(block, q, k, v, g, beta, scale, inverse), block.gather(do, like.dtype)
        parts = differentiate(block, chunks, d_output, start.clone(), d_state[: block.num_sequences], form)
        for part, whole in zip(parts, gradients, strict=True):
            block.scatter(part, whole)
        del chunks, d_output, part, parts  # the next block gets their memory, which the cache still holds
    return Gradients(*gradients, None if initial_state is None else layout.write_state(d_state, state_v_first))
