"""One input factory and one comparer, shared by tests, notebooks, benchmarks and the self-test."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .backends import device_refusals
from .reference import Result

RECIPES = ("bench", "faults", "correlated")
PER_TOKEN = ("q", "k", "v", "g", "beta")


@dataclass
class Inputs:
    """Arguments of one call and gradients to send back through it. See :func:`inputs`.

    Attributes:
        q, k: ``[B, T, H, K]``; v: ``[B, T, HV, V]``, all in the chosen dtype.
        g, beta: ``[B, T, HV]`` float32 (float64 for float64 inputs).
        initial_state, dht: ``[N, HV, K, V]`` in g's dtype; the state may be None.
        cu_seqlens: ``[N + 1]`` int32, or None.
        do: ``[B, T, HV, V]`` in the chosen dtype.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    do: Tensor
    dht: Tensor

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Keyword arguments of :func:`flashqla.chunk_gated_delta_rule`, with changes and additions."""
        names = (*PER_TOKEN, "initial_state", "cu_seqlens")
        return {name: getattr(self, name) for name in names} | changes

    def requires_grad(self) -> Inputs:
        """The same values as leaves that ask for gradients."""
        names = (*PER_TOKEN, "initial_state")
        leaves = {
            name: getattr(self, name).detach().clone().requires_grad_()
            for name in names
            if getattr(self, name) is not None
        }
        return dataclasses.replace(self, **leaves)

    def to(self, *arguments: Any) -> Inputs:
        """All floating tensors by ``Tensor.to(*arguments)``; offsets only change device."""

        def move(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            moved = tensor.to(*arguments)
            return moved if tensor.is_floating_point() else tensor.to(moved.device)

        return Inputs(*(move(getattr(self, field.name)) for field in dataclasses.fields(self)))


def inputs(
    batch: int = 1,
    tokens: int = 128,
    heads: int = 2,
    value_heads: int = 4,
    head_dim_k: int = 64,
    head_dim_v: int = 64,
    *,
    recipe: str = "bench",
    gate: float | None = None,
    lengths: Sequence[int] | None = None,
    initial_state: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Reproducible inputs, made on the CPU so that every device gets the same numbers.

    Args:
        recipe: q and k are l2-normalised normal numbers and v is normal in all of them.
            "bench": ``g = logsigmoid(randn) / 16`` with a random quarter of the value heads at 0, ``beta =
                sigmoid(randn)``.
            "faults": ``g = -0.1 rand``, ``beta = rand``.
            "correlated": as "bench", with keys that share one direction (cosine of any two about 0.9) and beta near 1,
                so that the
            triangular system is far from the identity.
        gate: this log decay on every token instead of the recipe's.
        lengths: lengths of packed sequences, with ``batch == 1``; they may add up to less than ``tokens``, the rest is
            padding.
        initial_state: whether to make one.
        dtype: of q, k, v and do; the other tensors are float32, or float64 for float64.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe: must be one of {list(RECIPES)}, got {recipe!r}")
    generator = torch.Generator().manual_seed(seed)
    precise = torch.float64 if dtype == torch.float64 else torch.float32

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=precise)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=precise)

    num_sequences = batch if lengths is None else len(lengths)
    per_token = (batch, tokens, value_heads)
    q, k = randn(batch, tokens, heads, head_dim_k), randn(batch, tokens, heads, head_dim_k)
    if recipe == "correlated":
        k = k + 3 * head_dim_k**0.5 * F.normalize(randn(batch, 1, heads, head_dim_k), dim=-1)
    v = randn(*per_token, head_dim_v)
    if recipe == "faults":
        g, beta = -0.1 * rand(*per_token), rand(*per_token)
    else:
        g, beta = F.logsigmoid(randn(*per_token)) / 16, torch.sigmoid(randn(*per_token) + 4 * (recipe == "correlated"))
        g[..., torch.randperm(value_heads, generator=generator)[: value_heads // 4]] = 0
    if gate is not None:
        g = torch.full_like(g, gate)
    state_shape = (num_sequences, value_heads, head_dim_k, head_dim_v)
    state, do, dht = randn(*state_shape), randn(*per_token, head_dim_v), randn(*state_shape)
    offsets = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    made = Inputs(
        q=F.normalize(q, dim=-1).to(dtype),
        k=F.normalize(k, dim=-1).to(dtype),
        v=v.to(dtype),
        g=g,
        beta=beta,
        initial_state=state if initial_state else None,
        cu_seqlens=offsets,
        do=do.to(dtype),
        dht=dht,
    )
    return made.to(device)


# --------------------------------------------------------------------------------------------------------------- oracle


def oracle64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    initial_state: Tensor | None = None,
    **keywords: Any,
) -> Result:
    """The token loop in float64 on the CPU, on upcast inputs (eq. 1.1 to 1.3, 2.3 to 2.5): what every result is judged
    by.

    Takes the arguments of :func:`flashqla.chunk_gated_delta_rule` that change the result, and is differentiable by
    autograd.
    """

    def exact(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to("cpu", torch.float64)

    q, k, v, g, beta, A_log, dt_bias = (exact(tensor) for tensor in (q, k, v, g, beta, A_log, dt_bias))
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if use_gate_in_kernel:
        g = A_log.exp() * F.logsigmoid(-(g if dt_bias is None else g + dt_bias))  # softplus is linear beyond 20
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
    return reference.recurrent(q, k, v, g, beta, initial_state=exact(initial_state), **keywords)


def outcome(function: Callable, made: Inputs, **options: Any) -> dict[str, Tensor]:
    """Forward and backward of one call by ``function``: :func:`flashqla.chunk_gated_delta_rule`, :func:`oracle64` or a
    rival.

    ``made.do`` and ``made.dht`` are sent back. With ``state_v_first=True`` the states of ``made`` are transposed first.

    Returns:
        ``o``, ``final_state`` and one gradient, ``d<name>``, for every tensor among the arguments that is not an
        offset.
    """
    if options.get("state_v_first"):
        initial_state = None if made.initial_state is None else made.initial_state.mT.contiguous()
        made = dataclasses.replace(made, initial_state=initial_state, dht=made.dht.mT.contiguous())
    options = {
        name: value.detach().clone().requires_grad_() if name in ("A_log", "dt_bias") and value is not None else value
        for name, value in options.items()
    }
    arguments = made.requires_grad().arguments(**options)
    o, final_state = function(**arguments, output_final_state=True)
    leaves = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.requires_grad}
    gradients = torch.autograd.grad((o, final_state), leaves.values(), (made.do.to(o), made.dht.to(final_state)))
    named = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"o": o.detach(), "final_state": final_state.detach()} | named


# ------------------------------------------------------------------------------------------------------------ comparing


class Comparison(NamedTuple):
    """How far ``mine`` is from ``library``, in float64 over the elements that are finite in both.

    Attributes:
        relative_l2: norm of the difference over the norm of ``library`` (0 if both are 0).
        worst: largest absolute difference, over the largest absolute element of ``library``.
        worst_index: where it is.
        mine_there, library_there: the two elements.
        cosine: of the two as vectors.
        disagreements: elements where one is NaN or infinite and the other is not the same.
    """

    relative_l2: float
    worst: float
    worst_index: tuple[int, ...]
    mine_there: float
    library_there: float
    cosine: float
    disagreements: int

    def report(self) -> str:
        """Everything, in one line."""
        return (
            f"relative L2 {self.relative_l2:.3e}, worst element {self.worst:.3e} at {list(self.worst_index)} "
            f"({self.mine_there:.6g} against {self.library_there:.6g}), cosine {self.cosine:.6f}, "
            f"{self.disagreements} NaN or infinite elements disagree"
        )


def compare(mine: Tensor, library: Tensor) -> Comparison:
    """Compare two tensors of one shape; the second is the measure.

    Raises:
        ValueError: when the shapes differ.
    """
    if mine.shape != library.shape:
        raise ValueError(f"mine: must have shape {list(library.shape)} like library, got {list(mine.shape)}")
    mine, library = (tensor.detach().to("cpu", torch.float64) for tensor in (mine, library))
    agree = (mine == library) | (mine.isnan() & library.isnan())
    finite = mine.isfinite() & library.isfinite()
    disagreements = int((~finite & ~agree).sum())
    mine, library = mine.where(finite, 0.0), library.where(finite, 0.0)
    if mine.numel() == 0:
        return Comparison(0.0, 0.0, (), 0.0, 0.0, 1.0, 0)
    difference = (mine - library).abs()
    index = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    norms = float(mine.norm() * library.norm())
    return Comparison(
        relative_l2=_ratio(float(difference.norm()), float(library.norm())),
        worst=_ratio(float(difference[index]), float(library.abs().max())),
        worst_index=index,
        mine_there=float(mine[index]),
        library_there=float(library[index]),
        cosine=float((mine * library).sum()) / norms if norms else 1.0,
        disagreements=disagreements,
    )


def check(label: str, mine: Tensor, library: Tensor, limit: float = 1e-5) -> Comparison:
    """Print one line when ``mine`` equals ``library`` within a relative L2 of ``limit``, else raise.

    Elements must also be NaN or infinite in the same places.

    Raises:
        AssertionError: with the full report.
    """
    found = compare(mine, library)
    if not found.relative_l2 <= limit or found.disagreements:
        raise AssertionError(f"{label}: {found.report()} (limit {limit:.0e})")
    print(f"ok  {label}  rel {found.relative_l2:.1e} (limit {limit:.0e})")
    return found


def check_outcome(
    label: str, mine: dict[str, Tensor], library: dict[str, Tensor], limit: float, gradient_limit: float
) -> None:
    """:func:`check` for every tensor of two :func:`outcome`; gradients have a limit of their own."""
    for name, measure in library.items():
        check(f"{label} {name}", mine[name], measure, limit if name in ("o", "final_state") else gradient_limit)


def _ratio(difference: float, size: float) -> float:
    return difference / size if size else (float("inf") if difference else 0.0)


# --------------------------------------------------------------------------------------------------------------- memory


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Inside, ``torch.empty``, ``torch.empty_like`` and ``Tensor.new_empty`` return memory full of NaN (integers: their
    largest value).

    What reads memory before writing it then shows, instead of passing by luck on fresh zeros.
    """

    def poison(allocate: Any) -> Any:
        def allocate_poisoned(*arguments: Any, **keywords: Any) -> Tensor:
            tensor = allocate(*arguments, **keywords)
            if tensor.dtype == torch.bool:
                return tensor
            whole = tensor.is_floating_point() or tensor.is_complex()
            return (
                tensor.detach()
                .fill_(float("nan") if whole else torch.iinfo(tensor.dtype).max)
                .requires_grad_(tensor.requires_grad)
            )

        return allocate_poisoned

    with (
        mock.patch.object(torch, "empty", poison(torch.empty)),
        mock.patch.object(torch, "empty_like", poison(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty)),
    ):
        yield


