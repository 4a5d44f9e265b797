"""The gated delta rule of transformers' models, prefill and decoding, by this package, with or without fla-core.

    import flashqla.integrations.transformers
    flashqla.integrations.transformers.register()

transformers picks the functions of a model when it imports it: fla-core's where that can be imported, else its own
loops. :func:`register` puts this package in front of whichever was picked, in the modules of `MODELS`; models that
exist already change too, since they look their functions up at every call. A call that this package refuses (see
:func:`flashqla.integrations.fla.refusals`) goes to the function that stood there. Where only the chunked function is
wanted, or other callers of fla-core too, `flashqla.integrations.fla.register` alone does it, without touching
transformers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

import flashqla
from flashqla.integrations import fla

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": flashqla.chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": flashqla.fused_recurrent_gated_delta_rule,
}
"""By the names that transformers (5.x) gives them, whichever implementation is behind."""
KEYWORDS = (
    *("g", "beta", "chunk_size", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens"),
    *("scale", "state_v_first"),
)
"""What models pass on to the functions; other keywords of theirs are for other layers."""

logger = logging.getLogger("flashqla")
_replaced: dict[tuple[str, str], Callable] = {}


def register(*models: str) -> None:
    """Let the models compute by this package; again: nothing happens.

    Args:
        models: names of modules under `transformers.models`; default: those of `MODELS` that are installed.

    Raises:
        ImportError: transformers cannot be imported, or has no such model.
        RuntimeError: the model has no functions of the names that this module knows.
    """
    for model in models or _installed():
        module = _module(model)
        missing = [name for name in FUNCTIONS if not callable(getattr(module, name, None))]
        if missing:
            raise RuntimeError(
                f"flashqla.integrations.transformers: {module.__name__} has no {' and no '.join(missing)}"
            )
        for name, function in FUNCTIONS.items():
            if (model, name) not in _replaced:
                _replaced[model, name] = getattr(module, name)
                setattr(module, name, _in_front(function, _replaced[model, name]))
        logger.info("transformers: %s computes by flashqla", model)


def unregister() -> None:
    """Undo :func:`register`."""
    while _replaced:
        (model, name), original = _replaced.popitem()
        setattr(_module(model), name, original)


def _in_front(function: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def call(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> tuple[Tensor, Tensor | None]:
        known = {name: keywords[name] for name in KEYWORDS if name in keywords}
        reasons = fla.refusals(q=query, k=key, v=value, function=function, **known)
        if reasons:
            _say(function.__name__, "; ".join(reasons))
            return original(query, key, value, **keywords)
        return function(query, key, value, **known)

    return call


@functools.cache
def _say(function: str, reasons: str) -> None:
    logger.info("transformers: %s is left to the model's own: %s", function, reasons)


def _installed() -> list[str]:
    try:
        found = [name for name in MODELS if importlib.util.find_spec(f"transformers.models.{name}") is not None]
    except ImportError as error:
        raise ImportError(f"flashqla.integrations.transformers needs the package transformers: {error}") from error
    if not found:
        raise ImportError(f"flashqla.integrations.transformers: this transformers has none of {', '.join(MODELS)}")
    return found


def _module(model: str) -> Any:
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")
