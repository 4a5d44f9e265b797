"""Segments: the maps, the scan, and how good a warm-up is (eqs. 7.1 to 7.5)."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from cases import case, relative_error

from flashqla.reference import backward, chunked, split, split_backward
from flashqla.reference.chunked import cut
from flashqla.reference.layout import Layout
from flashqla.reference.split import segment, segment_maps, warm_up
from flashqla.testing import inputs

SEGMENTED = {"chunk_size": 8, "segment_chunks": 4}


def long_case(gate: float):
    made = inputs(2, 400, 2, 4, 12, 7, recipe="faults", dtype=torch.float64, seed=3)
    made.g.mul_(gate / made.g.mean())
    return made


@pytest.mark.parametrize("threshold", [-4.0, -8.0, -12.0])
@pytest.mark.parametrize("gate", [-0.05, -0.3, -1.0, -20.0])
def test_warm_up_bound(gate, threshold):
    """Eq. 7.4: what a boundary state forgets is exp(threshold) of a state, in spectral norm, at each boundary."""
    made = long_case(gate)
    exact = chunked(**made.arguments(), output_final_state=True, chunk_size=8)
    short = split(**made.arguments(), output_final_state=True, threshold=threshold, **SEGMENTED)
    states = [
        chunked(**prefix(made, stop), output_final_state=True, chunk_size=8).final_state for stop in (96, 200, 320)
    ]
    largest = max(
        torch.linalg.matrix_norm(state, 2).max() for state in (*states, made.initial_state, exact.final_state)
    )
    # Errors of earlier boundaries decay by the same factor at each later one, so their sum is below twice one error.
    bound = 2 * math.exp(threshold) * largest
    assert torch.linalg.matrix_norm(short.final_state - exact.final_state, 2).max() <= bound
    assert (short.output - exact.output).norm(dim=-1).max() <= bound  # |q| = 1, scale < 1


def prefix(made, stop):
    tokens = {name: getattr(made, name)[:, :stop] for name in ("q", "k", "v", "g", "beta")}
    return {**tokens, "initial_state": made.initial_state}


@pytest.mark.parametrize("gate", [-0.05, -0.3, -1.0])
def test_warm_up_gradients_are_as_close(gate):
    made = long_case(gate)
    arguments = made.arguments(do=made.do, dht=made.dht)
    exact = backward(**arguments, chunk_size=8)
    for threshold, limit in ((-8.0, 2e-3), (-30.0, 1e-12)):
        short = split_backward(**arguments, threshold=threshold, **SEGMENTED)
        for mine, theirs in zip(short, exact, strict=True):
            assert relative_error(mine, theirs) <= limit


def test_weak_gates_keep_the_exact_transition():
    """A head that never falls below the threshold inside a segment is exact, next to heads that are cut short."""
    made = long_case(-1.0)
    made.g[..., 1] = 0
    exact = chunked(**made.arguments(), chunk_size=8).output
    short = split(**made.arguments(), threshold=-2.0, **SEGMENTED).output
    assert relative_error(short[:, :, 1], exact[:, :, 1]) <= 1e-12
    assert relative_error(short[:, :, 0], exact[:, :, 0]) > 1e-6


def test_warm_up_walks_to_the_first_chunk_that_passes():
    steps = [slice(index, index + 1) for index in range(4)]
    log_carry = torch.tensor([[-1.0, -9.0], [-3.0, 0.0], [-4.0, 0.0], [-2.0, 0.0]])
    kept, whole = warm_up(steps[::-1], log_carry, 1, threshold=-5.0)
    assert kept.tolist() == [[0, 1], [0, 1], [1, 1], [1, 1]]
    assert whole.tolist() == [[0, 0]]
    assert warm_up(steps, log_carry, 1, threshold=-9.5)[1].tolist() == [[0, 1]]
    assert warm_up(steps, log_carry, 1, threshold=None)[0].all()


def test_segment_maps_reproduce_the_state(packed):
    """Eqs. 7.1 and 7.2: S -> M S + N, with |M| below the decay of the segment for unit keys and beta in [0, 2]."""
    made = case(packed=packed)
    made.beta.mul_(2)
    layout = Layout.of(made.q, made.cu_seqlens, 16)
    segments, scan = segment(layout, 2)
    assert sum(segments.lengths) == sum(layout.lengths) and max(segments.lengths) <= 32
    chunks = cut(segments, made.q, made.k, made.v, made.g, made.beta, None)
    transition, offset = segment_maps(segments, chunks, None)
    decay = torch.stack(
        [
            made.g.flatten(0, 1)[start : start + length].sum(0).exp()
            for start, length in zip(segments.starts, segments.lengths, strict=True)
        ]
    )
    assert (torch.linalg.matrix_norm(transition, 2) <= decay * (1 + 1e-12)).all()
    state = layout.to_ranks(made.initial_state).clone()
    for rows in scan:
        active = state[: rows.stop - rows.start]
        active.copy_(transition[rows] @ active + offset[rows])
    expected = chunked(**made.arguments(), output_final_state=True).final_state
    assert relative_error(layout.to_sequences(state), expected) <= 1e-12


@pytest.mark.parametrize("options", [{"segment_chunks": 0}, {"threshold": 0.0}, {"threshold": 3.0}])
def test_refusals(options):
    made = case()
    for function in (split, functools.partial(split_backward, do=made.do)):
        with pytest.raises(ValueError, match=next(iter(options))):
            function(**made.arguments(), **options)
