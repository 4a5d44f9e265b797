"""The chunk (WY) form with the gate outside the inverse (derivations, eqs. 2.1, 2.2 and 3.1 to 3.6).

Tensors are batched over "chunk-heads": the first axis runs over (chunk, value head), or (chunk, key head) for what the
value heads of a group share. Shapes below write `b = num_chunks * HV` and `m = num_chunks * H`, with R = HV // H.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashqla.reference.layout import Layout, compute_dtype, without_autocast
from flashqla.reference.recurrent import Result

CPU_BLOCK = 64
"""Chunk-heads computed at a time on a CPU: few enough to stay in its cache, and for the allocator to hand their memory
to the next block instead of back to the system, which costs more than the calls that bigger blocks would save."""


class Chunks(NamedTuple):
    """What the chunk form needs and what does not depend on the state; rows past the end of a sequence are zero.

    Shared by a group of value heads: q, k `[m,C,K]` and gram `[m,C,C]`, the strictly lower part of K K^T.
    Per value head: v `[b,C,V]`; beta `[b,C,1]`; decay Gamma, inverse A, gated_inverse Gamma o A, mixing
    (Gamma o A) diag(beta) of eq. 3.4, and scores P = scale Gamma o (Q K^T) `[b,C,C]`; q_read = scale Lambda Q,
    k_read = Lambda K, k_write = diag(gamma_C / gamma) K `[b,C,K]`; gamma `[b,C,1]`; log_carry, the logarithm of gamma_C
    `[num_chunks,HV]`. q, scores and q_read are None where nothing is read from the state.
    """

    scale: float

    q: Tensor | None
    k: Tensor
    gram: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    inverse: Tensor
    gated_inverse: Tensor
    mixing: Tensor
    scores: Tensor | None
    q_read: Tensor | None
    k_read: Tensor
    k_write: Tensor
    gamma: Tensor
    log_carry: Tensor

    @property
    def carry(self) -> Tensor:
        """gamma_C, the decay of a whole chunk `[b,1,1]`."""
        return self.gamma[:, -1:]

    @property
    def groups(self) -> int:
        """R, the number of value heads that share a key head."""
        return len(self.v) // max(len(self.k), 1)

    def per_group(self, x: Tensor) -> Tensor:
        """View `[b,...]` as `[m,R,...]`."""
        return x.view(len(self.k), self.groups, *x.shape[1:])


def cut(
    layout: Layout,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    inverse: Tensor | None = None,
) -> Chunks:
    """Gather the chunks of `layout` and compute all that does not depend on the state (eqs. 2.1, 2.2, 3.1, 3.2).

    q: None leaves out what reads the state.
    inverse: A `[b,C,C]`, where it is known from an earlier cut.
    """
    dtype, chunk_size = compute_dtype(k), layout.chunk_size
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    k, v, beta = (layout.gather(x, dtype) for x in (k, v, beta[..., None]))
    groups = (len(k), len(v) // max(len(k), 1))

    def scaled(rows: Tensor, factor: Tensor) -> Tensor:
        """Rows `[m,C,D]` of every key head times `factor [b,C,*]` of its value heads."""
        return (factor.view(*groups, *factor.shape[1:]) * rows[:, None]).flatten(0, 1)

    # exp() of anything below the floor is 0 anyway, in either dtype. Clamping keeps -inf out of the differences below
    # and the prefix sums short, hence accurate, after a hard reset.
    floor = -750.0 if dtype == torch.float64 else -110.0
    g_cum = layout.gather(g[..., None], dtype).clamp_(min=floor).cumsum(1)
    upper = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=k.device).triu_(1)
    decay = (g_cum - g_cum.mT).masked_fill_(upper, -torch.inf).exp_()
    gamma = g_cum.exp()

    gram = torch.bmm(k, k.mT).tril_(-1)
    if inverse is None:
        identity = torch.eye(chunk_size, dtype=dtype, device=k.device).expand(len(v), -1, -1)
        inverse = torch.linalg.solve_triangular(scaled(gram, beta), identity, upper=False, unitriangular=True)
    gated_inverse = decay * inverse
    if q is not None:
        q = layout.gather(q, dtype)
    return Chunks(
        scale=scale,
        q=q,
        k=k,
        gram=gram,
        v=v,
        beta=beta,
        decay=decay,
        inverse=inverse,
        gated_inverse=gated_inverse,
        mixing=gated_inverse * beta.mT,
        scores=None if q is None else scaled(torch.bmm(q, k.mT).mul_(scale), decay),
        q_read=None if q is None else scaled(q, scale * gamma),
        k_read=scaled(k, gamma),
        k_write=scaled(k, decay[:, -1, :, None]),
        gamma=gamma,
        log_carry=g_cum[:, -1].view(layout.num_chunks, g.shape[2]),
    )


Visit = Callable[[slice, Tensor], object]
"""Called at every step of a chain with its chunk-heads and their states `[rows,K,V]`, which it may only read there and
then: a chain overwrites its state, since states of all chunks at once are the largest tensors there are."""


class States(NamedTuple):
    """Result of the state chain: residual W and corrected U `[b,C,V]`, final `[N,HV,K,V]` by rank."""

    residual: Tensor
    corrected: Tensor
    final: Tensor


def state_chain(layout: Layout, chunks: Chunks, state: Tensor, visit: Visit | None = None) -> States:
    """Eqs. 3.3, 3.4 and 3.6 for every chunk in turn; `state [N,HV,K,V]` by rank is overwritten by the final state.

    visit: sees the state at the start of each chunk.
    """
    active, steps = state.view(-1, *state.shape[2:]), layout.steps(state.shape[1])
    residual, corrected = chunks.v.clone(), torch.empty_like(chunks.v)
    parts = (residual, corrected, chunks.mixing, chunks.k_read, chunks.k_write.mT, chunks.carry)
    sizes = [rows.stop - rows.start for rows in steps]
    for rows, w, u, mixing, k_read, k_write, carry in zip(steps, *(x.split(sizes) for x in parts), strict=True):
        active = active[: len(w)]
        if visit is not None:
            visit(rows, active)
        w.baddbmm_(k_read, active, alpha=-1)
        torch.bmm(mixing, w, out=u)
        active.mul_(carry).baddbmm_(k_write, u)
    return States(residual, corrected, state)


def read_out(layout: Layout, chunks: Chunks, state: Tensor) -> Tensor:
    """Eq. 3.5 along the state chain: O = scale Lambda Q S + P U `[b,C,V]`; overwrites `state` as `state_chain` does."""
    output = torch.empty_like(chunks.v)
    states = state_chain(
        layout, chunks, state, lambda rows, start: torch.bmm(chunks.q_read[rows], start, out=output[rows])
    )
    return output.baddbmm_(chunks.scores, states.corrected)


def blocks_of(layout: Layout, v: Tensor) -> Iterator[Layout]:
    """Layouts to compute one after the other: on a CPU of about `CPU_BLOCK` chunk-heads, elsewhere all at once."""
    if v.device.type != "cpu" and layout.num_chunks:
        return iter((layout,))
    return layout.blocks(CPU_BLOCK // v.shape[2])


class Kept(NamedTuple):
    """What a forward pass in blocks may keep for its backward pass: for every block the states at its start
    `[n,HV,K,V]` by rank, and the inverses A of its chunks `[b,C,C]`."""

    starts: Sequence[Tensor]
    inverses: Sequence[Tensor]

    @staticmethod
    def shapes(
        q_shape: Sequence[int], v_shape: Sequence[int], chunk_size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of all starts and of all inverses of a call on a CPU without packed sequences."""
        batch, steps, heads = v_shape[0], -(-v_shape[1] // chunk_size), v_shape[2]
        blocks = -(-steps // Kept._steps(batch, heads))
        return (blocks, batch, heads, q_shape[3], v_shape[3]), (steps * batch * heads, chunk_size, chunk_size)

    @classmethod
    def of(cls, starts: Tensor, inverses: Tensor) -> Kept:
        """Views of two tensors of the `shapes`."""
        batch, heads = starts.shape[1:3]
        return cls(starts.unbind(), inverses.split(max(1, cls._steps(batch, heads) * batch * heads)))

    @staticmethod
    def _steps(batch: int, heads: int) -> int:
        """Chunks of one sequence in a block (`Layout.blocks`)."""
        return torch.sym_max(1, CPU_BLOCK // heads // torch.sym_max(1, batch))


def chunk_form(function):
    """Give `function(layout, q, k, v, g, beta, scale, state, output, **options)` the signature of `recurrent` and
    `chunk_size`.

    `function` turns the initial state `[N,HV,K,V]` by rank into the final one, and writes `output [B,T,HV,V]`.
    """

    @functools.wraps(function)
    @without_autocast
    @torch.no_grad()
    def forward(
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
        chunk_size: int = 64,
        **options,
    ) -> Result:
        layout = Layout.of(q, cu_seqlens, chunk_size)
        shape, like = (v.shape[2], q.shape[-1], v.shape[-1]), q.new_empty(0, dtype=compute_dtype(q))
        state = layout.read_state(initial_state, shape, state_v_first, like)
        output = layout.new_tokens(*v.shape[2:], like=q)
        function(layout, *map(layout.collapsible, (q, k, v, g, beta)), scale, state, output, **options)
        return Result(output, layout.write_state(state, state_v_first) if output_final_state else None)

    del forward.__wrapped__  # the signature to show is the shared one, the docstring the function's own
    return forward


@chunk_form
def chunked(
    layout: Layout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    state: Tensor,
    output: Tensor,
    *,
    kept: Kept | None = None,
) -> None:
    """`recurrent` in chunks of `chunk_size` tokens: the same arguments, the same result, a fraction of the operations.

    Only the states at chunk boundaries are computed one after the other. Outside autograd: gradients come from
    `flashqla.reference.backward`, which is faster with what was `kept`, tensors to be filled here.
    """
    for i, block in enumerate(blocks_of(layout, v)):
        active = state[: block.num_sequences]
        if kept is not None:
            kept.starts[i].copy_(active)
        chunks = cut(block, q, k, v, g, beta, scale)
        if kept is not None:
            kept.inverses[i].copy_(chunks.inverse)
        block.scatter(read_out(block, chunks, active), output)
        del chunks  # the next block gets its memory, which the cache still holds
