"""All forward references are one function: recurrent == chunked == chain == split in float64."""

from __future__ import annotations

import functools

import pytest
import torch
from cases import case, relative_error

from flashqla.reference import chain, chunked, recurrent, split

FORWARDS = {
    "chunked": chunked,
    "chain": chain,
    "split": functools.partial(split, segment_chunks=2),
    "split of single chunks": functools.partial(split, segment_chunks=1),
}


@pytest.fixture(params=list(FORWARDS))
def forward(request):
    return FORWARDS[request.param]


def assert_same(forward, made, chunk_size=16, **options):
    options = dict(output_final_state=True) | options
    expected = recurrent(**made.arguments(), **options)
    got = forward(**made.arguments(), **options, chunk_size=chunk_size)
    assert got.output.dtype == got.final_state.dtype == torch.float64
    assert relative_error(got.output, expected.output) <= 1e-12
    assert relative_error(got.final_state, expected.final_state) <= 1e-12


@pytest.mark.parametrize("value_heads", [2, 4, 6, 8, 14])
def test_equals_token_loop(forward, gate, packed, value_heads):
    assert_same(forward, case(value_heads, gate, packed))


@pytest.mark.parametrize("key_dim, value_dim", [(1, 1), (1, 7), (7, 1), (33, 20), (64, 96)])
@pytest.mark.parametrize("chunk_size", [1, 5, 64, 256])
def test_any_head_dimension_and_chunk_size(forward, packed, key_dim, value_dim, chunk_size):
    assert_same(forward, case(packed=packed, head_dim_k=key_dim, head_dim_v=value_dim), chunk_size)


@pytest.mark.parametrize("scale", [None, 0.0, 1.0, 0.3])
def test_scale_and_no_initial_state(forward, packed, scale):
    assert_same(forward, case(packed=packed, initial_state=False), scale=scale)


def test_correlated_keys_and_beta_beyond_one(forward):
    made = case(recipe="correlated")
    assert_same(forward, made)
    made.beta.mul_(2)
    assert_same(forward, made)
    made.beta.neg_()
    made.beta.mul_(0.1)
    assert_same(forward, made)


@pytest.mark.parametrize("token", [0, 15, 16, 50, 69])
@pytest.mark.parametrize("value", [-300.0, -torch.inf])
def test_hard_reset(forward, token, value):
    made = case(gate="none")
    made.g[:, token] = value
    assert_same(forward, made)
    tail = {name: getattr(made, name)[:, token:] for name in ("q", "k", "v", "g", "beta")}
    got = forward(**made.arguments(), chunk_size=16).output[:, token:]
    assert relative_error(got, recurrent(**tail).output) <= 1e-12


def test_state_v_first_is_the_transpose(forward, packed):
    made = case(packed=packed)
    expected = forward(**made.arguments(), output_final_state=True)
    arguments = made.arguments(initial_state=made.initial_state.mT.contiguous())
    got = forward(**arguments, output_final_state=True, state_v_first=True)
    assert torch.equal(got.output, expected.output)
    assert torch.equal(got.final_state, expected.final_state.mT)
    assert got.final_state.is_contiguous()


@pytest.mark.parametrize("function", [recurrent, *FORWARDS.values()])
def test_padding_and_empty_sequences(function):
    made = case(packed=True)
    result = function(**made.arguments(), output_final_state=True)
    end = int(made.cu_seqlens[-1])
    assert result.output[:, :end].isfinite().all() and (result.output[:, end:] == 0).all()
    empty = made.cu_seqlens.diff() == 0
    assert torch.equal(result.final_state[empty], made.initial_state[empty])
    assert function(**made.arguments()).final_state is None


def test_packed_equals_separate_calls(forward):
    made = case(packed=True)
    together = forward(**made.arguments(), output_final_state=True, chunk_size=16)
    for sequence, (start, stop) in enumerate(zip(made.cu_seqlens[:-1], made.cu_seqlens[1:], strict=True)):
        tokens = {name: getattr(made, name)[:, start:stop] for name in ("q", "k", "v", "g", "beta")}
        state = made.initial_state[sequence : sequence + 1]
        alone = forward(**tokens, initial_state=state, output_final_state=True, chunk_size=16)
        assert relative_error(together.output[:, start:stop], alone.output) <= 1e-14
        assert relative_error(together.final_state[sequence], alone.final_state[0]) <= 1e-14


@pytest.mark.parametrize("batch, tokens", [(0, 8), (2, 0), (0, 0)])
@pytest.mark.parametrize("function", [recurrent, *FORWARDS.values()])
def test_nothing_to_do(function, batch, tokens):
    made = case()
    arguments = {name: getattr(made, name)[:batch, :tokens] for name in ("q", "k", "v", "g", "beta")}
    result = function(**arguments, initial_state=made.initial_state[:batch], output_final_state=True)
    assert result.output.shape == (batch, tokens, 4, 9)
    assert torch.equal(result.final_state, made.initial_state[:batch])


@pytest.mark.parametrize("function", [recurrent, *FORWARDS.values()])
def test_no_sequences(function):
    made = case()
    arguments = {name: getattr(made, name)[:1] for name in ("q", "k", "v", "g", "beta")}
    result = function(**arguments, cu_seqlens=torch.zeros(1, dtype=torch.int32), output_final_state=True)
    assert (result.output == 0).all() and result.final_state.shape == (0, 4, 6, 9)


@pytest.mark.parametrize("function", [recurrent, *FORWARDS.values()])
def test_dtypes_and_autocast(function):
    made = case().to(torch.bfloat16)
    made.g, made.beta = made.g.float(), made.beta.float()
    result = function(**made.arguments(), output_final_state=True)
    assert result.output.dtype == torch.bfloat16 and result.final_state.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same = function(**made.arguments(), output_final_state=True)
    assert torch.equal(result.output, same.output) and torch.equal(result.final_state, same.final_state)


@pytest.mark.parametrize("function", [recurrent, *FORWARDS.values()])
def test_inputs_stay_as_they_are(function, packed):
    made = case(packed=packed, value_heads=2)
    before = {name: value.clone() for name, value in made.arguments().items() if value is not None}
    function(**made.arguments(), output_final_state=True)
    for name, value in before.items():
        torch.testing.assert_close(getattr(made, name), value, rtol=0, atol=0, equal_nan=True)


def test_strided_inputs(forward):
    made = case()
    fused = torch.cat([made.q.flatten(2), made.k.flatten(2), made.v.flatten(2)], dim=-1)
    q, k, v = fused.split([12, 12, 36], dim=-1)
    arguments = made.arguments(q=q.unflatten(-1, (2, 6)), k=k.unflatten(-1, (2, 6)), v=v.unflatten(-1, (4, 9)))
    assert torch.equal(forward(**arguments).output, forward(**made.arguments()).output)
