"""flash-linear-attention's own function lands here, and what this package refuses goes on to Triton."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging

import pytest
import torch

from flashqla import backends, chunk_gated_delta_rule
from flashqla.integrations import fla as door
from flashqla.testing import inputs, outcome

try:
    fla = importlib.import_module("fla.ops.gated_delta_rule")
except Exception as error:  # Triton is missing, or does not fit fla-core
    pytest.skip(f"fla-core cannot be imported: {type(error).__name__}: {error}", allow_module_level=True)
VERSION = importlib.metadata.version("fla-core")
if VERSION not in door.SUPPORTED:
    pytest.skip(f"needs fla-core {' or '.join(door.SUPPORTED)}, installed is {VERSION}", allow_module_level=True)

DIMS = {"tokens": 33, "heads": 2, "value_heads": 4, "head_dim_k": 16, "head_dim_v": 32}


@pytest.fixture
def registered():
    door.register()
    yield door._registry()
    door.unregister()


@pytest.fixture
def triton(monkeypatch, registered):
    """What FLA runs when every backend refuses; here it only notes that it was reached, since there may be no GPU."""
    reached = []

    def run(*arguments):
        reached.append(arguments)
        return arguments[2], None

    chunk = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    monkeypatch.setattr(chunk.ChunkGatedDeltaRuleFunction, "apply", run)
    return reached


@pytest.mark.parametrize("lengths", [None, (20, 0, 9)], ids=["dense", "packed"])
@pytest.mark.parametrize("v_first", [False, True])
def test_the_public_function_lands_here(registered, device, lengths, v_first):
    if device.type == "cuda":
        pytest.skip("tests/gpu has the kernels")
    made = inputs(lengths=lengths, device=device, **DIMS)
    options = {"use_qk_l2norm_in_kernel": True, "state_v_first": v_first, "scale": 0.3}
    theirs, ours = (
        outcome(function, made, **options) for function in (fla.chunk_gated_delta_rule, chunk_gated_delta_rule)
    )
    assert set(theirs) == set(ours)
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert any("flashqla" in key and "fail" not in key for key in registered._logged)


def test_every_keyword_gets_through(registered):
    made = inputs(**DIMS)
    parameters = torch.tensor([-2.0, -1.0, 0.0, 1.0])
    options = {
        "use_gate_in_kernel": True, "A_log": parameters, "dt_bias": parameters.flip(0), "chunk_size": 32,
        "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True,
    }  # fmt: skip
    theirs, ours = (
        outcome(function, made, **options) for function in (fla.chunk_gated_delta_rule, chunk_gated_delta_rule)
    )
    assert "dA_log" in ours and all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_positional_arguments(registered):
    made = inputs(lengths=(20, 0, 9), **DIMS)
    host = made.cu_seqlens.clone()
    positional = [made.q, made.k, made.v, made.g, made.beta, 0.5, made.initial_state, True, True, False, False, False]
    theirs = fla.chunk_gated_delta_rule(*positional, made.cu_seqlens, host, None)
    ours = chunk_gated_delta_rule(*positional, made.cu_seqlens, host)
    assert all(torch.equal(x, y) for x, y in zip(theirs, ours, strict=True))
    names = {"0.5.2": "cp_context", "0.6.0": "chunk_indices"}
    bound = door.bind((*positional, made.cu_seqlens, host, "fifteenth"), {"chunk_size": 16})
    assert bound[names[VERSION]] == "fifteenth" and bound["chunk_size"] == 16 and "kwargs" not in bound


def test_priority(registered):
    names = [backend.backend_type for backend in registered._get_sorted_backends() if backend.priority > 0]
    assert names[0] == "flashqla" and "flash_qla" in names


def test_refusals_go_on_to_triton_and_are_named(triton, caplog, monkeypatch):
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    made = inputs(**DIMS)
    with caplog.at_level(logging.INFO, logger="fla"):
        fla.chunk_gated_delta_rule(made.q, made.k, made.v, made.g, made.beta.to(torch.int32), unknown=1)
    assert len(triton) == 1
    (line,) = [message for message in caplog.messages if "flashqla rejected" in message]
    assert "unknown: unknown keyword" in line and "; beta: must have one of the dtypes" in line


def test_context_of_several_devices_is_refused(registered):
    made = inputs(**DIMS)
    (reason,) = door.refusals(**made.arguments(cp_context=object()))
    assert reason.startswith("cp_context: must be None, got object")


@pytest.mark.parametrize("old", ["head_first", "transpose_state_layout"])
def test_old_keywords_get_flas_own_answer(registered, old):
    with pytest.raises(DeprecationWarning) if old == "head_first" else pytest.warns(DeprecationWarning):
        made = inputs(**DIMS)
        monkey = pytest.MonkeyPatch()
        with monkey.context() as patch:
            chunk = importlib.import_module("fla.ops.gated_delta_rule.chunk")
            patch.setattr(chunk.ChunkGatedDeltaRuleFunction, "apply", lambda *arguments: (arguments[2], None))
            fla.chunk_gated_delta_rule(made.q, made.k, made.v, made.g, made.beta, **{old: True})


def test_calls_from_here_are_not_taken_back(triton, monkeypatch):
    monkeypatch.setattr(backends, "fla_refusals", lambda device=None: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    made = inputs(**DIMS)
    call = flashqla_call(made)
    backends.run_fla("chunk_gated_delta_rule", call)
    assert len(triton) == 1


def flashqla_call(made):
    from flashqla.validation import Call

    return Call(q=made.q, k=made.k, v=made.v, g=made.g, beta=made.beta, backend="fla")


@pytest.fixture
def on_hopper(monkeypatch):
    """Tensors that say they lie on a Hopper GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(backends, "device_refusals", lambda device=None: [])
    monkeypatch.setattr(backends, "hopper_refusals", lambda *arguments: [])
    monkeypatch.setattr("flashqla.validation._find_value_problems", lambda call: [])


