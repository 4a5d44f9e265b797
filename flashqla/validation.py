"""Every requirement of the public functions, in one place.

A call is described by a :class:`Call`; :func:`find_problems` lists everything that is wrong with it and :func:`require`
raises one readable error that names each argument, what it must be and what it was. Only host numbers are read: shapes,
dtypes, devices, and the values of ``cu_seqlens`` where they lie on the CPU.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import validation_serving
from .plan import CP_THRESHOLD, Plan, sequence_lengths

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKENDS = ("auto", "hopper", "fla", "reference")
CHUNK_SIZES = (16, 32, 64)

FLAGS = (
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "state_v_first",
    "inplace_final_state",
)

RESERVED = {
    "cp_group": "context parallelism over several devices is not built yet",
    "cp_context": "context parallelism over several devices is not built yet",
    "gk": "the gated delta rule has one decay per value head (g), not one per key channel",
    "gv": "the gated delta rule has one decay per value head (g), not one per value channel",
}
"""Keywords that are understood but may only be None, and why."""

OUTPUT_GRADIENTS = ("do", "dht")
"""Fields of a call that only the function without autograd has."""

Problem = tuple[type[Exception], str]


class Call(NamedTuple):
    """The arguments of one public call, by the names of :func:`flashqla.chunk_gated_delta_rule`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    chunk_indices: Tensor | None = None
    cp_context: Any = None
    use_gate_in_kernel: bool = False
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    chunk_size: int = 64
    plan: Plan | None = None
    context_parallel: bool | str = "auto"
    cp_threshold: float | None = CP_THRESHOLD
    backend: str = "auto"
    cp_group: Any = None
    state_indices: Tensor | None = None
    has_initial_state: Tensor | None = None
    inplace_final_state: bool = False
    out: Tensor | None = None
    states: Tensor | None = None
    states_every: int | None = None
    gk: Tensor | None = None
    gv: Tensor | None = None
    do: Tensor | None = None
    dht: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """N: packed sequences, or the batch size."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """``(N, HV, K, V)``, or ``(N, HV, V, K)`` with ``state_v_first``."""
        dims = (self.q.shape[3], self.v.shape[3])
        return (self.num_sequences, self.v.shape[2], *(dims[::-1] if self.state_v_first else dims))


def require(function: str, call: Call, unknown: dict[str, Any] | None = None) -> None:
    """Raise one error that lists every problem of the call.

    Raises:
        TypeError, ValueError, NotImplementedError: after the kind of the first problem.
    """
    key = None if unknown else _key(call)
    if key is not None and key in _valid:
        return
    raise_problems(function, find_unknown(unknown or {}) + find_problems(call))
    if key is not None:
        if len(_valid) >= MOST_VALID:
            _valid.clear()
        _valid.add(key)


MOST_VALID = 4096
_valid: set[tuple] = set()
"""Keys of calls found valid: a model makes the same few calls over and over."""


def _key(call: Call) -> tuple | None:
    """All that the verdict on a call depends on, or None where it depends on values too."""
    offsets_on_host = call.cu_seqlens is not None and (
        call.cu_seqlens_cpu is not None or not isinstance(call.cu_seqlens, Tensor) or call.cu_seqlens.is_cpu
    )
    many = len(getattr(call.plan, "lengths", None) or ()) > 256  # too long to hash at every call
    if offsets_on_host or many or torch.compiler.is_compiling() or debug_enabled():
        return None
    try:
        key = tuple((x.shape, x.dtype, x.device, x.layout) if isinstance(x, Tensor) else (type(x), x) for x in call)
        hash(key)
    except (TypeError, RuntimeError):  # something unhashable, or a nested tensor, which has no shape
        return None
    return key


def raise_problems(function: str, problems: list[Problem]) -> None:
    """Raise all problems as one error; do nothing when there are none."""
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0][0](f"{function}: {problems[0][1]}")
    listed = "\n".join(f"  - {text}" for _, text in problems)
    raise problems[0][0](f"{function}: {len(problems)} problems\n{listed}")


def find_unknown(unknown: dict[str, Any]) -> list[Problem]:
    """Problems of keywords that no public function has. ``head_first=False`` only states what holds anyway."""
    problems: list[Problem] = []
    for name, value in unknown.items():
        if name == "head_first":
            if value:
                text = "head_first: must be False, got True; pass tensors as [B, T, H, ...] (x.transpose(1, 2))"
                problems.append((NotImplementedError, text))
            continue
        fields = [field for field in Call._fields if field not in (*RESERVED, *OUTPUT_GRADIENTS)]
        close = difflib.get_close_matches(name, fields, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        problems.append((TypeError, f"{name}: unknown keyword{hint}"))
    return problems


def find_problems(call: Call) -> list[Problem]:
    """Everything wrong with a call, in the order of its arguments; empty when it is valid."""
    return [
        *_find_tensor_problems(call),
        *_find_option_problems(call),
        *_find_sequence_problems(call),
        *validation_serving.find_problems(call),
    ]


def debug_enabled() -> bool:
    """Whether ``FLASHQLA_DEBUG=1`` asks for value checks that synchronise with the device."""
    return os.environ.get("FLASHQLA_DEBUG", "") not in ("", "0")


def host_offsets(call: Call) -> Tensor | None:
    """``cu_seqlens`` on the host, where that needs no synchronisation: its CPU copy, itself if on the CPU, or the
    plan's lengths."""
    if call.cu_seqlens is None:
        return None
    if call.cu_seqlens_cpu is not None:
        return call.cu_seqlens_cpu
    if call.cu_seqlens.device.type == "cpu":
        return call.cu_seqlens
    if call.plan is not None and call.plan.lengths is not None:
        return _offsets_of(call.plan.lengths)
    return None


