"""The chunk form is worth having: operations grow with chunks; floating point work and memory with tokens, linearly."""

from __future__ import annotations

import itertools

import pytest
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flashqla.reference import backward, chain, chunked, split, split_backward
from flashqla.testing import inputs

BACKWARDS = (backward, split_backward)
VIEWS = ("view", "slice", "transpose", "expand", "unsqueeze", "select", "permute", "detach", "split")


@pytest.fixture(params=[chunked, chain, split, *BACKWARDS], ids=lambda function: function.__name__)
def function(request):
    return request.param


def run(function, tokens: int) -> None:
    made = inputs(1, tokens, 2, 4, 32, 16)
    function(**made.arguments(), **({"do": made.do, "dht": made.dht} if function in BACKWARDS else {}))


class Operations(TorchDispatchMode):
    """Names of the operations that compute something."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not any(view in function.name() for view in VIEWS):
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_operations_grow_with_chunks_not_tokens(function):
    """A dozen small operations per chunk in the state chain, none per token; all else is a fixed number of big ones for
    each block of 16 chunks."""

    def operations(tokens: int) -> int:
        with Operations() as recorder:
            run(function, tokens)
        return len(recorder.names)

    few, many = operations(1024), operations(4096)
    per_chunk = (many - few) / ((4096 - 1024) // 64)
    print(f"{function.__name__}: {per_chunk} operations per chunk, {few - 16 * per_chunk:.0f} others")
    assert per_chunk <= 30
    assert few - 16 * per_chunk <= 400


def test_work_is_linear_in_tokens(function):
    def work(tokens: int) -> int:
        with FlopCounterMode(display=False) as counter:
            run(function, tokens)
        return counter.get_total_flops()

    first, second, third = work(2048), work(3072), work(4096)  # whole blocks
    assert third - second == second - first > 0


def test_memory_is_linear_in_tokens(function):
    """Peak of the bytes in use, from the allocator's own records."""

    def peak(tokens: int) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            run(function, tokens)
        events = recorded.profiler.kineto_results.events()
        changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
        return max(itertools.accumulate(change for _, change in sorted(changes)))

    peak(64)
    first, second, third = peak(2048), peak(4096), peak(6144)
    assert third - second == pytest.approx(second - first, rel=0.05)
    assert third <= 3.1 * first
    print(f"{function.__name__}: {third / 6144:.0f} bytes per token")
    assert third / 6144 <= 16 * 1024 * 4  # bytes per token here: 4 value heads of at most a few thousand floats each
