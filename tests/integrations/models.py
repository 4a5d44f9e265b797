"""Small Qwen3-Next and Qwen3.5 models with random weights, built from their config classes; nothing is downloaded."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

MODELS = ("qwen3_next", "qwen3_5")
NAMES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def module_of(name: str):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def make(name: str, head_dim: int = 16, **changes) -> torch.nn.Module:
    """Three layers of Gated DeltaNet and one of attention, with two value heads a key head."""
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "intermediate_size": 32, "max_position_embeddings": 512, "pad_token_id": 0,
        "initializer_range": 0.2, "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    if name == "qwen3_next":
        sizes |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
        sizes |= {"num_experts_per_tok": 2}
        config = transformers.Qwen3NextConfig(**(sizes | changes))
        kind = transformers.Qwen3NextForCausalLM
    else:
        config = transformers.Qwen3_5TextConfig(**(sizes | changes))
        kind = transformers.Qwen3_5ForCausalLM
    assert config.layer_types.count("linear_attention") == 3
    torch.manual_seed(0)
    return kind(config)


def use_torch_fallback(monkeypatch, name: str) -> None:
    """transformers' own loops, whatever else is installed."""
    module = module_of(name)
    for function in NAMES:
        monkeypatch.setattr(module, function, inspect.unwrap(getattr(module, function)))


def tokens_of(batch: int = 2, length: int = 70) -> torch.Tensor:
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    result = model(input_ids=tokens, labels=tokens)
    result.loss.backward()
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return {"logits": result.logits.detach(), "loss": result.loss.detach()} | gradients
