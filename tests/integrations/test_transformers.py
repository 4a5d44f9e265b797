"""Qwen3-Next and Qwen3.5 of transformers compute by this package, and find what their torch loops find."""

from __future__ import annotations

import copy
import importlib
import logging

import models
import pytest
import torch

from flashqla.integrations import fla as fla_door
from flashqla.integrations import transformers as door
from flashqla.testing import check

transformers = pytest.importorskip("transformers", minversion="5")


@pytest.fixture(params=models.MODELS)
def name(request):
    return request.param


@pytest.fixture
def counted(monkeypatch):
    """Calls of this package's functions, by name."""
    calls = []

    def count(function):
        def call(*arguments, **keywords):
            calls.append(function.__name__)
            return function(*arguments, **keywords)

        call.__name__ = function.__name__
        return call

    for key, function in door.FUNCTIONS.items():
        monkeypatch.setitem(door.FUNCTIONS, key, count(function))
    return calls


@pytest.fixture
def registered(name, counted):
    door.register(name)
    yield counted
    door.unregister()


def test_forward_and_backward(name, registered, monkeypatch):
    model = models.make(name)
    mine = models.loss_and_gradients(model, models.tokens_of())
    assert registered == ["chunk_gated_delta_rule"] * 3
    door.unregister()
    models.use_torch_fallback(monkeypatch, name)
    theirs = models.loss_and_gradients(model, models.tokens_of())
    assert len(registered) == 3 and set(mine) == set(theirs)
    assert any("linear_attn.A_log" in key for key in theirs)
    for key, tensor in theirs.items():
        check(key, mine[key], tensor, 1e-4)


def test_in_bfloat16(name, registered, monkeypatch):
    """bf16 q, k, v and beta with fp32 g, as these models pass them."""
    model = models.make(name).to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    mine = models.loss_and_gradients(model, models.tokens_of())
    door.unregister()
    models.use_torch_fallback(monkeypatch, name)
    theirs = models.loss_and_gradients(model, models.tokens_of())
    measure = models.loss_and_gradients(exact, models.tokens_of())
    ours, others = (
        torch.stack([(x[key].float() - measure[key]).norm() / measure[key].norm() for key in ("logits", "loss")])
        for x in (mine, theirs)
    )
    assert (ours < 2 * others + 1e-2).all(), (ours, others)


@pytest.mark.parametrize("length", [1, 63, 70])
def test_generation_hands_over_to_decoding(name, registered, monkeypatch, length):
    model = models.make(name).eval()
    tokens = models.tokens_of(length=length)
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    mine = model.generate(tokens, **options)
    assert registered == ["chunk_gated_delta_rule"] * 3 + ["fused_recurrent_gated_delta_rule"] * 3 * 7
    with torch.no_grad():  # without a cache
        whole = model(mine.sequences).logits[:, length - 1 : -1]
    check("logits of decoding against one prefill", torch.stack(mine.logits, 1), whole, 1e-4)
    door.unregister()
    models.use_torch_fallback(monkeypatch, name)
    theirs = model.generate(tokens, **options)
    assert torch.equal(mine.sequences, theirs.sequences)
    check("logits", torch.stack(mine.logits, 1), torch.stack(theirs.logits, 1), 1e-4)


def test_a_training_loop(name, registered, tmp_path):
    """transformers' Trainer over an existing model: the loss falls, and the package computed every layer."""
    pytest.importorskip("accelerate")
    model = models.make(name)
    rows = [{"input_ids": row, "labels": row} for row in models.tokens_of(4, 40)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True,
        logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert registered == ["chunk_gated_delta_rule"] * 18


def test_packed_sequences(name, registered):
    """`cu_seq_lens_q` reaches the function: each sequence as if it were alone (in the Gated DeltaNet layers)."""
    module = models.module_of(name)
    made = torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16), torch.randn(1, 20, 4, 16)
    keywords = {"g": -torch.rand(1, 20, 4), "beta": torch.rand(1, 20, 4), "use_qk_l2norm_in_kernel": True}
    offsets = torch.tensor([0, 13, 20], dtype=torch.int32)
    o, _ = module.torch_chunk_gated_delta_rule(*made, cu_seqlens=offsets, position_ids=None, **keywords)
    alone = {key: value[:, 13:] if isinstance(value, torch.Tensor) else value for key, value in keywords.items()}
    second, _ = module.torch_chunk_gated_delta_rule(*(x[:, 13:] for x in made), **alone)
    torch.testing.assert_close(o[:, 13:], second)


def test_refused_calls_go_to_what_stood_there(name, counted, monkeypatch, caplog):
    module = models.module_of(name)
    reached = []
    monkeypatch.setattr(module, models.NAMES[0], lambda *x, **keywords: reached.append(keywords) or (x[2], None))
    door._say.cache_clear()
    door.register(name)
    try:
        made = torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16), torch.randn(1, 20, 3, 16)
        with caplog.at_level(logging.INFO, logger="flashqla"):
            module.torch_chunk_gated_delta_rule(*made, g=torch.zeros(1, 20, 3), beta=torch.zeros(1, 20, 3), other=1)
        assert not counted and reached[0]["other"] == 1
        assert any("HV divisible by q's H = 2" in message for message in caplog.messages)
    finally:
        door.unregister()


def test_registering_twice_and_undoing(name):
    module = models.module_of(name)
    before = [getattr(module, function) for function in models.NAMES]
    for _ in range(2):
        door.register(name)
    assert [getattr(module, function) for function in models.NAMES] != before
    door.unregister()
    assert [getattr(module, function) for function in models.NAMES] == before


def test_unknown_models_are_refused():
    with pytest.raises(ImportError, match="no_such_model"):
        door.register("no_such_model")
    with pytest.raises(RuntimeError, match="modeling_llama has no torch_chunk_gated_delta_rule"):
        door.register("llama")


def test_through_fla_core(name, monkeypatch):
    """Without touching transformers: it calls FLA's function, FLA asks this package; its fallback agrees."""
    try:
        fla = importlib.import_module("fla.ops.gated_delta_rule")
        fla_door.register()
    except Exception as error:
        pytest.skip(f"fla-core cannot be used: {type(error).__name__}: {error}")
    registry = fla_door._registry()
    try:
        module = models.module_of(name)
        assert module.torch_chunk_gated_delta_rule is not None and fla.chunk_gated_delta_rule is not None
        model = models.make(name)
        mine = models.loss_and_gradients(model, models.tokens_of())
        assert any(key.endswith(":chunk_gated_delta_rule:flashqla") for key in registry._logged)
    finally:
        fla_door.unregister()
    models.use_torch_fallback(monkeypatch, name)
    theirs = models.loss_and_gradients(model, models.tokens_of())
    for key, tensor in theirs.items():
        check(key, mine[key], tensor, 1e-4)
