"""Requirements of the arguments that serving adds: pools of states, buffers for results, states along the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .plan import CHUNK_SIZE

if TYPE_CHECKING:
    from .validation import Call, Problem

BUFFERS = ("state_indices", "has_initial_state", "out", "states")


def wanted(call: Call) -> bool:
    """Whether a call has any of these arguments."""
    return call.inplace_final_state or any(getattr(call, name) is not None for name in (*BUFFERS, "states_every"))


def rows_of_states(call: Call) -> int:
    """Rows that ``states`` must have: one for every ``states_every`` chunks of the flattened tokens."""
    return call.q.shape[0] * call.q.shape[1] // (CHUNK_SIZE * (call.states_every or 1))


def find_problems(call: Call) -> list[Problem]:
    """Everything wrong with these arguments; those of the call itself may be wrong too."""
    problems: list[Problem] = []
    if not wanted(call):
        return problems
    for name in BUFFERS:
        tensor = getattr(call, name)
        if tensor is not None and not isinstance(tensor, Tensor):
            problems.append((TypeError, f"{name}: must be a tensor or None, got {type(tensor).__name__}"))
    every = call.states_every
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        problems.append((ValueError, f"states_every: must be a number of chunks, at least 1, or None, got {every!r}"))
    if (call.states is None) != (every is None):
        given, other = ("states_every", "states") if call.states is None else ("states", "states_every")
        problems.append((ValueError, f"{other}: must be given together with {given}, got None"))
    if call.initial_state is None:
        for name, value in (
            ("state_indices", call.state_indices is not None),
            ("has_initial_state", call.has_initial_state is not None),
            ("inplace_final_state", call.inplace_final_state),
        ):
            if value:
                problems.append((ValueError, f"initial_state: must be given together with {name}, got None"))
    if call.context_parallel is True:
        problems.append((NotImplementedError, "context_parallel: must be False or 'auto' with a pool or buffers"))
    if call.backend == "fla":
        problems.append((NotImplementedError, 'backend: "fla" has no pools or buffers'))
    if problems or not all(isinstance(x, Tensor) and x.dim() == 4 for x in (call.q, call.v)):
        return problems
    return _find_shape_problems(call)


def _find_shape_problems(call: Call) -> list[Problem]:
    problems: list[Problem] = []
    computed = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    state = call.initial_state
    if call.inplace_final_state and isinstance(state, Tensor) and state.dtype != computed:
        text = f"initial_state: must be {computed} with inplace_final_state=True, got {state.dtype}"
        problems.append((TypeError, text))
    expected: dict[str, tuple[tuple[int, ...], str, tuple[torch.dtype, ...]]] = {
        "state_indices": ((call.num_sequences,), "[N]", (torch.int32, torch.int64)),
        "has_initial_state": ((call.num_sequences,), "[N]", (torch.bool,)),
        "out": (tuple(call.v.shape), "[B, T, HV, V]", (call.q.dtype,)),
        "states": ((rows_of_states(call), *call.state_shape[1:]), "[rows, HV, K, V]", (computed,)),
    }
    for name, (shape, layout, dtypes) in expected.items():
        tensor = getattr(call, name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            text = f"{name}: must have shape {layout} = {list(shape)}, got {list(tensor.shape)}"
            problems.append((ValueError, text))
        if tensor.dtype not in dtypes:
            names = " or ".join(str(dtype) for dtype in dtypes)
            problems.append((TypeError, f"{name}: must have dtype {names}, got {tensor.dtype}"))
        if tensor.device != call.q.device:
            problems.append((ValueError, f"{name}: must be on {call.q.device} like q, got {tensor.device}"))
    return problems
