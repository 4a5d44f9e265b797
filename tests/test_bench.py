"""The GPU benchmark on a CPU: rows, floors, contenders' arguments, judge, stopwatch and report, with fakes for kernels
and events."""

import contextlib
import json
import math
import statistics
import sys
import time
import types

import pytest
import torch

import flashqla
from flashqla import bench, bench_cold, bench_decode, bench_peers, bench_race, reference, testing
from flashqla.bench_peers import OURS, TABLES, Row
from flashqla.cli import main

SMALL = Row.parse("2/4 70+30")


class Event:
    """Like torch.cuda.Event, by the host's clock."""

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        self.seconds = time.perf_counter()

    def elapsed_time(self, end):
        return max(1e3 * (end.seconds - self.seconds), 1e-6)


def exact(made, lengths, reuse_plan=True):
    """A contender that is right, and differentiable."""
    arguments = made.arguments(output_final_state=True, backend="reference")
    return lambda: flashqla.chunk_gated_delta_rule(**arguments)


def spoiled(change):
    """A contender whose output is changed."""

    def contender(made, lengths):
        run = exact(made, lengths)

        def spoil():
            o, final_state = run()
            return change(o), final_state

        return spoil

    return contender


def raising(made, lengths):
    raise RuntimeError("cannot do this shape\nbecause")