@functools.lru_cache(maxsize=16)
def _offsets_of(lengths: tuple[int, ...]) -> Tensor:
    with torch.inference_mode(False):  # the next caller may train
        return torch.tensor((0, *lengths), dtype=torch.int64, device="cpu").cumsum(0)


# -------------------------------------------------------------------------------------------------------------- tensors


def _find_tensor_problems(call: Call) -> list[Problem]:
    problems: list[Problem] = []
    ranks = {"q": 4, "k": 4, "v": 4, "g": 3, "beta": 3, "initial_state": 4, "A_log": 1, "dt_bias": 1, "do": 4, "dht": 4}
    optional = ("initial_state", "A_log", "dt_bias", "do", "dht")
    ignored = () if call.use_gate_in_kernel else ("A_log", "dt_bias")
    sound = set()  # arguments whose shape may be looked at
    for name, rank in ranks.items():
        tensor = getattr(call, name)
        if name in ignored or (name in optional and tensor is None):
            continue
        if not isinstance(tensor, Tensor):
            problems.append((TypeError, f"{name}: must be a tensor, got {type(tensor).__name__}"))
            continue
        if tensor.layout != torch.strided or tensor.is_nested:
            problems.append((TypeError, f"{name}: must be a dense tensor, got layout {tensor.layout}"))
            continue
        if tensor.dtype not in DTYPES:
            expected = ", ".join(str(dtype) for dtype in DTYPES)
            problems.append((TypeError, f"{name}: must have one of the dtypes {expected}, got {tensor.dtype}"))
        if tensor.dim() != rank:
            problems.append((ValueError, f"{name}: must have {rank} dimensions, got shape {_shape(tensor)}"))
            continue
        sound.add(name)
    if call.use_gate_in_kernel and call.A_log is None:
        problems.append((ValueError, "A_log: must be a tensor of shape [HV] with use_gate_in_kernel=True, got None"))
    if "q" not in sound:
        return problems
    for name in ("k", "v"):
        tensor = getattr(call, name)
        if isinstance(tensor, Tensor) and tensor.dtype != call.q.dtype:
            problems.append((TypeError, f"{name}: must have dtype {call.q.dtype} like q, got {tensor.dtype}"))
    for name in ranks:
        tensor = getattr(call, name)
        if name in sound and tensor.device != call.q.device:
            problems.append((ValueError, f"{name}: must be on {call.q.device} like q, got {tensor.device}"))
    return problems + _find_shape_problems(call, sound)


