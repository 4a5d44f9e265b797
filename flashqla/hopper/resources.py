"""What the compiled kernels use (registers, spills, shared memory, instructions), and what the compiler complains of.

`resources` compiles one variant afresh, without a GPU and past the cache; `violations` compares it with the budget in
`flashqla.hopper.compile`. Spills are sought in the machine code where a disassembler is at hand (`find_disassembler`).
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..console import table
from .compile import TARGET, CompileError, Variant, find_nvcc, first_error, in_parallel, packaged, require_nvcc

INSTRUCTIONS = ("HGMMA", "HMMA", "LDSM", "STSM", "UTMALDG", "UTMASTG", "BAR", "SYNCS")
"""What the report counts in the machine code."""

# SASS: label, or address, predicate, operation, operands
_LINE = re.compile(r"(\.L_x_\w+):|/\*([0-9a-f]{4,})\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_ENDS = ("BRA", "EXIT", "RET", "BRX", "JMP", "JMX")  # without a predicate nothing falls through


@dataclass(frozen=True)
class Resources:
    """Of one compiled variant.

    Attributes:
        threads: of a CTA.
        registers: of a thread at launch.
        spill_stores, spill_loads: bytes a thread, anywhere in the kernel.
        static_shared, dynamic_shared: bytes of a CTA.
        wgmma: asynchronous tensor core instructions in the PTX.
        serialised: ptxas' lines C75xx: it made a wgmma wait where the source does not.
        sass: how often each of `INSTRUCTIONS` stands in the machine code; None without a disassembler.
        loop_spills: spilled loads and stores in each loop that holds an HGMMA, first in the main loop, which holds most
            of them. None without a disassembler.
    """

    threads: int
    registers: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    dynamic_shared: int
    wgmma: int
    serialised: tuple[str, ...]
    sass: dict[str, int] | None
    loop_spills: tuple[int, ...] | None

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.static_shared + self.dynamic_shared


def violations(variant: Variant, used: Resources) -> list[str]:
    """Where a variant breaks its budget or one of the rules; empty when all is well."""
    budget = variant.budget
    limits = [
        ("threads", used.threads, budget.threads),
        ("registers", used.registers, budget.registers),
        ("bytes of shared memory", used.shared, budget.shared_memory),
        ("bytes of spill stores", used.spill_stores, budget.spill_bytes),
        ("bytes of spill loads", used.spill_loads, budget.spill_bytes),
    ]
    if used.loop_spills:
        limits.append(("spills in the main loop", used.loop_spills[0], budget.main_loop_spills))
        limits += [("spills in a side loop", spills, budget.side_loop_spills) for spills in used.loop_spills[1:]]
    broken = [f"{value} {what}, allowed are {limit}" for what, value, limit in limits if value > limit]
    broken += [f"serialised wgmma: {line}" for line in used.serialised]
    if budget.wgmma and used.wgmma == 0:
        broken.append("no wgmma")
    if budget.wgmma and used.sass is not None and used.sass["HGMMA"] == 0:
        broken.append("no HGMMA")
    return broken


@functools.cache
def resources(variant: Variant) -> Resources:
    """Compile a variant for sm_90a and measure it; CompileError as `compile.compiled`."""
    source, threads, dynamic_shared = lower(variant)
    with tempfile.TemporaryDirectory(prefix="flashqla-") as folder:
        log = run_nvcc(source, Path(folder), variant)
        ptx = (Path(folder) / "kernel.ptx").read_text()
        sass = disassemble(Path(folder) / "kernel.cubin")
    return Resources(
        threads=threads,
        **parse_ptxas(log),
        dynamic_shared=dynamic_shared,
        wgmma=ptx.count("wgmma.mma_async"),
        sass=None if sass is None else count_instructions(sass),
        loop_spills=None if sass is None else loop_spills(sass),
    )


def lower(variant: Variant) -> tuple[str, int, int]:
    """CUDA source, threads and bytes of dynamic shared memory, all as TileLang makes them before it calls nvcc."""
    import tilelang.engine
    from tilelang import tvm

    with tvm.transform.PassContext(opt_level=3, config=variant.module.PASS_CONFIGS), tvm.target.Target(TARGET):
        artifact = tilelang.engine.lower(variant.build(), target=TARGET)
    (function,) = artifact.device_mod.functions.values()
    threads = int(function.attrs["thread_extent"]["threadIdx.x"])
    return artifact.kernel_source, threads, int(function.attrs.get("dyn_shared_memory_buf", 0))


def run_nvcc(source: str, folder: Path, variant: Variant) -> str:
    """Compile to `kernel.cubin` with TileLang's own options, keep `kernel.ptx`; returns what ptxas says."""
    import tilelang

    (folder / "kernel.cu").write_text(source)
    options = ["-std=c++20", f"-I{tilelang.env.TILELANG_TEMPLATE_PATH}", f"-I{tilelang.env.CUTLASS_INCLUDE_DIR}"]
    if variant.module.PASS_CONFIGS.get(tilelang.PassConfigKey.TL_ENABLE_FAST_MATH):
        options.append("--use_fast_math")
    command = [require_nvcc(), "--cubin", "-O3", "-lineinfo", f"-arch={TARGET['arch']}", *options]
    command += ["--ptxas-options=--verbose", "-w", "--keep", "--keep-dir", folder, "-o", folder / "kernel.cubin"]
    ran = subprocess.run([*command, folder / "kernel.cu"], capture_output=True, text=True, cwd=folder)
    log = ran.stdout + ran.stderr
    if ran.returncode:
        raise CompileError(f"{variant.name} does not compile: {first_error(log)}") from RuntimeError(log)
    return log