# ------------------------------------------------------------------------------------------------------------ notebooks


@dataclass(frozen=True)
class NotebookConfig:
    """Sizes of a notebook: small on a CPU, real ones on a GPU.

    Attributes:
        device, dtype: where and in what to compute.
        hopper: whether the Hopper kernels can run here.
        tokens, heads, value_heads, head_dim: T, H, HV and K = V.
    """

    device: torch.device
    dtype: torch.dtype
    hopper: bool
    tokens: int
    heads: int
    value_heads: int
    head_dim: int

    def inputs(self, **changes: Any) -> Inputs:
        """:func:`inputs` of these sizes, with changes."""
        sizes = {"tokens": self.tokens, "heads": self.heads, "value_heads": self.value_heads}
        sizes |= {"head_dim_k": self.head_dim, "head_dim_v": self.head_dim, "dtype": self.dtype, "device": self.device}
        return inputs(**(sizes | changes))

    def needs_hopper(self) -> bool:
        """True on Hopper; elsewhere prints why the cell is skipped and returns False."""
        if not self.hopper:
            print(f"skipped: needs SM90 (here: {self.device.type})")
        return self.hopper


def notebook_config() -> NotebookConfig:
    """The configuration for this machine."""
    if torch.cuda.is_available():
        hopper = not device_refusals(torch.device("cuda", torch.cuda.current_device()))
        return NotebookConfig(
            torch.device("cuda"), torch.bfloat16, hopper, tokens=8192, heads=16, value_heads=64, head_dim=128
        )
    return NotebookConfig(torch.device("cpu"), torch.float32, False, tokens=512, heads=2, value_heads=4, head_dim=64)