def _find_shape_problems(call: Call, sound: set[str]) -> list[Problem]:
    problems: list[Problem] = []
    batch, tokens, heads, head_dim_k = call.q.shape
    if heads == 0 or head_dim_k == 0:
        problems.append((ValueError, f"q: must have at least one head and one channel, got shape {_shape(call.q)}"))
        return problems
    if "k" in sound and call.k.shape != call.q.shape:
        problems.append((ValueError, f"k: must have shape {_shape(call.q)} like q, got {_shape(call.k)}"))
    if "v" not in sound:
        return problems
    value_heads, head_dim_v = call.v.shape[2:]
    if call.v.shape[:2] != call.q.shape[:2]:
        text = f"v: must have shape [B, T, HV, V] with B = {batch} and T = {tokens} like q, got {_shape(call.v)}"
        problems.append((ValueError, text))
    if value_heads == 0 or head_dim_v == 0:
        problems.append((ValueError, f"v: must have at least one head and one channel, got shape {_shape(call.v)}"))
    if value_heads % heads:
        text = f"v: must have a number of heads HV divisible by q's H = {heads}, got HV = {value_heads}"
        problems.append((ValueError, text))
    expected = {
        "g": (batch, tokens, value_heads),
        "beta": (batch, tokens, value_heads),
        "A_log": (value_heads,),
        "dt_bias": (value_heads,),
        "do": (batch, tokens, value_heads, head_dim_v),
    }
    if call.cu_seqlens is None or (isinstance(call.cu_seqlens, Tensor) and call.cu_seqlens.dim() == 1):
        expected |= {"initial_state": call.state_shape, "dht": call.state_shape}
        if call.state_indices is not None and isinstance(call.initial_state, Tensor):  # a pool of any number of slots
            expected["initial_state"] = (call.initial_state.shape[0], *call.state_shape[1:])
    layouts = {
        "g": "[B, T, HV]",
        "beta": "[B, T, HV]",
        "A_log": "[HV]",
        "dt_bias": "[HV]",
        "do": "[B, T, HV, V]",
        "initial_state": "[N, HV, V, K]" if call.state_v_first else "[N, HV, K, V]",
        "dht": "[N, HV, V, K]" if call.state_v_first else "[N, HV, K, V]",
    }
    for name, shape in expected.items():
        if name in sound and tuple(getattr(call, name).shape) != tuple(shape):
            text = f"{name}: must have shape {layouts[name]} = {list(shape)}, got {_shape(getattr(call, name))}"
            problems.append((ValueError, text))
    return problems


# -------------------------------------------------------------------------------------------------------------- options


def _find_option_problems(call: Call) -> list[Problem]:
    problems: list[Problem] = []
    for name in FLAGS:
        value = getattr(call, name)
        if not (value is None or isinstance(value, (bool, int))):
            problems.append((TypeError, f"{name}: must be True or False, got {type(value).__name__}"))
    if call.allow_neg_eigval and not call.use_beta_sigmoid_in_kernel:
        text = (
            "allow_neg_eigval: needs use_beta_sigmoid_in_kernel=True (it doubles the sigmoid), got False; "
            "a beta that is already in [0, 2] needs no flag"
        )
        problems.append((ValueError, text))
    if call.scale is not None:
        if isinstance(call.scale, bool) or not isinstance(call.scale, (Real, torch.SymFloat)):
            problems.append((TypeError, f"scale: must be a number or None, got {type(call.scale).__name__}"))
        elif not abs(call.scale) <= sys.float_info.max:
            problems.append((ValueError, f"scale: must be finite, got {call.scale}"))
    if call.chunk_size not in CHUNK_SIZES:
        problems.append((ValueError, f"chunk_size: must be one of {list(CHUNK_SIZES)}, got {call.chunk_size!r}"))
    if not isinstance(call.context_parallel, (bool, str)) or call.context_parallel not in ("auto", True, False):
        text = f'context_parallel: must be "auto", True or False, got {call.context_parallel!r}'
        problems.append((ValueError, text))
    if call.cp_threshold is not None:
        if isinstance(call.cp_threshold, bool) or not isinstance(call.cp_threshold, (Real, torch.SymFloat)):
            text = f"cp_threshold: must be a number or None, got {type(call.cp_threshold).__name__}"
            problems.append((TypeError, text))
        elif not -sys.float_info.max <= call.cp_threshold < 0:
            text = f"cp_threshold: must be a negative log decay or None, got {call.cp_threshold}"
            problems.append((ValueError, text))
    for name, reason in RESERVED.items():
        if getattr(call, name) is not None:
            problems.append(
                (NotImplementedError, f"{name}: must be None, got {type(getattr(call, name)).__name__}: {reason}")
            )
    if call.backend not in BACKENDS:
        problems.append((ValueError, f"backend: must be one of {list(BACKENDS)}, got {call.backend!r}"))
    elif call.backend in ("hopper", "fla") and isinstance(call.q, Tensor) and call.q.device.type != "cuda":
        text = f'backend: "{call.backend}" needs tensors on a CUDA device, got {call.q.device}'
        problems.append((NotImplementedError, text))
    return problems


