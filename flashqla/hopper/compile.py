"""The kernels' variants, and how they are compiled: the table, nvcc, the cache, and `python -m flashqla warmup`.

What changes from call to call (tokens, heads, sequences, scale, strides) is dynamic; `VARIANTS` lists every combination
of what is not. Kernels are compiled on first use, or ahead of time by `warmup`, on a machine with or without a GPU.
TileLang keeps them on disk: it writes an entry elsewhere, checksums it and renames it into place, so that a process
killed in the middle, or several compiling the same kernel, leave a whole entry or none; a broken one is built again.

Importing this module imports no compiler, and kernels that lie in the cache need none.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import itertools
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

TARGET = {"kind": "cuda", "arch": "sm_90a"}
DTYPES = ("bfloat16", "float16")
NO_NVCC = (
    "no CUDA compiler: set CUDA_HOME, put nvcc on PATH (conda-forge: cuda-nvcc), or "
    'pip install "nvidia-cuda-nvcc>=13" nvidia-cuda-cccl'
)
logger = logging.getLogger("flashqla")


class CompileError(RuntimeError):
    """A kernel could not be compiled; the message is one line, the compiler's own words are its cause."""


# ---- the table


@dataclass(frozen=True)
class Budget:
    """What one variant may use of an SM: what lets `ctas_per_sm` CTAs of `threads` threads share it.

    `spill_bytes` are allowed of stores, and as many of loads, but only `main_loop_spills` instructions in the main loop
    (that with most wgmmas) and `side_loop_spills` in a loop of another warpgroup that also has some. `wgmma`: whether
    there are any.
    """

    threads: int
    ctas_per_sm: int = 1
    spill_bytes: int = 0
    main_loop_spills: int = 0
    side_loop_spills: int = 0
    wgmma: bool = True

    @property
    def registers(self) -> int:
        """Of a thread at launch: an SM has 65536, dealt out in eights."""
        return min(65536 // (self.threads * self.ctas_per_sm) // 8 * 8, 255)

    @property
    def shared_memory(self) -> int:
        """Bytes of a CTA, static and dynamic: an SM has 228 KB, and keeps 1 KB a CTA to itself."""
        return 228 * 1024 // self.ctas_per_sm - 1024


@dataclass(frozen=True)
class Variant:
    """One kernel with one choice of everything that is fixed when it is compiled.

    Args:
        kernel: name of the kernel and of its module in `flashqla.hopper`.
        options: (name, value) pairs: the arguments of the module's `build`.
    """

    kernel: str
    options: tuple[tuple[str, Any], ...]

    def __getitem__(self, option: str) -> Any:
        return dict(self.options)[option]

    @property
    def name(self) -> str:
        """`chunk_forward dtype=bfloat16 head_dim_k=128 ...`"""
        return " ".join([self.kernel, *(f"{option}={value}" for option, value in self.options)])

    @property
    def common(self) -> bool:
        """Whether most models need it: head dimensions of 128, and g in fp32."""
        sizes = (value for option, value in self.options if option.startswith("head_dim"))
        return all(size == 128 for size in sizes) and dict(self.options).get("gate_dtype", "float32") == "float32"

    @property
    def budget(self) -> Budget:
        """Its documented budget; `resources.violations` holds the compiler to it."""
        if self.kernel == "chunk_forward" and self["block_dv"] == 128:
            # The scores warpgroup, with 72 registers, reloads addresses that do not change; producers, with 24, spill.
            return Budget(threads=512, spill_bytes=256, side_loop_spills=16)
        if self.kernel == "chunk_forward":
            return Budget(threads=384)
        if self.kernel == "segment_states":
            return Budget(threads=256, ctas_per_sm=2)
        if self.kernel == "segment_scan":
            return Budget(threads=128, wgmma=False)
        if self.kernel == "segment_order":
            return Budget(threads=512, wgmma=False)
        if self.kernel == "backward_chains":
            # As in chunk_forward, and one address of the gradient's chain that never changes.
            narrow = self["block_dv"] == 64
            return (
                Budget(threads=384, spill_bytes=96)
                if narrow
                else Budget(threads=512, spill_bytes=320, main_loop_spills=1, side_loop_spills=16)
            )
        if self.kernel == "backward_chunk":
            # Sums, products and an operand take 144 of 160 registers; addresses and a few of the sums are reloaded.
            return Budget(threads=512, spill_bytes=192, main_loop_spills=6, side_loop_spills=24)
        if self.kernel == "recurrent":
            ctas = self.module.ctas_per_sm(self["dtype"], self["head_dim_k"], self["state_v_first"])
            return Budget(threads=128, ctas_per_sm=ctas, wgmma=False)
        return Budget(threads=128, ctas_per_sm=self.module.ctas_per_sm(self["head_dim"], self["heads"]))

    @property
    def module(self) -> Any:
        """The kernel's module: `build` and `PASS_CONFIGS`. Imports TileLang."""
        return importlib.import_module(f"flashqla.hopper.{self.kernel}")

    def build(self) -> Any:
        """The TileLang PrimFunc."""
        return self.module.build(**dict(self.options))


def _table() -> Iterable[Variant]:
    head_dims_and_block = ((128, 128, 128), (128, 128, 64), (64, 64, 64), (128, 64, 64), (64, 128, 128), (64, 128, 64))
    for dtype, (k, v, block) in itertools.product(DTYPES, head_dims_and_block):
        options = {"dtype": dtype, "head_dim_k": k, "head_dim_v": v, "block_dv": block}
        for kernel in ("chunk_forward", "backward_chains"):
            yield Variant(kernel, tuple(options.items()))
    for dtype, k, v in itertools.product(DTYPES, (128, 64), (128, 64)):
        yield Variant("segment_states", (("dtype", dtype), ("head_dim_k", k), ("head_dim_v", v)))
    for k, v in itertools.product((128, 64), repeat=2):
        yield Variant("segment_scan", (("head_dim_k", k), ("head_dim_v", v)))
    yield Variant("segment_order", ())
    gate_dtypes = ("float32", "bfloat16")
    for dtype, k, v, beta in itertools.product(DTYPES, (128, 64), (128, 64), gate_dtypes):
        options = {"dtype": dtype, "head_dim_k": k, "head_dim_v": v, "beta_dtype": beta}
        yield Variant("backward_chunk", tuple(options.items()))
    for dtype, k, heads, g, beta in itertools.product(DTYPES, (128, 64), (4, 2, 1), gate_dtypes, gate_dtypes):
        options = {"dtype": dtype, "head_dim": k, "heads": heads, "gate_dtype": g, "beta_dtype": beta}
        yield Variant("gated_inverse", tuple(options.items()))
    for dtype, k, v, v_first in itertools.product(DTYPES, (128, 64), (128, 64), (False, True)):
        options = {"dtype": dtype, "head_dim_k": k, "head_dim_v": v, "state_v_first": v_first}
        yield Variant("recurrent", tuple(options.items()))


VARIANTS = tuple(_table())
"""Every variant that the library can launch."""

_BY_OPTIONS = {(variant.kernel, frozenset(variant.options)): variant for variant in VARIANTS}


def find_variant(kernel: str, **options: Any) -> Variant:
    """The entry of `VARIANTS` with these options, in any order; ValueError if there is none."""
    try:
        return _BY_OPTIONS[kernel, frozenset(options.items())]
    except KeyError:
        raise ValueError(f"no such variant: {Variant(kernel, tuple(options.items())).name}") from None


def select(dtypes: Sequence[str] | None = None, all_variants: bool = False) -> list[Variant]:
    """The variants that `warmup` compiles: the common ones in bfloat16, unless told other dtypes, or all."""
    dtypes = dtypes or (DTYPES if all_variants else DTYPES[:1])
    return [
        variant
        for variant in VARIANTS
        if dict(variant.options).get("dtype", dtypes[0]) in dtypes and (all_variants or variant.common)
    ]


# ---- the compiler and the cache


def find_nvcc() -> Path | None:
    """The CUDA compiler: of CUDA_HOME or CUDA_PATH, on PATH, of the pip package nvidia-cuda-nvcc, of /usr/local."""
    places = [Path(os.environ[name], "bin", "nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if on_path := shutil.which("nvcc"):
        places.append(Path(on_path))
    places += packaged("nvidia-cuda-nvcc", "nvcc")
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((place for place in places if place.is_file()), None)


def packaged(distribution: str, tool: str) -> list[Path]:
    """Where a pip package has put `bin/<tool>`; empty where it is not installed."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(file.locate()) for file in files if file.parts[-2:] == ("bin", tool)]


@functools.cache
def wrong_companion() -> str | None:
    """One line if the installed TileLang is not the one that this package was made for; None if it is."""
    try:
        needed = importlib.metadata.requires("flashqla") or []
        found = importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        return None  # a source tree without installation, or no TileLang, which the import will say
    exact = next((match[1] for text in needed if (match := re.match(r"tilelang\s*==\s*([\w.]+)", text))), None)
    if exact is None or found.split("+")[0] == exact:
        return None
    return f'the kernels need tilelang {exact}, installed is {found}: pip install "tilelang=={exact}"'


def require_nvcc() -> Path:
    """The CUDA compiler, which TileLang will use from now on; CompileError where there is none."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise CompileError(NO_NVCC)
    from tilelang.contrib import nvcc as tilelang_nvcc

    # TileLang stops looking at a CUDA_HOME without a compiler, and looks but once, when it is imported.
    tilelang_nvcc.CUDA_HOME = str(nvcc.parent.parent)
    return nvcc


def cache_folder() -> Path:
    """Where TileLang keeps compiled kernels: TILELANG_CACHE_DIR, or ~/.tilelang/cache."""
    return Path(os.environ.get("TILELANG_CACHE_DIR") or Path.home() / ".tilelang" / "cache")


def describe_cache() -> str:
    """Where compiled kernels are kept, and how many lie there, of whatever library."""
    if os.environ.get("TILELANG_DISABLE_CACHE", "0").lower() in ("1", "true", "yes", "on"):
        return "switched off by TILELANG_DISABLE_CACHE"
    return f"{cache_folder()} ({len(list(cache_folder().glob('*/*/kernels/*')))} kernels)"


@functools.cache
def shortage() -> list[str]:
    """Why this process can have no kernel at all: no compiler, and nothing in the cache. Empty otherwise."""
    if find_nvcc() is not None or any(cache_folder().glob("*/*/kernels/*")):
        return []
    return [f"{NO_NVCC}; and no compiled kernel lies in {cache_folder()}"]


# ---- compiling

_kernels: dict[Variant, Callable] = {}
_failures: dict[Variant, str] = {}  # an attempt takes seconds: one a process is enough
_locks: dict[Variant, threading.Lock] = {}
_lock = threading.Lock()  # of the two above and of the count
_builds = 0
_current: ContextVar[tuple[Variant, str] | None] = ContextVar("variant being compiled, and a remark", default=None)


@functools.cache
def kernel(name: str, **options: Any) -> Callable:
    """The kernel to launch: `kernel("chunk_forward", dtype="bfloat16", head_dim_k=128, ...)`, see `VARIANTS`."""
    return compiled(find_variant(name, **options))


def compiled(variant: Variant, remark: str = "") -> Callable:
    """The variant as TileLang's callable: from memory, from the cache on disk, or freshly compiled.

    Threads that ask for the same variant wait for one of them to compile it.

    Args:
        variant: what to compile.
        remark: goes into the log line of a compilation.

    Raises:
        CompileError: if there is no compiler, or it refuses the kernel.
    """
    with _lock:
        lock = _locks.setdefault(variant, threading.Lock())
    with lock:
        if variant in _failures:
            raise CompileError(_failures[variant])
        if variant not in _kernels:
            try:
                _kernels[variant] = _load_or_compile(variant, remark)
            except CompileError as error:
                _failures[variant] = str(error)
                raise
        return _kernels[variant]


def builds() -> int:
    """How many kernels this process has compiled. Those found in the cache do not count."""
    return _builds


def _load_or_compile(variant: Variant, remark: str) -> Callable:
    if wrong := wrong_companion():
        raise CompileError(wrong)
    import tilelang
    from tilelang.instrumentation import register_pass_instrumentation_tool

    register_pass_instrumentation_tool("flashqla", _compilation_begins)
    token = _current.set((variant, remark))
    try:
        return tilelang.compile(
            variant.build(), target=TARGET, execution_backend="tvm_ffi", pass_configs=variant.module.PASS_CONFIGS
        )
    except RuntimeError as error:
        if isinstance(error, CompileError):
            raise
        raise CompileError(f"{variant.name} does not compile: {first_error(str(error))}") from error
    finally:
        _current.reset(token)


def _compilation_begins() -> Any:
    """TileLang calls this, in the same thread, when it has found nothing in its cache."""
    global _builds
    from tilelang.instrumentation import PassInstrumentationTool

    if (current := _current.get()) is not None:
        variant, remark = current
        nvcc = require_nvcc()
        with _lock:
            _builds += 1
            left = sum(common not in _kernels for common in select())
        remark = remark or f"on demand; {left} of the {len(select())} common kernels are not loaded, see warmup"
        logger.info("compiling %s (%s) with %s; cache: %s", variant.name, remark, nvcc, cache_folder())
    return PassInstrumentationTool()


def first_error(text: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    if "nv/target: No such file" in text:
        return "this nvcc lacks the CUDA C++ core libraries (pip install nvidia-cuda-cccl)"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it says nothing"]
    return next((line for line in lines if re.search(r"\b(error|fatal)\s*: ", line)), lines[-1])


def in_parallel(function: Callable, variants: Sequence[Variant], workers: int | None, title: str) -> list:
    """`function(variant, "1 of 8")` for each variant, on `workers` threads (default: a CPU each), with a progress bar.

    The first failure is raised when the calls under way have ended; no further ones begin.
    """
    workers = workers or min(len(os.sched_getaffinity(0)), max(len(variants), 1))
    pool = ThreadPoolExecutor(workers, thread_name_prefix="flashqla-compile")
    try:
        futures = [
            pool.submit(function, variant, f"{number} of {len(variants)}")
            for number, variant in enumerate(variants, start=1)
        ]
        for future in tqdm(as_completed(futures), total=len(futures), desc=title, unit="kernel"):
            future.result()
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)


def warmup(
    dtypes: Sequence[str] | None = None, all_variants: bool = False, workers: int | None = None
) -> list[Variant]:
    """Compile what `select` gives into the cache, so that no later call compiles; returns the variants.

    Args:
        dtypes: "bfloat16", "float16" or both; None: bfloat16, or with `all_variants` both.
        all_variants: also head dimensions of 64 and gates in bfloat16.
        workers: compilations at a time; None: one a CPU.

    Raises:
        CompileError: if a kernel does not compile or cannot be saved.
    """
    variants = select(dtypes, all_variants)
    kernels = in_parallel(compiled, variants, workers, "compiling")
    if lost := sum(not _is_saved(kernel) for kernel in kernels):
        raise CompileError(f"{lost} of {len(kernels)} kernels are not in the cache, which is {describe_cache()}")
    return variants


def export(variants: Sequence[Variant], folder: str | os.PathLike) -> Path:
    """Copy compiled variants into a folder that serves as a cache of its own: the way to machines without nvcc.

    Kernels hold machine code, so a copy is all that it takes; `TILELANG_CACHE_DIR=folder` points at it there, with the
    same version of TileLang and of this package. What lies in the folder already stays.

    Raises:
        CompileError: if a variant is neither in the cache nor can be compiled.
    """
    folder = Path(folder)
    for variant in variants:
        entry = Path(getattr(compiled(variant), "_tilelang_cache_path"))  # noqa: B009 (not in the type)
        inside = entry.relative_to(cache_folder().resolve() if entry.is_absolute() else cache_folder())
        staged = folder / inside.parent / f".{inside.name}.{os.getpid()}"
        if not (folder / inside).is_dir():
            shutil.copytree(entry, staged)
            with contextlib.suppress(FileExistsError):
                staged.rename(folder / inside)  # whole or not at all
            shutil.rmtree(staged, ignore_errors=True)
    return folder


def _is_saved(kernel: Callable) -> bool:
    """TileLang goes on when it cannot write to its cache."""
    folder = getattr(kernel, "_tilelang_cache_path", None)
    return folder is not None and Path(folder).is_dir()
