"""The variants keep to their budgets, compile once, and leave a good cache whatever happens. Needs nvcc, but no GPU."""

import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from flashqla.hopper import compile, resources
from flashqla.hopper.compile import VARIANTS, Budget, CompileError, Variant, find_variant, select
from flashqla.hopper.resources import Resources, violations

needs_nvcc = pytest.mark.skipif(compile.find_nvcc() is None, reason=compile.NO_NVCC)
CHEAPEST = find_variant(
    "gated_inverse", dtype="bfloat16", head_dim=64, heads=4, gate_dtype="float32", beta_dtype="float32"
)


# ---- the table


def test_table():
    names = {variant.name for variant in VARIANTS}
    assert len(VARIANTS) == len(set(VARIANTS)) == len(names) == 2 * 12 + 16 + 8 + 4 + 1 + 48 + 16


@pytest.mark.parametrize("dtype", compile.DTYPES)
def test_table_has_all_that_the_launcher_may_ask_for(dtype):
    for k, v, block in itertools.product((64, 128), repeat=3):
        if block <= v:
            find_variant("chunk_forward", dtype=dtype, head_dim_k=k, head_dim_v=v, block_dv=block)
    for k, v in itertools.product((64, 128), repeat=2):
        find_variant("segment_states", dtype=dtype, head_dim_k=k, head_dim_v=v)
        find_variant("segment_scan", head_dim_k=k, head_dim_v=v)
    find_variant("segment_order")
    for k, v, v_first in itertools.product((64, 128), (64, 128), (False, True)):
        find_variant("recurrent", dtype=dtype, head_dim_k=k, head_dim_v=v, state_v_first=v_first)
    for k, heads, g, beta in itertools.product((64, 128), (1, 2, 4), ("float32", "bfloat16"), ("float32", "bfloat16")):
        find_variant("gated_inverse", beta_dtype=beta, gate_dtype=g, heads=heads, head_dim=k, dtype=dtype)


def test_other_variants_are_refused_by_name():
    with pytest.raises(ValueError, match="chunk_forward dtype=float64 block_dv=32"):
        compile.kernel("chunk_forward", dtype="float64", block_dv=32)


def test_selection():
    common = select()
    assert len(common) == 2 * 2 + 2 + 3 + 3 * 2 + 2
    assert all(dict(variant.options).get("dtype", "bfloat16") == "bfloat16" for variant in common)
    assert {variant["heads"] for variant in common if variant.kernel == "gated_inverse"} == {1, 2, 4}
    assert len(select(("bfloat16", "float16"))) == 2 * len(common) - 2  # two kernels serve both
    assert {dict(variant.options).get("dtype", "float16") for variant in select(["float16"])} == {"float16"}
    assert len(select(["float16"])) == len(common)
    assert select(all_variants=True) == list(VARIANTS)
    assert len(select(["float16"], all_variants=True)) == (len(VARIANTS) + 5) // 2


# ---- budgets


@pytest.fixture(scope="session")
def measured():
    """What every variant uses, or why it does not compile."""

    def measure(variant: Variant, _: str) -> Resources | CompileError:
        try:
            return resources.resources(variant)
        except CompileError as error:
            return error

    return dict(zip(VARIANTS, compile.in_parallel(measure, VARIANTS, None, "measuring"), strict=True))


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_variant_keeps_to_its_budget(variant, measured):
    used = measured[variant]
    assert isinstance(used, Resources), used
    assert violations(variant, used) == []
    assert used.threads == variant.budget.threads


@needs_nvcc
@pytest.mark.slow
def test_report(measured, capsys):
    text, ok = resources.report(VARIANTS)
    with capsys.disabled():
        print("\n" + text)
    assert text.count("\n") >= len(VARIANTS) + 1
    assert ok == (not any(violations(*pair) for pair in measured.items()))


def test_budgets():
    assert Budget(threads=512).registers == 128
    assert Budget(threads=384).registers == 168
    assert Budget(threads=128).registers == 255
    assert Budget(threads=512).shared_memory == 232448  # what CUDA allows a CTA
    assert Budget(threads=128, ctas_per_sm=3).registers == 168
    assert 3 * (Budget(threads=128, ctas_per_sm=3).shared_memory + 1024) == 228 * 1024