def test_on_a_gpu_gradients_need_a_backward_kernel(registered, on_hopper, monkeypatch):
    monkeypatch.setattr(backends, "backward_refusals", lambda device: ["the backward has no Hopper kernel yet"])
    made = inputs(**DIMS)
    assert door.refusals(**made.arguments()) == []
    leaves = made.requires_grad()
    assert door.refusals(**leaves.arguments()) == ["the backward has no Hopper kernel yet"]
    with torch.no_grad():
        assert door.refusals(**leaves.arguments()) == []
    monkeypatch.setattr(backends, "hopper_refusals", lambda *arguments: ["K: must be 64 or 128, got 16"])
    assert door.refusals(**made.arguments()) == ["K: must be 64 or 128, got 16"]


# ------------------------------------------------------------------------------------------------------- registration


def test_register_twice_and_undo():
    assert not door.registered()
    for _ in range(2):
        door.register()
        assert door.registered()
    door.unregister()
    assert not door.registered()


def test_environment_switches_it_off(triton, monkeypatch):
    monkeypatch.setenv("FLA_FLASHQLA", "0")
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    made = inputs(**DIMS)
    fla.chunk_gated_delta_rule(made.q, made.k, made.v, made.g, made.beta)
    assert len(triton) == 1


def test_other_versions_are_refused_clearly(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.7.1")
    with pytest.raises(RuntimeError, match=r"knows fla-core 0\.5\.2 and 0\.6\.0, installed is 0\.7\.1"):
        door.register()


def test_without_fla_core(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match="needs the package fla-core"):
        door.register()


def test_dispatch_switched_off(monkeypatch):
    module = importlib.import_module("fla.backends" if VERSION == "0.6.0" else "fla.ops.backends")
    monkeypatch.setattr(module, "_DISPATCH_DISABLED", True)
    with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH=1"):
        door.register()
