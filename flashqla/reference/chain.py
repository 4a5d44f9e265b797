"""The chunk form with two products per step of the state chain instead of three (derivations, eqs. 4.2 to 4.4).

A shorter chain for more work beside it; `chunked` is the plainer form, which the Hopper kernel takes in frames of
its own (eqs. 8.1 to 8.7).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashqla.reference.chunked import chunk_form, cut
from flashqla.reference.layout import Layout


@chunk_form
def chain(
    layout: Layout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    state: Tensor,
    output: Tensor,
) -> None:
    """`chunked` with the two-product chain: same arguments, same result, outside autograd as well."""
    chunks = cut(layout, q, k, v, g, beta, scale)
    written = chunks.inverse * chunks.beta.mT  # Ab
    keys = chunks.k[:, None].expand(-1, chunks.groups, -1, -1).flatten(0, 1)
    writer = keys.mT @ written  # X, eq. 4.2
    products = (chunks.scale * chunks.q @ chunks.k.mT).tril_()
    reader = chunks.decay * (products[:, None] @ chunks.per_group(written)).flatten(0, 1)  # B, eq. 4.2
    late_values = chunks.decay[:, -1, :, None] * chunks.v

    active = state.view(-1, *state.shape[2:])
    starts = state.new_empty(len(chunks.v), *state.shape[2:])
    prediction = torch.empty_like(chunks.v)
    for rows in layout.steps(state.shape[1]):
        active = active[: rows.stop - rows.start]
        starts[rows] = active
        torch.bmm(keys[rows], active, out=prediction[rows])
        y = late_values[rows] - chunks.carry[rows] * prediction[rows]  # eq. 4.3
        active.mul_(chunks.carry[rows]).baddbmm_(writer[rows], y)
    residual = chunks.v - chunks.gamma * prediction
    layout.scatter(chunks.q_read @ starts + reader @ residual, output)  # eq. 4.4