def parse_ptxas(log: str) -> dict:
    """The figures and complaints of `ptxas --verbose` on one kernel, functions that it calls included."""

    def figures(pattern: str) -> list[int]:
        return [int(figure) for figure in re.findall(pattern, log)]

    return dict(
        registers=max(figures(r"Used (\d+) registers")),
        spill_stores=sum(figures(r"(\d+) bytes spill stores")),
        spill_loads=sum(figures(r"(\d+) bytes spill loads")),
        static_shared=sum(figures(r"(\d+) bytes smem")),
        serialised=tuple(line.strip() for line in log.splitlines() if re.search(r"\bC75\d\d\b", line)),
    )


def find_disassembler() -> Path | None:
    """nvdisasm: on PATH, beside nvcc, of the pip package nvidia-cuda-nvdisasm, or of Triton."""
    places = [Path(found)] if (found := shutil.which("nvdisasm")) else []
    if nvcc := find_nvcc():
        places.append(nvcc.parent / "nvdisasm")
    places += packaged("nvidia-cuda-nvdisasm", "nvdisasm")
    if triton := importlib.util.find_spec("triton"):
        places.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm")
    return next((place for place in places if place.is_file()), None)


def disassemble(cubin: Path) -> str | None:
    """The machine code as text, None without a disassembler."""
    nvdisasm = find_disassembler()
    if nvdisasm is None:
        return None
    return subprocess.run([nvdisasm, "--print-code", cubin], capture_output=True, text=True, check=True).stdout


def count_instructions(sass: str) -> dict[str, int]:
    """How often each of `INSTRUCTIONS` stands in the machine code."""
    counts = Counter(match[4].split(".")[0] for match in _LINE.finditer(sass) if match[4])
    return {name: counts[name] for name in INSTRUCTIONS}


def loop_spills(sass: str) -> tuple[int, ...]:
    """Loads and stores of spilled registers in each loop that holds an HGMMA, the one with most of these first.

    Loops are the cycles of the control flow graph: code that the compiler has moved out of line is where it belongs.
    """
    steps, labels = [], {}
    for match in _LINE.finditer(sass):
        label, _, predicate, operation, operands = match.groups()
        if label:
            labels[label] = len(steps)
        else:
            steps.append((predicate, operation, operands))
    following = []
    for here, (predicate, operation, operands) in enumerate(steps):
        ends = operation.split(".")[0] in _ENDS and predicate is None and not operation.startswith("BRA.DIV")
        targets = [here + 1] if not ends and here + 1 < len(steps) else []
        if operation.startswith(("BRA", "CALL")) and (label := re.search(r"\.L_x_\w+", operands)):
            targets.append(labels[label[0]])
        following.append(targets)
    loops = []
    for loop in cycles(following):
        operations = Counter(steps[here][1].split(".")[0] for here in loop)
        if operations["HGMMA"]:
            loops.append((operations["HGMMA"], operations["STL"] + operations["LDL"]))
    return tuple(spills for _, spills in sorted(loops, reverse=True))


def cycles(following: Sequence[Sequence[int]]) -> list[list[int]]:
    """The strongly connected components of more than one node (Kosaraju)."""
    preceding: list[list[int]] = [[] for _ in following]
    for here, targets in enumerate(following):
        for target in targets:
            preceding[target].append(here)

    def walk(start: int, graph: Sequence[Sequence[int]], seen: set[int]) -> list[int]:
        """What is reached from start and was not seen before, each node after all that it reaches first."""
        seen.add(start)
        order, stack = [], [(start, iter(graph[start]))]
        while stack:
            node, targets = stack[-1]
            target = next((target for target in targets if target not in seen), None)
            if target is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(target)
                stack.append((target, iter(graph[target])))
        return order

    seen: set[int] = set()
    order = [node for start in range(len(following)) if start not in seen for node in walk(start, following, seen)]
    seen = set()
    components = [walk(start, preceding, seen) for start in reversed(order) if start not in seen]
    return [component for component in components if len(component) > 1]


def report(variants: Sequence[Variant], workers: int | None = None) -> tuple[str, bool]:
    """The table of all that is measured, and whether every variant keeps to its budget."""
    measured = in_parallel(lambda variant, _: resources(variant), variants, workers, "measuring")
    header = ("variant", "registers", "spill bytes", "in loops", "shared KB", "wgmma", *INSTRUCTIONS, "verdict")
    rows, broken = [], []
    for variant, used in zip(variants, measured, strict=True):
        faults = violations(variant, used)
        broken += [f"{variant.name}: {fault}" for fault in faults]
        budget = variant.budget
        rows.append(
            (
                variant.name,
                f"{used.registers}/{budget.registers}",
                f"{used.spill_stores}+{used.spill_loads}/{budget.spill_bytes}",
                "-" if used.loop_spills is None else "+".join(map(str, used.loop_spills)),
                f"{used.shared / 1024:.0f}/{budget.shared_memory / 1024:.0f}",
                used.wgmma,
                *(["-"] * len(INSTRUCTIONS) if used.sass is None else used.sass.values()),
                "FAILED" if faults else "ok",
            )
        )
    lines = [table(header, rows)]
    if find_disassembler() is None:
        lines.append('columns "-" need a disassembler: pip install nvidia-cuda-nvdisasm')
    return "\n".join(lines + broken), not broken
