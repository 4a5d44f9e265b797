"""Calls of a server: states read from and written to a pool, results in given buffers, states along the way.

One operator, ``flashqla::gated_delta_rule_serve``, that writes to its arguments and has no gradient. A pool is an
``initial_state`` of any number of slots. What is written in place is written where it lies; what is skipped (a negative
index) is not touched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, ops, validation_serving
from .operands import Operands, Options, make_plan
from .plan import CHUNK_SIZE, sequence_lengths
from .reference.layout import compute_dtype
from .validation import Call, debug_enabled


class Serving(NamedTuple):
    """What serving adds to operands and options."""

    state_indices: Tensor | None
    has_initial_state: Tensor | None
    out: Tensor | None
    states: Tensor | None
    states_every: int
    inplace_final_state: bool

    @classmethod
    def of(cls, call: Call) -> Serving | None:
        """That of a call; None for a plain one."""
        if not validation_serving.wanted(call):
            return None
        return cls(
            state_indices=call.state_indices,
            has_initial_state=call.has_initial_state,
            out=call.out,
            states=call.states,
            states_every=call.states_every or 0,
            inplace_final_state=bool(call.inplace_final_state),
        )

    def keywords(self) -> dict[str, Any]:
        """For a kernel that does all of this by itself."""
        names = ("state_indices", "has_initial_state", "out", "inplace_final_state")
        return {name: getattr(self, name) for name in names}

    def gather(self, operands: Operands) -> Tensor | None:
        """The initial states of the sequences, ``[N, HV, ...]``: zeros for those that have none or are skipped."""
        pool, indices = operands.initial_state, self.state_indices
        if pool is None:
            return None
        states, live = pool, None
        if indices is not None:
            live = indices >= 0
            states = pool.index_select(0, indices.clamp(min=0).to(torch.int64))
        if self.has_initial_state is not None:
            live = self.has_initial_state if live is None else live & self.has_initial_state
        return states if live is None else torch.where(live[:, None, None, None], states, torch.zeros_like(states))

    def scatter(self, o: Tensor, final_state: Tensor | None, operands: Operands) -> tuple[Tensor, Tensor | None]:
        """Put results where they belong, and zeros for what is skipped; waits for no device."""
        indices, pool = self.state_indices, operands.initial_state
        if indices is not None:
            skipped = indices < 0
            o.masked_fill_(_of_tokens(skipped, operands), 0)
            if final_state is not None:
                final_state.masked_fill_(skipped[:, None, None, None], 0)
        if self.out is not None and o is not self.out:
            o = self.out.copy_(o)
        if self.inplace_final_state and pool is not None and final_state is not None:
            if indices is None:
                pool.copy_(final_state)
            else:
                # A skipped row rewrites what slot 0 will hold: the new state of who has it, else the old one.
                live = indices >= 0
                owner = ((indices == 0) & live).to(torch.int64)
                at_zero = (
                    torch.where(owner.any(), final_state.index_select(0, owner.argmax().view(1))[0], pool[0])
                    if len(indices)
                    else None
                )
                rows = final_state if at_zero is None else torch.where(live[:, None, None, None], final_state, at_zero)
                pool.index_copy_(0, indices.clamp(min=0).to(torch.int64), rows.to(pool.dtype))
            final_state = pool
        return o, final_state


_SCHEMA = ops.ARGUMENTS.replace("Tensor? initial_state", "Tensor(a!)? initial_state") + (
    ", Tensor? state_indices, Tensor? has_initial_state, Tensor(b!)? out, Tensor(c!)? states, "
    "int states_every, bool inplace_final_state"
)
torch.library.define(
    "flashqla::gated_delta_rule_serve",
    f"({_SCHEMA}) -> (Tensor o, Tensor final_state)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _unpack(arguments: tuple[Any, ...]) -> tuple[Operands, Options, Serving]:
    return Operands(*arguments[:10]), Options(*arguments[10:-6]), Serving(*arguments[-6:])


@torch.library.register_fake("flashqla::gated_delta_rule_serve")
def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    operands, options, serving = _unpack(arguments)
    o, final_state, *_ = ops.forward_fake(*operands, *options)
    return (
        o if serving.out is None else o.new_empty(0),
        final_state.new_empty(0) if serving.inplace_final_state else final_state,
    )


@torch.library.impl("flashqla::gated_delta_rule_serve", "CompositeExplicitAutograd")
def _serve(*arguments: Any) -> tuple[Tensor, Tensor]:
    operands, options, serving = _unpack(arguments)
    plan = make_plan(operands, options)
    result = None
    if backends.choose(operands, options, plan, serving) == "hopper":
        result = backends.hopper_forward(operands, options, plan, serving)
    o, final_state = _reference(operands, options, serving) if result is None else result
    nothing = operands.q.new_empty(0, dtype=compute_dtype(operands.q))
    return (
        o if serving.out is None else operands.q.new_empty(0),
        nothing if final_state is None or serving.inplace_final_state else final_state,
    )


@torch.no_grad()
def run(
    function: str, call: Call, serving: Serving, operands: Operands, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Output (``call.out`` if given) and final state (``call.initial_state`` in place, or None)."""
    _check_indices(function, call)
    o, final_state = torch.ops.flashqla.gated_delta_rule_serve(*operands, *options, *serving)
    o = o if call.out is None else call.out
    if serving.inplace_final_state:
        return o, call.initial_state
    return o, final_state if options.output_final_state else None


