"""flash-linear-attention and transformers on Hopper: their calls run the kernels and find what their own code finds."""

import copy
import importlib
import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch

from flashqla import backends, testing
from flashqla.integrations import fla as door
from flashqla.integrations import transformers as model_door

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
import models

DEVICE = "cuda"


@pytest.fixture
def fla():
    try:
        library = importlib.import_module("fla.ops.gated_delta_rule")
        door.register()
    except Exception as error:
        pytest.skip(f"fla-core cannot be used: {type(error).__name__}: {error}")
    yield library
    door.unregister()


def taken(key: str = ":chunk_gated_delta_rule:flashqla") -> bool:
    return any(logged.endswith(key) for logged in door._registry()._logged)


def test_fla_lands_on_the_kernels(fla, monkeypatch):
    monkeypatch.setattr(backends, "run_fla", lambda *arguments: pytest.fail("the call went back to FLA"))
    made = testing.inputs(2, 500, 2, 4, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    arguments = made.arguments(output_final_state=True, use_qk_l2norm_in_kernel=True)
    with torch.no_grad():
        o, state = fla.chunk_gated_delta_rule(**arguments)
    assert taken()
    expected = testing.oracle64(**arguments)
    testing.check("o", o, expected.output, 6e-3)
    testing.check("final_state", state, expected.final_state, 6e-3)


def test_refused_calls_run_on_triton(fla):
    """K = 96: no kernel here."""
    made = testing.inputs(1, 200, 2, 4, 96, 96, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        o, _ = fla.chunk_gated_delta_rule(**made.arguments())
    assert not taken() and taken(":flashqla:fail")
    testing.check("o", o, testing.oracle64(**made.arguments()).output, 1e-2)


def test_insisting_on_fla_is_not_answered_by_this_package(fla):
    import flashqla

    made = testing.inputs(1, 200, 2, 4, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        o, _ = flashqla.chunk_gated_delta_rule(**made.arguments(), backend="fla")
    assert not taken()
    testing.check("o", o, testing.oracle64(**made.arguments()).output, 1e-2)


@pytest.mark.parametrize("name", models.MODELS)
def test_models_compute_as_their_own_loops(name, monkeypatch):
    """bf16, heads of 128: logits and gradients as near to fp32 as transformers' own loops are.

    While the backward is no kernel, calls with gradients are refused, and only logits are compared.
    """
    whole = not backends.backward_refusals(torch.device(DEVICE))

    def results(model):
        if whole:
            return models.loss_and_gradients(model, tokens)
        with torch.no_grad():
            return {"logits": model(tokens).logits}

    ran = []
    original = backends.hopper_forward
    monkeypatch.setattr(backends, "hopper_forward", lambda *arguments: ran.append(1) or original(*arguments))
    model = models.make(name, head_dim=128).to(DEVICE, torch.bfloat16)
    tokens = models.tokens_of(2, 300).to(DEVICE)
    model_door.register(name)
    try:
        mine = results(model)
        assert len(ran) == 3
    finally:
        model_door.unregister()
    models.use_torch_fallback(monkeypatch, name)
    theirs = results(model)
    exact = results(copy.deepcopy(model).float())
    for key in ("logits", *(key for key in exact if "linear_attn" in key)):
        ours, others = (
            float((x[key].float() - exact[key]).norm() / exact[key].norm().clamp(min=1e-30)) for x in (mine, theirs)
        )
        assert ours < 1.5 * others + 1e-2, (key, ours, others)


@pytest.mark.parametrize("name", models.MODELS)
def test_models_generate(name, monkeypatch):
    """Prefill by the chunk kernels, decoding by the recurrent one: logits as without a cache."""
    model = models.make(name, head_dim=128).to(DEVICE, torch.bfloat16).eval()
    tokens = models.tokens_of(2, 100).to(DEVICE)
    ran = []
    original = backends.hopper_forward

    def note(operands, options, plan, serving=None):
        ran.append(options.form)
        return original(operands, options, plan, serving)

    monkeypatch.setattr(backends, "hopper_forward", note)
    model_door.register(name)
    try:
        generated = model.generate(
            tokens, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        assert ran == ["chunked"] * 3 + ["recurrent"] * 3 * 7
        with torch.no_grad():
            whole = model(generated.sequences).logits[:, 99:-1]
    finally:
        model_door.unregister()
    testing.check("logits", torch.stack(generated.logits, 1), whole, 3e-2)