GOOD = Resources(
    threads=512,
    registers=128,
    spill_stores=0,
    spill_loads=0,
    static_shared=1024,
    dynamic_shared=200_000,
    wgmma=1,
    serialised=(),
    sass=dict.fromkeys(resources.INSTRUCTIONS, 1),
    loop_spills=(0, 0),
)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"registers": 136}, "136 registers, allowed are 128"),
        ({"threads": 640}, "threads"),
        ({"static_shared": 40_000}, "240000 bytes of shared memory, allowed are 232448"),
        ({"spill_stores": 1000}, "spill stores"),
        ({"spill_loads": 1000}, "spill loads"),
        ({"loop_spills": (1, 0)}, "1 spills in the main loop"),
        ({"loop_spills": (0, 99)}, "99 spills in a side loop"),
        ({"serialised": ("ptxas info : (C7510) wgmma are serialized",)}, "C7510"),
        ({"wgmma": 0}, "no wgmma"),
        ({"sass": dict.fromkeys(resources.INSTRUCTIONS, 0)}, "no HGMMA"),
    ],
)
def test_violations(fault, says):
    assert VARIANTS[0].budget.threads == 512
    assert violations(VARIANTS[0], GOOD) == []
    assert violations(VARIANTS[0], replace(GOOD, sass=None, loop_spills=None)) == []
    assert violations(find_variant("segment_order"), replace(GOOD, wgmma=0)) == []  # it has nothing to multiply
    (found,) = violations(VARIANTS[0], replace(GOOD, **fault))
    assert says in found


def test_ptxas_is_understood():
    log = """
        ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function 'f'
        ptxas info    : Function properties for helper
            8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
        ptxas info    : Function properties for f
            112 bytes stack frame, 144 bytes spill stores, 160 bytes spill loads
        ptxas info    : Used 128 registers, used 1 barriers, 112 bytes cumulative stack size, 5120 bytes smem
    """
    found = resources.parse_ptxas(log)
    assert "C7510" in found.pop("serialised")[0]
    assert found == {"registers": 128, "spill_stores": 148, "spill_loads": 168, "static_shared": 5120}


SASS = """
        /*0000*/                   STL [R1], R2 ;
.L_x_0:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0020*/              @!P0 BRA `(.L_x_3) ;
.L_x_1:
        /*0030*/               @P1 BRA `(.L_x_0) ;
        /*0040*/                   LDL R2, [R1] ;
.L_x_2:
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0070*/               @P2 BRA `(.L_x_2) ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   LDL R2, [R1] ;
        /*00a0*/                   BRA `(.L_x_1) ;
.L_x_4:
        /*00b0*/                   STL [R1], R2 ;
        /*00c0*/                   BRA `(.L_x_4) ;
"""


def test_spills_are_found_in_the_loops_they_belong_to():
    assert resources.loop_spills(SASS) == (0, 1)  # the load out of line belongs to the first loop, which has one HGMMA
    assert resources.count_instructions(SASS)["HGMMA"] == 3


# ---- the compiler


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No nvcc but those that the test makes."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(compile, "packaged", lambda *_: [])
    is_file = compile.Path.is_file
    monkeypatch.setattr(compile.Path, "is_file", lambda path: tmp_path in path.parents and is_file(path))

    def make(*parts: str) -> compile.Path:
        nvcc = tmp_path.joinpath(*parts)
        nvcc.parent.mkdir(parents=True)
        nvcc.touch(mode=0o755)
        return nvcc

    return make


