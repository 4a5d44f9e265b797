"""Gradients by hand == autograd of the token loop, in both forms and by segments."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
from cases import case, relative_error

from flashqla.reference import Gradients, backward, chunked, recurrent, split_backward
from flashqla.reference.backward import adjoint_chain, adjoint_form
from flashqla.reference.chunked import cut, state_chain
from flashqla.reference.layout import Layout

BACKWARDS = {
    "adjoint": functools.partial(backward, form="adjoint"),
    "textbook": functools.partial(backward, form="textbook"),
    "split": functools.partial(split_backward, segment_chunks=2),
    "split textbook": functools.partial(split_backward, segment_chunks=3, form="textbook"),
}


@pytest.fixture(params=list(BACKWARDS))
def function(request):
    return BACKWARDS[request.param]


def by_autograd(made, **options) -> Gradients:
    made = made.requires_grad()
    names = [name for name in ("q", "k", "v", "g", "beta", "initial_state") if getattr(made, name) is not None]
    result = recurrent(**made.arguments(), output_final_state=True, **options)
    roots, gradients = [result.output], [made.do.nan_to_num()]
    if made.dht is not None:
        roots, gradients = [*roots, result.final_state], [*gradients, made.dht]
    found = torch.autograd.grad(roots, [getattr(made, name) for name in names], gradients)
    return Gradients(*found, *[None] * (6 - len(found)))


def by_hand(function, made, chunk_size=16, **options) -> Gradients:
    return function(**made.arguments(), do=made.do, dht=made.dht, chunk_size=chunk_size, **options)


def assert_same(made, chunk_size=16, **options):
    """Every backward against one run of autograd."""
    expected = by_autograd(made, **options)
    for label, function in BACKWARDS.items():
        got = by_hand(function, made, chunk_size, **options)
        for name, mine, theirs in zip(Gradients._fields, got, expected, strict=True):
            if theirs is None:
                assert mine is None, (label, name)
            else:
                assert mine.dtype == torch.float64 and mine.shape == theirs.shape, (label, name)
                assert relative_error(mine, theirs) <= 1e-10, (label, name)


@pytest.mark.parametrize("value_heads", [2, 4, 6, 8, 14])
def test_equals_autograd(gate, packed, value_heads):
    assert_same(case(value_heads, gate, packed))


@pytest.mark.parametrize("key_dim, value_dim, chunk_size", [(1, 1, 5), (1, 7, 64), (7, 1, 1), (33, 20, 64)])
def test_any_head_dimension_and_chunk_size(packed, key_dim, value_dim, chunk_size):
    assert_same(case(packed=packed, head_dim_k=key_dim, head_dim_v=value_dim), chunk_size)


@pytest.mark.parametrize("scale", [0.0, 0.3])
def test_without_states(packed, scale):
    made = case(packed=packed, initial_state=False)
    made.dht = None
    assert_same(made, scale=scale)


@pytest.mark.parametrize("token", [0, 15, 16, 69])
@pytest.mark.parametrize("value", [-300.0, -torch.inf])
def test_hard_reset(token, value):
    made = case(gate="none")
    made.g[:, token] = value
    assert_same(made)
    made.do[:, :token] = 0
    for function in BACKWARDS.values():
        for gradient in by_hand(function, made)[:5]:
            assert gradient.isfinite().all() and (gradient[:, :token].abs() < 1e-120).all()


@pytest.mark.parametrize("factor", [0.0, 1e-30, -1.0, 2.0])
def test_beta_zero_tiny_negative_and_large(factor, packed):
    """The gradient of beta needs no division by beta."""
    made = case(packed=packed)
    made.beta.mul_(factor)
    assert_same(made)
    made = case(packed=packed)
    made.beta[:, ::3] *= factor
    assert_same(made)


def test_first_gate_has_no_gradient_without_initial_state(function, gate, packed):
    made = case(gate=gate, packed=packed, initial_state=False)
    gradients = by_hand(function, made)
    if packed:
        starts = made.cu_seqlens[:-1][made.cu_seqlens.diff() > 0].long()
        assert (gradients.dg[:, starts] == 0).all()
    else:
        assert (gradients.dg[:, 0] == 0).all()


def test_each_gate_gradient_is_accurate_by_itself(function):
    """After a long decay the gradient of g is tiny, and still exact: no difference of large sums."""
    made = case(gate="weak")
    made.g[:, 20:50] = -9.0
    expected, got = by_autograd(made).dg, by_hand(function, made).dg
    assert expected[:, 25:45].abs().max() < 1e-2 * expected.abs().max()
    assert ((got - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))).max() <= 1e-10


def test_correlated_keys():
    assert_same(case(recipe="correlated"))


def test_state_v_first_is_the_transpose(function, packed):
    made = case(packed=packed)
    expected = by_hand(function, made)
    made.initial_state, made.dht = made.initial_state.mT.contiguous(), made.dht.mT.contiguous()
    got = by_hand(function, made, state_v_first=True)
    for mine, theirs in zip(got[:5], expected[:5], strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(got.dinitial_state, expected.dinitial_state.mT)


def test_padding_and_empty_sequences(function):
    made = case(packed=True)
    gradients = by_hand(function, made)
    end = int(made.cu_seqlens[-1])
    for gradient in gradients[:5]:
        assert gradient[:, :end].isfinite().all() and (gradient[:, end:] == 0).all()
    empty = made.cu_seqlens.diff() == 0
    assert torch.equal(gradients.dinitial_state[empty], made.dht[empty])


@pytest.mark.parametrize("batch, tokens", [(0, 8), (2, 0)])
def test_nothing_to_do(function, batch, tokens):
    made = case()
    arguments = {name: getattr(made, name)[:batch, :tokens] for name in ("q", "k", "v", "g", "beta", "do")}
    gradients = function(**arguments, initial_state=made.initial_state[:batch], dht=made.dht[:batch])
    assert [gradient.shape[:2] for gradient in gradients[:5]] == [(batch, tokens)] * 5
    assert torch.equal(gradients.dinitial_state, made.dht[:batch])


def test_strided_output_gradient(function):
    made = case()
    expected = by_hand(function, made)
    made.do = made.do.transpose(1, 2).contiguous().transpose(1, 2)
    for mine, theirs in zip(by_hand(function, made), expected, strict=True):
        assert torch.equal(mine, theirs)
    made.do = torch.ones((), dtype=torch.float64).expand(made.do.shape)
    assert_same(made)


def test_inputs_stay_as_they_are(function):
    made = case(value_heads=2)
    names = ("q", "k", "v", "g", "beta", "initial_state", "do", "dht")
    before = {name: getattr(made, name).clone() for name in names}
    by_hand(function, made)
    for name, value in before.items():
        assert torch.equal(getattr(made, name), value), name


def test_deterministic_in_float32(function):
    made = case(value_heads=6).to(torch.float32)
    first, second = by_hand(function, made), by_hand(function, made)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("block", [1, 5, 12])
def test_blocks_change_nothing(monkeypatch, packed, block):
    """However many chunks are computed at a time, also when the batch axis cannot be folded into a view."""
    made = case(value_heads=4, packed=packed)
    if not packed:
        made.q, made.do = (torch.cat([x, x], dim=1)[:, : x.shape[1]] for x in (made.q, made.do))
    module = importlib.import_module("flashqla.reference.chunked")  # the package has a function of this name

    def results() -> list[torch.Tensor]:
        forward = chunked(**made.arguments(), output_final_state=True, chunk_size=16)
        return [*forward, *by_hand(functools.partial(backward, chunk_size=16), made)]

    monkeypatch.setattr(module, "CPU_BLOCK", 10**6)
    expected = results()
    monkeypatch.setattr(module, "CPU_BLOCK", block)
    assert len(list(module.blocks_of(Layout.of(made.q, made.cu_seqlens, 16), made.v))) > 1
    for mine, other in zip(results(), expected, strict=True):
        assert relative_error(mine, other) <= 1e-13


def test_unknown_form_is_refused():
    made = case()
    with pytest.raises(ValueError, match=r"form: must be one of .*adjoint.*textbook.*, got 'other'"):
        by_hand(functools.partial(backward, form="other"), made)


def test_row_form_of_the_gate_gradient():
    """Eq. 6.15, which kernels use, equals eq. 6.14 (one value head per key head)."""
    made = case(value_heads=2)
    gradients = by_hand(backward, made)
    layout = Layout.of(made.q, None, 16)
    chunks = cut(layout, made.q, made.k, made.v, made.g, made.beta, None)
    starts, ends = (torch.empty(len(chunks.v), 6, 9, dtype=torch.float64) for _ in range(2))
    states = state_chain(layout, chunks, made.initial_state.clone(), starts.__setitem__)
    d_output = layout.gather(made.do, torch.float64)
    adjoints = adjoint_chain(layout, chunks, d_output, made.dht.clone(), ends.__setitem__)
    d_gram = adjoint_form(chunks, states, adjoints).d_gram

    late_corrected = chunks.decay[:, -1, :, None] * states.corrected
    written = (chunks.scale * chunks.decay * (d_output @ states.corrected.mT)).mT @ chunks.q
    written += late_corrected @ ends.mT + d_gram.mT @ chunks.k
    dq, dk = (layout.gather(x, torch.float64) for x in (gradients.dq, gradients.dk))
    row = (chunks.q * dq).sum(-1) + (chunks.k * dk).sum(-1) - 2 * (chunks.k * written).sum(-1)
    end_states = chunks.carry * starts + chunks.k.mT @ late_corrected
    row[:, -1] += (end_states * ends).sum((1, 2))
    dg = layout.scatter(row.flip(-1).cumsum(-1).flip(-1), torch.empty_like(made.g))
    assert relative_error(dg, gradients.dg) <= 1e-12
