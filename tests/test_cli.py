"""The commands: what they print and write, their exit codes, and one line for every mistake of a user."""

import json
import subprocess
import sys

import pytest
import torch

from flashqla import backends, bench_cpu, console, doctor, selftest
from flashqla.cli import main
from flashqla.hopper import compile, resources


@pytest.fixture
def said(capsys):
    """Run a command; give its exit code, its output, and its one line of complaint (empty when there is none)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        complaint = (
            captured.err[captured.err.find("flashqla: error: ") :] if "flashqla: error: " in captured.err else ""
        )
        assert complaint.count("\n") <= 1
        return code, captured.out, complaint

    return run


def test_module_runs():
    ran = subprocess.run([sys.executable, "-m", "flashqla", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("flashqla 0.")
    ran = subprocess.run([sys.executable, "-m", "flashqla"], capture_output=True, text=True)
    assert ran.returncode == 2


@pytest.mark.parametrize(
    "arguments",
    ["nonsense", "demo --steps -1", "demo --seconds 0", "bench --cpu --tokens 0", "selftest --backend abacus"],
)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    assert "error" in capsys.readouterr().err


def test_interrupt_has_its_own_code(monkeypatch, said):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "main", interrupted)
    assert said("selftest")[0] == 130


def test_doctor(said):
    code, out, _ = said("doctor")
    assert code == 0
    facts = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith("kernel cache"))
    assert facts["torch"] == torch.__version__
    assert {"flashqla", "python", "tilelang", "gpu", "nvcc", "backend", "fla-core"} <= set(facts)
    if not torch.cuda.is_available():
        assert facts["gpu"].startswith("none")
        assert facts["backend"].startswith("reference (")
        assert "CUDA" in facts["backend"]


def test_doctor_explains_a_driver_that_is_too_old(monkeypatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nMore.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(doctor, "first_line", lambda *command: "NVIDIA H200, 470.82")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    told = doctor.describe_gpu({})
    assert told.startswith(
        "none: torch is built for CUDA 13.0 but finds no device; The NVIDIA driver on your system is"
    )
    assert "found version 11040); nvidia-smi sees NVIDIA H200, 470.82" in told.replace(").", ")") and "\n" not in told
    assert told.endswith("CUDA_VISIBLE_DEVICES is '7'")


@pytest.mark.parametrize("fla", [True, False])
def test_doctor_explains_an_unsupported_gpu(monkeypatch, fla):
    refusal = "needs compute capability 9.0 (Hopper), got 8.0 (NVIDIA A100)"
    monkeypatch.setattr(backends, "device_refusals", lambda device=None: [refusal])
    monkeypatch.setattr(backends, "_cuda_refusals", lambda device: [])
    monkeypatch.setattr(backends, "_fla_import_problem", lambda: [] if fla else ["needs the package fla-core"])
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    told = doctor.describe_backend(torch.device("cpu"))
    assert told.startswith("fla, " if fla else "reference (") and refusal in told
    assert doctor.describe_backward(torch.device("cpu"), told).startswith("fla" if fla else "reference (")


def test_a_wrong_companion_is_named(monkeypatch):
    monkeypatch.setattr(compile.importlib.metadata, "requires", lambda name: ["torch>=2.8", "tilelang==0.1.15"])
    monkeypatch.setattr(compile.importlib.metadata, "version", lambda name: "0.1.16")
    compile.wrong_companion.cache_clear()
    try:
        wrong = compile.wrong_companion()
        assert wrong == 'the kernels need tilelang 0.1.15, installed is 0.1.16: pip install "tilelang==0.1.15"'
        with pytest.raises(compile.CompileError, match=r"installed is 0\.1\.16"):
            compile._load_or_compile(compile.VARIANTS[0], "")
    finally:
        monkeypatch.undo()
        compile.wrong_companion.cache_clear()


def test_selftest_table_covers_what_it_should():
    names = [case.name for case in selftest.CASES]
    assert len(names) == len(set(names)) >= 60
    assert {case.dtype for case in selftest.CASES} == set(selftest.LIMITS)
    assert {flag for case in selftest.CASES for flag in case.flags} == {
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "state_v_first",
    }


def test_selftest(said, tmp_path):
    path = tmp_path / "results" / "selftest.json"
    code, out, _ = said("selftest", "--device", "cpu", "--only", "everything", "--json", str(path))
    assert code == 0
    assert "3 of 3 cases" in out
    written = json.loads(path.read_text())
    assert written["env"]["torch"] == torch.__version__
    assert {"date", "commit", "device", "flashqla"} <= set(written["env"])
    for row in written["rows"]:
        assert row["ok"]
        assert row["forward"] <= row["forward_limit"]
        gradients = ("d_q", "d_k", "d_v", "d_g", "d_beta", "d_A_log", "d_dt_bias", "d_initial_state")
        assert set(row["errors"]) == {"o", "final_state", *gradients}


def test_selftest_fails_when_a_limit_is_broken(said, monkeypatch):
    monkeypatch.setitem(selftest.LIMITS, torch.float32, (1e-5, 1e-9))
    code, out, _ = said("selftest", "--device", "cpu", "--only", "float32, K")
    assert code == 1
    assert "FAILED" in out
    assert "0 of 1 cases" in out


def test_selftest_fails_on_a_wrong_result(monkeypatch):
    import flashqla

    right = flashqla.chunk_gated_delta_rule

    def wrong(*arguments, **keywords):
        o, final_state = right(*arguments, **keywords)
        spoiled = o.detach().clone()
        spoiled[:, -1, -1, -1] = torch.nan
        return o + (spoiled - o.detach()), final_state

    monkeypatch.setattr(flashqla, "chunk_gated_delta_rule", wrong)
    row = selftest.judge(selftest.Case("spoiled", torch.float32, tokens=5, head_dims=(8, 8)), torch.device("cpu"))
    assert not row["ok"]
    assert row["errors"]["o"]["disagreements"] == 1


def test_selftest_shows_refusals(said):
    code, out, _ = said("selftest", "--device", "cpu", "--backend", "hopper", "--only", "63 tokens")
    assert code == 1
    assert "REFUSED" in out
    assert "needs tensors on a CUDA device" in out


def test_tiny_tensors_are_judged_by_the_floor():
    noise = torch.full((10,), 1e-9)
    assert selftest.measure(noise, torch.zeros(10, dtype=torch.float64))["error"] == pytest.approx(1e-6)
    assert selftest.measure(noise, 2 * noise.double())["error"] == pytest.approx(1e-6)
    assert selftest.measure(1.5 * torch.ones(10), torch.ones(10, dtype=torch.float64))["error"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        ("selftest --only nothing-of-this-name", "matches none"),
        ("selftest --device abacus", "abacus"),
        ("selftest --device cuda:99", "cuda:99"),
        ("bench", "--cpu"),
        ("bench --cpu --tokens 1000000000", "fewer --tokens"),
    ],
)
def test_user_errors_are_one_line(said, arguments, mentions):
    code, _, complaint = said(*arguments.split())
    assert code == 2
    assert mentions in complaint


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there is a GPU to measure")
def test_calibrate_needs_a_gpu(said):
    code, out, err = said("calibrate")
    assert (code, out) == (2, "")
    assert "calibrate: needs a CUDA device" in err


def test_unwritable_json_is_one_line(said, tmp_path):
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "results.json")
    code, _, complaint = said("selftest", "--device", "cpu", "--only", "1 token", "--json", path)
    assert code == 2
    assert "results.json" in complaint


def test_bench(said, tmp_path):
    path = tmp_path / "bench.json"
    code, out, _ = said("bench", "--cpu", "--tokens", "130", "--json", str(path))
    assert code == 0
    assert "token loop" in out
    (row,) = json.loads(path.read_text())["rows"]
    assert row["name"] == "4/8 1x130"
    assert row["direction"] == "forward+backward"
    assert set(row["ms"]) == {"chunked", "token loop"}
    assert row["speedup"]["chunked"] > 1


def test_bench_gives_no_times_to_wrong_results(capsys):
    contenders = {"wrong": (lambda: {"o": torch.ones(3)}, 2), "right": (lambda: {"o": torch.zeros(3) + 2}, 1)}
    row = bench_cpu.race(bench_cpu.Shape(1, 1, 1, 3), "forward", contenders)
    assert not row["ok"]
    assert "ms" not in row
    assert not bench_cpu.report([row])
    assert "FAILED" in capsys.readouterr().out


def test_warmup_compiles_what_is_asked_for(said, monkeypatch):
    asked = []
    monkeypatch.setattr(compile, "warmup", lambda *arguments: asked.append(arguments) or [])
    assert said("warmup")[0] == 0
    assert said("warmup", "--dtype", "float16", "--workers", "3")[0] == 0
    code, out, _ = said("warmup", "--all")
    assert code == 0
    assert out.startswith("0 kernels ready, 0 of them new; cache: ")
    assert asked == [(None, False, None), (["float16"], False, 3), (None, True, None)]


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_warmup_report_decides_the_exit_code(said, monkeypatch, ok, code):
    monkeypatch.setattr(compile, "warmup", lambda *_: [])
    monkeypatch.setattr(resources, "report", lambda *_: ("the table", ok))
    ran = said("warmup", "--report")
    assert ran[0] == code
    assert ran[1].endswith("the table\n")


@pytest.mark.parametrize(
    ("error", "mentions"),
    [
        (compile.CompileError(compile.NO_NVCC), "no CUDA compiler"),
        (ImportError("No module named 'tilelang'"), "no kernels to compile"),
        (PermissionError(13, "Permission denied", "/somewhere"), "/somewhere"),
    ],
)
def test_warmup_errors_are_one_line(said, monkeypatch, error, mentions):
    def fail(*_):
        raise error

    monkeypatch.setattr(compile, "warmup", fail)
    code, _, complaint = said("warmup")
    assert code == 2
    assert mentions in complaint


def test_table():
    assert console.table(("a", "bb"), [("long", 1), ("x", 22)]).splitlines() == [
        "a     bb",
        "----  --",
        "long   1",
        "x     22",
    ]


def test_first_line():
    assert console.first_line(sys.executable, "-c", "print(); print(' found ')") == "found"
    assert console.first_line(sys.executable, "-c", "raise SystemExit(1)") is None
    assert console.first_line("there-is-no-such-command") is None