def test_nvcc_is_found_in_order(bare, monkeypatch, tmp_path):
    assert compile.find_nvcc() is None
    with pytest.raises(CompileError, match="nvidia-cuda-nvcc") as raised:
        compile.require_nvcc()
    assert "\n" not in str(raised.value)
    packaged = bare("site", "bin", "nvcc")
    monkeypatch.setattr(compile, "packaged", lambda *_: [packaged])
    assert compile.find_nvcc() == packaged
    on_path = bare("path", "nvcc")
    assert compile.find_nvcc() == on_path
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "nothing"))
    assert compile.find_nvcc() == on_path
    at_home = bare("home", "bin", "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert compile.find_nvcc() == at_home


def test_tilelang_uses_the_compiler_that_was_found(monkeypatch, tmp_path):
    import tilelang.contrib.nvcc

    nvcc = tmp_path / "bin" / "nvcc"
    monkeypatch.setattr(tilelang.contrib.nvcc, "CUDA_HOME", "")
    monkeypatch.setattr(compile, "find_nvcc", lambda: nvcc)
    assert compile.require_nvcc() == nvcc
    assert tilelang.contrib.nvcc.get_nvcc_compiler() == str(nvcc)


def test_packaged():
    assert [path.name for path in compile.packaged("pytest", "pytest")] == ["pytest"]
    assert compile.packaged("no-such-distribution", "nvcc") == []


def test_errors_are_told_in_one_line():
    told = compile.first_error("int error;\n\nx.cu(3): warning: hm\nx.cu(7): error: no GATED\n1 error detected\n")
    assert told == "x.cu(7): error: no GATED"
    assert compile.first_error("fatal error: nv/target: No such file or directory").endswith("nvidia-cuda-cccl)")
    assert compile.first_error("") == "it says nothing"


def test_describe_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("TILELANG_DISABLE_CACHE", raising=False)
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    assert compile.describe_cache() == f"{tmp_path} (0 kernels)"
    (tmp_path / "0.1" / "linux" / "kernels" / "abc").mkdir(parents=True)
    assert compile.describe_cache() == f"{tmp_path} (1 kernels)"
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    assert "TILELANG_DISABLE_CACHE" in compile.describe_cache()


# ---- compiling


@pytest.fixture
def slow_compiler(monkeypatch):
    """Compiling takes a moment and gives a string; the calls are recorded."""
    calls = []

    def slow(variant: Variant, remark: str) -> str:
        calls.append((variant, remark))
        time.sleep(0.1)
        if variant == VARIANTS[1]:
            raise CompileError(f"{variant.name} does not compile: bad luck")
        return variant.name

    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setattr(compile, "_failures", {})
    monkeypatch.setattr(compile, "_load_or_compile", slow)
    monkeypatch.setattr(compile, "_is_saved", lambda _: True)
    return calls


def test_threads_share_one_compilation(slow_compiler):
    found = []
    threads = [threading.Thread(target=lambda: found.append(compile.compiled(VARIANTS[0]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [VARIANTS[0].name] * 8
    assert len(slow_compiler) == 1


def test_warmup_compiles_each_once_and_counts(slow_compiler, monkeypatch, capsys):
    wanted = [VARIANTS[0], *VARIANTS[2:5]]
    monkeypatch.setattr(compile, "select", lambda *_: wanted)
    assert compile.warmup(workers=2) == wanted
    assert compile.warmup(workers=2) == wanted
    assert sorted(remark for _, remark in slow_compiler) == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    assert "4/4" in capsys.readouterr().err


def test_warmup_stops_at_a_failure(slow_compiler, monkeypatch):
    monkeypatch.setattr(compile, "select", lambda *_: VARIANTS)
    with pytest.raises(CompileError, match="bad luck"):
        compile.warmup(workers=2)
    assert len(slow_compiler) < 10


def test_warmup_notices_that_nothing_was_saved(slow_compiler, monkeypatch):
    monkeypatch.setattr(compile, "_is_saved", lambda _: False)
    monkeypatch.setattr(compile, "select", lambda *_: VARIANTS[:1])
    with pytest.raises(CompileError, match="1 of 1 kernels are not in the cache"):
        compile.warmup()


@needs_nvcc
def test_a_kernel_that_does_not_compile_is_named_in_one_line(monkeypatch, tmp_path, caplog):
    from flashqla.hopper import gated_inverse

    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gated_inverse, "SOURCE", gated_inverse.SOURCE + "\nint broken = nonsense;\n")
    before = compile.builds()
    with caplog.at_level(logging.INFO, logger="flashqla"), pytest.raises(CompileError) as raised:
        compile._load_or_compile(CHEAPEST, "1 of 1")
    assert str(raised.value).startswith(f"{CHEAPEST.name} does not compile: ")
    assert str(raised.value).endswith('error: identifier "nonsense" is undefined')
    assert compile.builds() == before + 1
    (line,) = [record.getMessage() for record in caplog.records if record.name == "flashqla"]
    assert line.startswith(f"compiling {CHEAPEST.name} (1 of 1) with ")
    assert str(tmp_path) in line


# ---- the cache, by processes of their own

SCRIPT = """
import logging
from flashqla.hopper import compile
logging.basicConfig(level=logging.INFO)
kernel = compile.compiled(compile.find_variant({kernel!r}, **{options!r}))
assert "__global__" in kernel.get_kernel_source()
print(compile.builds())
"""


class Cache:
    """An empty cache, and processes that fetch the cheapest kernel from it."""

    def __init__(self, folder):
        self.folder = folder

    def start(self, **environment: str) -> subprocess.Popen:
        script = SCRIPT.format(kernel=CHEAPEST.kernel, options=dict(CHEAPEST.options))
        environment = os.environ | {"TILELANG_CACHE_DIR": str(self.folder)} | environment
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", script], env=environment, start_new_session=True, **pipes)

    def builds(self, process: subprocess.Popen | None = None) -> int:
        """How many kernels a process compiled on the way to a good one."""
        process = process or self.start()
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        count = int(out.split()[-1])  # TileLang logs to stdout as well
        assert ("INFO:flashqla:compiling" in err) == (count > 0)
        return count

    def entries(self, pattern: str) -> list:
        return list(self.folder.glob(pattern))


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@needs_nvcc
@pytest.mark.slow
def test_cached_kernel_needs_no_compiler_and_a_broken_one_is_built_again(cache):
    assert cache.builds() == 1
    without_compiler = {"PATH": "/nowhere", "CUDA_HOME": "/nowhere"}
    assert cache.builds(cache.start(**without_compiler)) == 0
    (library,) = cache.entries("*/*/kernels/*/executable.so")
    (cubin,) = cache.entries("*/cuda-binaries/*/kernel.cubin")
    for file in (library, cubin):
        file.write_bytes(file.read_bytes()[:1000])
    assert cache.builds() == 1
    assert cache.builds() == 0
    library.write_bytes(bytes(library.stat().st_size))
    assert cache.builds() == 1


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["*/cuda-binaries", "*/*/.staging/*", "*/*/.staging/*/*.so"])
def test_killed_while_compiling(cache, moment):
    process = cache.start()
    while not cache.entries(moment) and process.poll() is None:
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert cache.builds() <= 1  # 0: the kill came late
    assert cache.builds() == 0


@needs_nvcc
@pytest.mark.slow
def test_processes_compile_into_one_empty_cache(cache):
    processes = [cache.start() for _ in range(3)]
    assert all(cache.builds(process) <= 1 for process in processes)
    assert len(cache.entries("*/*/kernels/*")) == 1
    assert cache.builds() == 0


@needs_nvcc
@pytest.mark.slow
def test_exported_kernels_run_without_nvcc(cache, monkeypatch, tmp_path):
    """A copy of the cache is all that a machine without a compiler needs, and holds nothing but what was asked for."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(cache.folder))
    monkeypatch.setattr(compile, "_kernels", {})
    exported = Cache(compile.export([CHEAPEST], tmp_path / "exported"))
    compile.export([CHEAPEST], exported.folder)  # again: nothing happens
    assert len(exported.entries("*/*/kernels/*")) == 1 and not exported.entries("*/*/kernels/.*")
    shutil.rmtree(cache.folder)
    assert exported.builds(exported.start(PATH="/nowhere", CUDA_HOME="/nowhere")) == 0


# ---- no compiler


def test_shortage(bare, monkeypatch, tmp_path):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "_kernels", {})
    compile.shortage.cache_clear()
    try:
        (reason,) = compile.shortage()
        assert "no CUDA compiler" in reason and str(tmp_path / "cache") in reason
        (tmp_path / "cache" / "0.1" / "linux" / "kernels" / "abc").mkdir(parents=True)
        compile.shortage.cache_clear()
        assert compile.shortage() == []
        shutil.rmtree(tmp_path / "cache")
        bare("path", "nvcc")
        compile.shortage.cache_clear()
        assert compile.shortage() == []
    finally:
        compile.shortage.cache_clear()


def test_a_failed_compilation_is_tried_once(slow_compiler):
    for _ in range(3):
        with pytest.raises(CompileError, match="bad luck"):
            compile.compiled(VARIANTS[1])
    assert len(slow_compiler) == 1
