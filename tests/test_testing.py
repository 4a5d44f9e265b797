"""The comparer must see what is wrong, the factory must give what it says, the poison must be there."""

from __future__ import annotations

import pytest
import torch

from flashqla import testing
from flashqla.testing import check, compare, inputs, poisoned_empty


def test_compare_measures():
    library = torch.tensor([3.0, 4.0, 0.0])
    found = compare(library + torch.tensor([0.0, 0.0, 0.5]), library)
    assert found.relative_l2 == pytest.approx(0.1)
    assert found.worst == pytest.approx(0.125) and found.worst_index == (2,)
    assert (found.mine_there, found.library_there) == (0.5, 0.0)
    assert found.cosine == pytest.approx(25 / (25 * 25.25) ** 0.5)


def test_compare_sees_nan_and_infinity():
    nan, inf = float("nan"), float("inf")
    library = torch.tensor([1.0, nan, inf, -inf, 2.0])
    assert compare(library.clone(), library).disagreements == 0
    assert compare(torch.tensor([nan, nan, inf, -inf, 2.0]), library).disagreements == 1
    assert compare(torch.tensor([1.0, 0.0, -inf, -inf, inf]), library).disagreements == 3


def test_compare_edges():
    assert compare(torch.zeros(3), torch.zeros(3)).relative_l2 == 0
    assert compare(torch.ones(3), torch.zeros(3)).relative_l2 == float("inf")
    assert compare(torch.zeros(0, 2), torch.zeros(0, 2)).relative_l2 == 0
    with pytest.raises(ValueError, match=r"mine: must have shape \[3\] like library, got \[2\]"):
        compare(torch.zeros(2), torch.zeros(3))


def test_check_prints_or_raises(capsys):
    library = torch.ones(4)
    check("eq. 3.5", library + 1e-7, library)
    assert capsys.readouterr().out == "ok  eq. 3.5  rel 1.2e-07 (limit 1e-05)\n"
    with pytest.raises(AssertionError, match=r"eq. 3.5: relative L2 1.000e\+00, worst element 1.000e\+00 at \[0\]"):
        check("eq. 3.5", 2 * library, library)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(AssertionError, match="1 NaN or infinite elements disagree"):
            check("eq. 3.5", torch.tensor([1.0, 1.0, 1.0, bad]), library)


def test_poison_reaches_every_allocation():
    with poisoned_empty():
        like = torch.zeros(3)
        for tensor in (
            torch.empty(3),
            torch.empty(2, 3, dtype=torch.bfloat16),
            torch.empty_like(like),
            like.new_empty(4),
        ):
            assert tensor.isnan().all()
        assert (torch.empty(2, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
        assert torch.empty(2, dtype=torch.bool).shape == (2,)
        assert torch.empty(2, requires_grad=True).requires_grad
    assert torch.empty.__name__ == "empty" and "new_empty" not in vars(torch.Tensor)


@pytest.mark.parametrize("recipe", testing.RECIPES)
def test_inputs(recipe):
    made = inputs(tokens=200, recipe=recipe, value_heads=8, dtype=torch.float32)
    again = inputs(tokens=200, recipe=recipe, value_heads=8, dtype=torch.float32)
    assert all(torch.equal(getattr(made, name), getattr(again, name)) for name in testing.PER_TOKEN)
    assert (made.g <= 0).all() and (made.beta >= 0).all() and (made.beta <= 1).all()
    torch.testing.assert_close(made.k.norm(dim=-1), torch.ones(1, 200, 2))
    if recipe != "faults":
        assert int((made.g == 0).all(1).sum()) == 2  # a quarter of the value heads
    cosines = made.k[0, :, 0] @ made.k[0, :, 0].T
    assert (cosines.mean() > 0.8) == (recipe == "correlated")


def test_inputs_options():
    made = inputs(tokens=20, lengths=(5, 0, 7), gate=-20.0, initial_state=False, dtype=torch.bfloat16)
    assert made.cu_seqlens.tolist() == [0, 5, 5, 12] and made.cu_seqlens.dtype == torch.int32
    assert (made.g == -20).all() and made.g.dtype == torch.float32
    assert made.initial_state is None and made.dht.shape[0] == 3
    assert inputs(tokens=4, dtype=torch.float64).g.dtype == torch.float64
    with pytest.raises(ValueError, match="recipe: must be one of"):
        inputs(recipe="nonsense")


def test_oracle_is_the_recurrence():
    """Written out once more, with indices, for one head."""
    made = inputs(tokens=7, heads=1, value_heads=1, head_dim_k=3, head_dim_v=2, dtype=torch.float64)
    state, outputs = made.initial_state[0, 0].clone(), []
    for t in range(7):
        state = made.g[0, t, 0].exp() * state
        u = made.beta[0, t, 0] * (made.v[0, t, 0] - state.T @ made.k[0, t, 0])
        state = state + torch.outer(made.k[0, t, 0], u)
        outputs.append(0.5 * state.T @ made.q[0, t, 0])
    truth = testing.oracle64(**made.arguments(scale=0.5, output_final_state=True))
    check("o", truth.output[0, :, 0], torch.stack(outputs), 1e-14)
    check("state", truth.final_state[0, 0], state, 1e-14)


def test_notebook_config(capsys):
    config = testing.notebook_config()
    assert config.inputs(tokens=4).q.shape == (1, 4, config.heads, config.head_dim)
    assert config.needs_hopper() == config.hopper
    assert config.hopper or capsys.readouterr().out.startswith("skipped: needs SM90 (here: ")