@pytest.fixture
def fake_gpu(monkeypatch):
    """Events and graphs of the host; the contenders are given by name, and "right" ones are the reference."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    stream = types.SimpleNamespace(wait_stream=lambda _: None)
    fakes = {"Stream": lambda: stream, "current_stream": lambda: stream, "stream": contextlib.nullcontext}
    fakes |= {"reset_peak_memory_stats": lambda: None, "memory_allocated": lambda: 2**20}
    for name, fake in (fakes | {"max_memory_allocated": lambda: 3 * 2**20}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(bench_race, "captured", lambda call: bench_race.Replay(call, 1, 300.0))
    contenders = {OURS: exact, "fla": exact, "flash_qla": raising, "flashinfer": spoiled(lambda o: 1.01 * o)}
    monkeypatch.setattr(bench_race, "CONTENDERS", contenders)
    return contenders


def inputs(row=SMALL):
    return bench_peers.inputs_of(row, bench_peers.shared_inputs([row], "cpu"))


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("2/8 1x32768", [32768]),
        ("16/64 24576+8192", [24576, 8192]),
        ("16/16 4x8192", [8192] * 4),
        ("1/3 2x5+7", [5, 5, 7]),
    ],
)
def test_names_of_rows(name, lengths):
    row = Row.parse(name)
    assert list(row.lengths) == lengths
    assert row.name == name


@pytest.mark.parametrize("name", ["", "2/8", "2/7 1x64", "0/4 1x64", "2/8 1x0", "2/8 1x64,1x64", "8 1x64", "2/8 x64"])
def test_no_names_of_rows(name):
    with pytest.raises(ValueError, match="is no row"):
        Row.parse(name)


def test_tables():
    for names in TABLES.values():
        assert [Row.parse(name).name for name in names] == list(dict.fromkeys(names))
    assert len(TABLES["forward"]) == 23
    heads = {"4/16", "8/24", "16/48", "16/16", "32/32", "4/8", "2/4"}
    for names in TABLES.values():
        assert heads <= {name.split()[0] for name in names}
        assert {"2/8 1x131072", "2/8 1x262144"} <= set(names)


@pytest.mark.parametrize(
    ("name", "direction", "floor"),
    [
        ("2/8 1x32768", "forward", 0.054),
        ("2/8 1x2048", "forward", 0.0034),
        ("16/64 24576+8192", "forward", 0.435),
        ("16/64 8x1024", "forward", 0.109),
        ("32/32 1x32768", "forward", 0.253),  # memory bound
        ("16/64 1x8192", "backward", 0.25),
        ("4/8 1x32768", "backward", 0.125),
        ("16/64 1x8192", "step", 0.359),
    ],
)
def test_floors(name, direction, floor):
    assert Row.parse(name).floor_ms(direction) == pytest.approx(floor, rel=0.02)


def test_inputs_share_their_beginning():
    rows = [Row.parse("1/2 3x20"), Row.parse("1/2 1x100")]
    shared = bench_peers.shared_inputs(rows, "cpu")
    for row in rows:
        made = bench_peers.inputs_of(row, shared)
        assert made.q.shape == (1, row.tokens, 1, 128)
        assert made.initial_state.shape == made.dht.shape == (len(row.lengths), 2, 128, 128)
        assert made.cu_seqlens.dtype == torch.int32
        assert made.cu_seqlens.diff().tolist() == list(row.lengths)
        assert all(getattr(made, name).is_contiguous() for name in testing.PER_TOKEN)
        assert made.q.dtype == made.v.dtype == torch.bfloat16
        assert made.g.dtype == made.beta.dtype == torch.float32
        torch.testing.assert_close(made.q, shared.q[:, : row.tokens])


def module(monkeypatch, name, function):
    made = types.ModuleType(name)
    made.chunk_gated_delta_rule = function
    parts = name.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[i - 1]))
    monkeypatch.setitem(sys.modules, name, made)


@pytest.mark.parametrize(
    ("contender", "name"),
    [(bench_peers.fla, "fla.ops.gated_delta_rule"), (bench_peers.flash_qla, "flash_qla")],
)
def test_peers_with_our_convention(contender, name, monkeypatch):
    def kernel(cu_seqlens, **arguments):
        assert cu_seqlens.dtype == torch.int64
        return reference.chunked(**arguments, cu_seqlens=cu_seqlens)

    module(monkeypatch, name, kernel)
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    made = inputs()
    o, final_state = contender(made, SMALL.lengths)()
    right_o, right_state = exact(made, SMALL.lengths)()
    torch.testing.assert_close((o, final_state), (right_o, right_state))


def test_flashinfer_has_another_convention(monkeypatch):
    def kernel(q, k, v, g, beta, *, initial_state, output_final_state, cu_seqlens, max_seqlen):
        assert (q.ndim, g.dtype, cu_seqlens.dtype, max_seqlen) == (3, torch.float32, torch.int64, 70)
        assert initial_state.is_contiguous()
        per_token = (tensor[None] for tensor in (q, k, v, g.log(), beta))
        options = {"initial_state": initial_state, "output_final_state": output_final_state, "state_v_first": True}
        o, final_state = reference.chunked(*per_token, cu_seqlens=cu_seqlens, **options)
        return o[0], final_state

    module(monkeypatch, "flashinfer.gdn_prefill", kernel)
    made = inputs()
    o, final_state = bench_peers.flashinfer(made, SMALL.lengths)()
    right_o, right_state = exact(made, SMALL.lengths)()
    torch.testing.assert_close((o, final_state), (right_o, right_state), rtol=1e-2, atol=1e-3)
    with pytest.raises(NotImplementedError, match="no backward"):
        bench_peers.flashinfer(made.requires_grad(), SMALL.lengths)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_ours_never_runs_the_reference():
    for reuse_plan in (True, False):
        with pytest.raises(NotImplementedError, match="CUDA"):
            bench_peers.ours(inputs(), SMALL.lengths, reuse_plan)()


@pytest.mark.parametrize("piece", [1, 10**6], ids=["head by head", "at once"])
@pytest.mark.parametrize("direction", TABLES)
def test_errors_cover_every_result(direction, piece, monkeypatch):
    monkeypatch.setattr(bench_race, "PIECE", piece)
    made = inputs()
    leaves = made.requires_grad() if direction != "forward" else made
    found = bench_race.call_of(direction, exact(leaves, SMALL.lengths), leaves)()
    errors = bench_race.errors_of(SMALL, made, direction, {"exact": found})["exact"]
    assert errors.keys() == found.keys() <= bench_race.LIMITS.keys()
    assert len(errors) == {"forward": 2, "backward": 6, "step": 8}[direction]
    assert max(errors.values()) < 4e-3
    for name, tensor in found.items():
        wrong = found | {name: torch.where(torch.arange(tensor.shape[-1]) == 1, 0, tensor)}
        errors = bench_race.errors_of(SMALL, made, direction, {"wrong": wrong})["wrong"]
        assert errors[name] > 2e-2
        assert [other for other, error in errors.items() if error > 4e-3] == [name]
    ((name, tensor), *_) = found.items()
    hole = tensor.clone()
    hole[..., -1, -1] = torch.nan
    errors = bench_race.errors_of(SMALL, made, direction, {"hole": found | {name: hole}})["hole"]
    assert math.isnan(errors[name])
    assert bench_race.broken_limits(errors).startswith(f"wrong: relative L2 of {name} is nan")


def test_measure_times_only_who_is_right(fake_gpu):
    row = bench_race.measure(SMALL, inputs(), "forward", bench_peers.PEERS)
    assert (row["pass"], row["name"], row["hk"], row["hv"]) == ("forward", "2/4 70+30", 2, 4)
    assert row["seqlens"] == [70, 30]
    assert set(row["time_ms"]) == set(row["spread_ms"]) == {OURS, "fla"}
    assert row["skipped"] == {
        "flash_qla": "RuntimeError: cannot do this shape",
        "flashinfer": "wrong: relative L2 of o is 1.0e-02, limit 6e-03",
    }
    assert set(row["error"]) == set(row["first_call_s"]) == {OURS, "fla", "flashinfer"}
    assert set(row["host_us"]) == {"plan reused", "plan made", "fla"}
    assert row["peak_mib"] == dict.fromkeys((OURS, "fla", "flashinfer"), 2.0)
    assert not row["eager"]
    low, high = row["spread_ms"][OURS]
    assert low <= row["time_ms"][OURS] <= high
    json.dumps(row, allow_nan=False)


def test_measure_survives_nan_no_capture_and_a_missing_package(fake_gpu, monkeypatch):
    def capture(call):
        raise RuntimeError("operation not permitted when stream is capturing")

    fake_gpu |= {"fla": spoiled(lambda o: o * torch.nan), "flash_qla": bench_peers.flash_qla}
    monkeypatch.setitem(sys.modules, "flash_qla", None)
    monkeypatch.setattr(bench_race, "captured", capture)
    row = bench_race.measure(SMALL, inputs(), "forward", ["fla", "flash_qla"])
    assert set(row["time_ms"]) == {OURS}
    assert row["error"]["fla"]["o"] is None
    assert "nan" in row["skipped"]["fla"]
    assert row["skipped"]["flash_qla"].startswith("ModuleNotFoundError")
    assert "capturing" in row["eager"][OURS]
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("direction", ["backward", "step"])
def test_measure_gradients(fake_gpu, direction):
    fake_gpu["flashinfer"] = bench_peers.flashinfer
    row = bench_race.measure(SMALL, inputs(), direction, ["fla", "flashinfer"])
    assert set(row["time_ms"]) == {OURS, "fla"}
    assert "no backward" in row["skipped"]["flashinfer"]
    assert {"dq", "dk", "dv", "dg", "dbeta", "dinitial_state"} <= set(row["error"][OURS])
    assert set(row["host_us"]) == {"plan reused", "plan made", "fla"}


@pytest.mark.parametrize(("ms", "calls"), [(0.01, 20), (0.4, 5), (7.0, 3)])
def test_a_graph_holds_several_calls(ms, calls, monkeypatch):
    stream = types.SimpleNamespace(wait_stream=lambda _: None)
    graph = types.SimpleNamespace(replay=lambda: None)
    fakes = {"Stream": lambda: stream, "current_stream": lambda: stream, "CUDAGraph": lambda: graph}
    fakes |= {"default_stream": lambda: stream, "synchronize": lambda: None}
    fakes |= {"stream": lambda _: contextlib.nullcontext(), "graph": lambda graph, stream: contextlib.nullcontext()}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(bench_race, "milliseconds", lambda run: ms)
    made = []
    replay = bench_race.captured(lambda: made.append(1))
    assert (replay.run, replay.calls, len(made)) == (graph.replay, calls, 3 + calls)


def test_race_takes_turns(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    order = []
    replays = {name: bench_race.Replay(lambda name=name: order.append(name), 2, 100.0) for name in "abc"}
    samples = bench_race.race(replays)
    assert "".join(order) == "abcbcacab" * 2
    assert all(len(ascending) == 5 and ascending == sorted(ascending) for ascending in samples.values())
    assert bench_race.race({}) == {}


def test_jobs():
    jobs = bench.choose_jobs(["forward"], None)
    assert [row.name for same in jobs.values() for _, row in same] == list(TABLES["forward"])
    jobs = bench.choose_jobs(["forward", "backward"], "16/32, 2/8 3x100")
    assert {heads: [(direction, row.name) for direction, row in same] for heads, same in jobs.items()} == {
        (16, 32): [
            ("forward", "16/32 1x8192"),
            ("forward", "16/32 4x2048"),
            ("backward", "16/32 1x8192"),
            ("backward", "16/32 1x32768"),
        ],
        (2, 8): [("forward", "2/8 3x100"), ("backward", "2/8 3x100")],
    }


@pytest.fixture
def on_fake_gpu(fake_gpu, monkeypatch):
    """The command, with its device replaced by the CPU."""
    rows = bench.gpu_rows
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bench, "gpu_environment", lambda _: {"gpu": "fake"})
    monkeypatch.setattr(bench, "gpu_rows", lambda jobs, peers, _: rows(jobs, peers, "cpu"))
    return fake_gpu


def test_command(on_fake_gpu, tmp_path, capsys):
    files = {"--json": tmp_path / "bench.json", "--plot": tmp_path / "bench.png"}
    options = [str(word) for pair in files.items() for word in pair]
    assert main(["bench", "--rows", "2/4 70+30,1/2 2x40", *options]) == 0
    results = json.loads(files["--json"].read_text())
    assert results["env"] == {"gpu": "fake", "clocks": bench.clocks()}
    assert [row["name"] for row in results["rows"]] == ["2/4 70+30", "1/2 2x40"]
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "flash_qla has no time for 2/4 70+30, 1/2 2x40: RuntimeError: cannot do this shape" in out
    assert f"{OURS}, plan reused: " in out and "fla: " in out
    *_, header, _, first, _ = out.splitlines()
    assert "".join(header.split()) == "row" + "".join(bench_race.CONTENDERS) + "bestpeerours/bestfloorours/floor"
    assert first.startswith("2/4 70+30 ")
    assert first.split()[4:7] == ["-", "-", "fla"]
    gain = statistics.geometric_mean(row["time_ms"]["fla"] / row["time_ms"][OURS] for row in results["rows"])
    assert f"geometric mean {gain:.2f}" in out


def test_command_fails_without_our_time(on_fake_gpu, capsys):
    on_fake_gpu[OURS] = raising
    assert main(["bench", "--rows", "1/2 1x40", "--peers", "none"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["1/2", "1x40", "-", "-"]


def test_results_are_written_after_every_row(on_fake_gpu, tmp_path, monkeypatch):
    measure, path = bench.measure, tmp_path / "bench.json"

    def interrupted(row, *arguments):
        if row.heads == 2:
            raise KeyboardInterrupt
        return measure(row, *arguments)

    monkeypatch.setattr(bench, "measure", interrupted)
    assert main(["bench", "--rows", "1/2 1x40,2/4 1x40", "--json", str(path)]) == 130
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == ["1/2 1x40"]


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["--peers", "fla,abacus"], "abacus"),
        (["--rows", "2/8 forever"], "2/8 1x32768"),
        (["--plot", "bench.nonsense", "--rows", "1/2 1x40", "--peers", "none"], "bench.nonsense"),
    ],
)
def test_mistakes_are_one_line(arguments, mentions, on_fake_gpu, capsys):
    assert main(["bench", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert mentions in complaint[complaint.find("flashqla: error: ") :]


def test_cold_starts(on_fake_gpu, tmp_path, monkeypatch, capsys):
    """Two processes a contender, the second with the caches of the first; a failure is a reason, not a crash."""
    script = (
        "import os, pathlib, sys\n"
        "place = pathlib.Path(os.environ['TILELANG_CACHE_DIR'])\n"
        "if sys.argv[1] == 'flash_qla': sys.exit('no such package')\n"
        "print('noise'); print(0.5 if place.exists() else 30.25); place.mkdir(exist_ok=True)\n"
    )
    monkeypatch.setattr(bench_cold, "CHILD", script)
    path = tmp_path / "bench.json"
    peers = ["--peers", "fla,flash_qla"]
    assert main(["bench", "--rows", "1/2 1x40", *peers, "--cold", "--json", str(path)]) == 0
    (start,) = json.loads(path.read_text())["cold_start"]
    assert start["empty_caches_s"] == {OURS: 30.25, "fla": 30.25}
    assert start["warm_disk_s"] == {OURS: 0.5, "fla": 0.5}
    assert start["skipped"] == {"flash_qla": "no such package"}
    assert "no such package" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_cold_start_without_a_gpu_is_a_reason():
    found = bench_cold.cold_starts([OURS], "forward")
    assert not found["empty_caches_s"] and found["skipped"][OURS]


def test_cold_starts_have_a_limit(monkeypatch):
    monkeypatch.setattr(bench_cold, "CHILD", "import time; time.sleep(60)")
    monkeypatch.setattr(bench_cold, "LIMIT_S", 0.5)
    assert bench_cold.cold_starts(["fla"], "step")["skipped"] == {"fla": "not ready after 0.5 s"}


def test_decode_needs_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["bench", "--decode"]) == 2
    assert "bench --decode: needs a CUDA device" in capsys.readouterr().err


def test_report_of_decoding():
    times = {"flashqla": 0.01, "v_first": 0.009, "in_place": 0.008, "fla": 0.012}
    row = {"name": "2/8 16x1", "time_ms": times, "state_tb_per_s": 2.345}
    assert bench_decode.cells(row) == ("2/8 16x1", "10.0", "9.0", "8.0", "12.0", "1.20", "2.35")
    del times["fla"]
    assert bench_decode.cells(row)[4:6] == ("-", "-")