# ------------------------------------------------------------------------------------------------------------ sequences


def _find_sequence_problems(call: Call) -> list[Problem]:
    if call.plan is not None and not isinstance(call.plan, Plan):
        return [
            (TypeError, f"plan: must be a flashqla.Plan, got {type(call.plan).__name__}"),
            *_find_offset_problems(call),
        ]
    problems = _find_offset_problems(call)
    if problems or not all(isinstance(tensor, Tensor) and tensor.dim() == 4 for tensor in (call.q, call.v)):
        return problems
    if call.plan is not None:
        if call.context_parallel is False and call.plan.segment_chunks:
            text = (
                f"was made with segments of {call.plan.segment_chunks} chunks, this call has context_parallel = False"
            )
            problems.append((ValueError, f"plan: {text}"))
        shape = None if call.cu_seqlens is None else call.cu_seqlens.shape
        problems += [(ValueError, f"plan: {text}") for text in call.plan.mismatches(call.q.shape, call.v.shape, shape)]
    if not problems:
        problems = _find_value_problems(call)
    return problems


def _find_offset_problems(call: Call) -> list[Problem]:
    """Rank, dtype and place of cu_seqlens and its host copy: checked on every call, at no cost."""
    problems: list[Problem] = []
    if call.cu_seqlens is None:
        if call.cu_seqlens_cpu is not None:
            problems.append(
                (ValueError, "cu_seqlens_cpu: is the host copy of cu_seqlens, which must be given too, got None")
            )
        return problems
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        tensor = getattr(call, name)
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            problems.append((TypeError, f"{name}: must be a tensor, got {type(tensor).__name__}"))
            continue
        if tensor.dtype not in (torch.int32, torch.int64):
            problems.append((TypeError, f"{name}: must have dtype torch.int32 or torch.int64, got {tensor.dtype}"))
        if tensor.dim() != 1 or tensor.shape[0] < 1:
            problems.append((ValueError, f"{name}: must have shape [N + 1], got {_shape(tensor)}"))
    if problems:
        return problems
    if isinstance(call.q, Tensor) and call.q.dim() == 4:
        if call.q.shape[0] != 1:
            problems.append((ValueError, f"q: must have batch size 1 with cu_seqlens, got {call.q.shape[0]}"))
        if call.cu_seqlens.device not in (call.q.device, torch.device("cpu")):
            text = f"cu_seqlens: must be on {call.q.device} like q, or on the CPU, got {call.cu_seqlens.device}"
            problems.append((ValueError, text))
    copy = call.cu_seqlens_cpu
    if copy is not None and copy.device.type != "cpu":
        problems.append((ValueError, f"cu_seqlens_cpu: must be on the CPU, got {copy.device}"))
    if copy is not None and copy.shape != call.cu_seqlens.shape:
        text = f"cu_seqlens_cpu: must have shape {_shape(call.cu_seqlens)} like cu_seqlens, got {_shape(copy)}"
        problems.append((ValueError, text))
    return problems


def _find_value_problems(call: Call) -> list[Problem]:
    """Values of cu_seqlens, where they can be read without waiting for the device; under FLASHQLA_DEBUG=1 everywhere.

    While a graph is traced no values exist; the operator checks them when it runs.
    """
    if torch.compiler.is_compiling() or call.cu_seqlens is None or call.cu_seqlens.device.type == "meta":
        return []
    offsets = host_offsets(call)
    if debug_enabled():
        truth = call.cu_seqlens.tolist()
        if offsets is not None and offsets.tolist() != truth:
            return [(ValueError, f"cu_seqlens_cpu: must equal cu_seqlens = {truth}, got {offsets.tolist()}")]
        offsets = call.cu_seqlens
    if offsets is None:
        return []
    try:
        lengths = sequence_lengths(offsets.tolist(), call.q.shape[1])
    except ValueError as wrong:
        return [(ValueError, str(wrong))]
    if call.plan is not None and call.plan.lengths is not None and call.plan.lengths != lengths:
        return [(ValueError, f"plan: was made for lengths {list(call.plan.lengths)}, this call has {list(lengths)}")]
    return []


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