def refuse_gradients(function: str, call: Call) -> None:
    """Raise where gradients are asked for: what is overwritten cannot be differentiated."""
    tensors = [name for name, value in call._asdict().items() if isinstance(value, Tensor) and value.requires_grad]
    if torch.is_grad_enabled() and tensors:
        raise ValueError(
            f"{function}: {tensors[0]}: must not require gradients with state_indices, has_initial_state, "
            "inplace_final_state, out or states; call under torch.no_grad()"
        )


def _check_indices(function: str, call: Call) -> None:
    """Values of the indices, where they can be read without waiting for a device."""
    indices = call.state_indices
    if indices is None or call.initial_state is None or torch.compiler.is_compiling():
        return
    if indices.device.type != "cpu" and not debug_enabled():
        return
    values = [index for index in indices.tolist() if index >= 0]
    slots = call.initial_state.shape[0]
    if values and max(values) >= slots:
        raise ValueError(f"{function}: state_indices: must be below the pool's {slots} slots, got {max(values)}")
    if call.inplace_final_state and len(set(values)) < len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise ValueError(f"{function}: state_indices: no slot may be written twice, got {twice} more than once")


# ------------------------------------------------------------------------------------------------------------ reference


def _of_tokens(per_sequence: Tensor, operands: Operands) -> Tensor:
    """A flag a sequence as a flag a token, ``[B, T, 1, 1]``."""
    if operands.cu_seqlens is None:
        return per_sequence[:, None, None, None]
    ends = operands.cu_seqlens[1:].contiguous()
    tokens = torch.arange(operands.q.shape[1], device=ends.device, dtype=ends.dtype)
    owner = torch.searchsorted(ends, tokens, right=True)
    padded = torch.cat([per_sequence, per_sequence.new_zeros(1)])  # tokens past the last sequence
    return padded[owner][None, :, None, None]


def _reference(operands: Operands, options: Options, serving: Serving) -> tuple[Tensor, Tensor | None]:
    inner = operands._replace(initial_state=serving.gather(operands))
    asked_for = options.output_final_state
    wants_state = asked_for or serving.inplace_final_state or serving.states is not None
    options = options._replace(output_final_state=wants_state)
    if serving.states is None:
        o, final_state = ops.reference_forward(inner, options)
    else:
        o, final_state = _along_the_way(inner, options, serving, serving.states)
        final_state = final_state if asked_for or serving.inplace_final_state else None
    return serving.scatter(o, final_state, operands)


def _along_the_way(operands: Operands, options: Options, serving: Serving, states: Tensor) -> tuple[Tensor, Tensor]:
    """Every ``states_every`` chunks the state goes to its row of ``states``: eq. 1.1 to 1.3, cut there."""
    B, tokens = operands.v.shape[:2]
    step = CHUNK_SIZE * serving.states_every
    if operands.cu_seqlens is None:
        starts, lengths, batches = [0] * B, [tokens] * B, list(range(B))
    else:
        offsets = operands.cu_seqlens if operands.cu_seqlens_cpu is None else operands.cu_seqlens_cpu
        starts = offsets.tolist()
        lengths = list(sequence_lengths(starts, tokens))
        batches = [0] * len(lengths)
    o = operands.v.new_zeros(operands.v.shape, dtype=operands.q.dtype)
    finals = []
    for n, (b, start, length) in enumerate(zip(batches, starts, lengths, strict=False)):
        state = None if operands.initial_state is None else operands.initial_state[n : n + 1]
        row = (b * tokens + start) // step
        for begin in range(0, max(length, 1), step):
            end = min(begin + step, length)
            piece = slice(start + begin, start + end)
            part = operands._replace(
                **{name: getattr(operands, name)[b : b + 1, piece] for name in ("q", "k", "v", "g", "beta")},
                initial_state=state, cu_seqlens=None, cu_seqlens_cpu=None,
            )  # fmt: skip
            o[b : b + 1, piece], after = ops.reference_forward(part, options)
            state = states.new_zeros(()) if after is None else after  # never None: the options ask for it
            if end - begin == step:
                states[row + begin // step] = state[0]
        finals += [] if state is None else [state]
    empty = states.new_empty((0, *states.shape[1:]))
    return o, torch.cat(finals) if finals else empty
