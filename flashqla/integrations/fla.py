"""In front of the Triton kernels of flash-linear-attention, without patching it.

    import flashqla.integrations.fla
    flashqla.integrations.fla.register()

From then on ``fla.ops.gated_delta_rule.chunk_gated_delta_rule``, and whatever calls it (transformers' Qwen3-Next and
Qwen3.5, Megatron-LM, verl), asks this package first. A call that it refuses goes on to FLA's next backend, in the end
to Triton; FLA's logger says why, once. FLA keeps its function out of ``torch.compile``, so a graph breaks there, with
or without this package; call :func:`flashqla.chunk_gated_delta_rule` itself for whole graphs. FLA's
``fused_recurrent_gated_delta_rule`` has no backends, so decoding through FLA stays on Triton.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flashqla
from flashqla import backends

SUPPORTED = ("0.5.2", "0.6.0")
OPERATION = "gated_delta_rule"
NAME = "flashqla"
PRIORITY = 2
"""FLA asks lower numbers first: FlashQLA is 3, others 5. Ascend's 0 is for NPUs only."""
ENVIRONMENT = "FLA_FLASHQLA"
"""Set to 0, this switches the package off inside FLA, as FLA's own backends have it."""

logger = logging.getLogger("flashqla")


def register() -> None:
    """Put this package in front of FLA's kernels of ``chunk_gated_delta_rule``; again: nothing happens.

    Raises:
        ImportError: fla-core, or the triton that it needs, cannot be imported.
        RuntimeError: this version of fla-core is not known, or its dispatch is switched off.
    """
    registry = _registry()
    if NAME not in registry._backends:
        registry.register(_backend_class(_base())())
        logger.info("fla: %s calls flashqla first (fla-core %s)", OPERATION, _version())


def unregister() -> None:
    """Undo :func:`register`."""
    registry = _registry()
    registry._backends.pop(NAME, None)
    registry._logged = {key for key in registry._logged if f":{NAME}" not in key}


def registered() -> bool:
    """Whether FLA asks this package."""
    return NAME in _registry()._backends


def refusals(*arguments: Any, function: Callable = flashqla.chunk_gated_delta_rule, **keywords: Any) -> list[str]:
    """Every reason why a call of FLA's ``chunk_gated_delta_rule`` is left to FLA; empty when it is taken.

    Keywords alone can also ask about another ``function`` of this package. On the CPU, where Triton cannot run, valid
    calls are taken by the reference. On a GPU only those are taken that the Hopper kernels can run, in both directions
    if gradients are asked for.
    """
    if backends.inside_fla():
        return ['backend: this call comes from flashqla with backend="fla"']
    call = bind(arguments, keywords)
    for old in ("head_first", "transpose_state_layout"):
        if old in call:
            return [f"{old}: fla-core has its own answer to this old keyword"]
    on_gpu = isinstance(call["q"], Tensor) and call["q"].is_cuda
    supported, reasons = flashqla.is_supported(**call, function=function, backend="hopper" if on_gpu else "auto")
    if supported and on_gpu and _asks_for_gradients(call):
        reasons = backends.backward_refusals(call["q"].device)
    return reasons


def bind(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, by FLA's signature: its versions differ in the order of the last ones."""
    if not arguments:
        return keywords
    bound = inspect.signature(_function()).bind(*arguments, **keywords).arguments
    return bound | bound.pop("kwargs", {})


def _asks_for_gradients(call: dict[str, Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in call.values())


# ----------------------------------------------------------------------------------------------------------- inside FLA


def _backend_class(base: type) -> type:
    class FlashqlaBackend(base):
        """FLA looks methods up by the name of its function, with ``_verifier`` for the question that comes first."""

        backend_type = NAME
        package_name = NAME
        env_var = ENVIRONMENT
        default_enable = True
        priority = PRIORITY

        def chunk_gated_delta_rule_verifier(self, *arguments: Any, **keywords: Any) -> tuple[bool, str | None]:
            reasons = refusals(*arguments, **keywords)
            return not reasons, "; ".join(reasons) or None

        def chunk_gated_delta_rule(self, *arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor | None]:
            return flashqla.chunk_gated_delta_rule(**bind(arguments, keywords))

    return FlashqlaBackend


def _version() -> str:
    try:
        return importlib.metadata.version("fla-core").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("flashqla.integrations.fla needs the package fla-core (pip install fla-core)") from None


def _dispatch() -> Any:
    """FLA's module of backends: it has moved between the versions."""
    version = _version()
    if version not in SUPPORTED:
        raise RuntimeError(
            f"flashqla.integrations.fla knows fla-core {' and '.join(SUPPORTED)}, installed is {version}; "
            "its functions can be called as flashqla.chunk_gated_delta_rule meanwhile"
        )
    try:
        _function()
        dispatch = importlib.import_module("fla.backends" if version == "0.6.0" else "fla.ops.backends")
    except ImportError as error:
        raise ImportError(f"flashqla.integrations.fla: fla-core {version} cannot be imported: {error}") from error
    if dispatch._DISPATCH_DISABLED:
        raise RuntimeError("flashqla.integrations.fla: FLA_DISABLE_BACKEND_DISPATCH=1 switches all backends of fla off")
    return dispatch


def _base() -> type:
    return _dispatch().BaseBackend


def _registry() -> Any:
    dispatch = _dispatch()
    if _version() == "0.6.0":
        return dispatch._load_operation_registry(OPERATION)
    dispatch.BackendRegistry.ensure_initialized(OPERATION)
    return dispatch.BackendRegistry._registries[OPERATION]


def _function() -> Any:
    return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
