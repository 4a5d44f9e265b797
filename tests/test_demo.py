"""The demo: its data, its checkpoints, its refusals, and a short run from start to end."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from flashqla import demo
from flashqla.cli import main
from flashqla.console import UserError
from flashqla.nn import ModelConfig

CPU = torch.device("cpu")
TINY = ModelConfig(
    hidden_size=16, num_layers=1, num_heads=1, num_value_heads=2, head_dim_k=8, head_dim_v=8, mlp_size=16
)


def test_corpus_is_source_text():
    documents = demo.read_corpus()
    assert len(documents) > 100
    assert all(document.dtype == torch.uint8 and len(document) for document in documents)
    assert any(b"import" in bytes(document.tolist()) for document in documents[:5])


def test_packing():
    documents = [torch.arange(1, 6, dtype=torch.uint8), torch.arange(10, 50, dtype=torch.uint8)]
    batches = demo.pack(documents, tokens_per_step=64, longest=20, seed=0)
    for _ in range(10):
        tokens, targets, cu_seqlens = next(batches)
        assert tokens.shape == targets.shape == (1, 64)
        assert cu_seqlens[0] == 0
        assert cu_seqlens[-1] == 64
        lengths = cu_seqlens.diff()
        assert (lengths > 0).all()
        assert (lengths <= 20).all()
        ends = (tokens == 5) | (tokens == 49)
        assert torch.equal(targets == demo.NO_TARGET, ends)
        assert torch.equal(targets[~ends], tokens[~ends] + 1)  # in these documents the next byte is one more
    first, again = (next(demo.pack(documents, 64, 20, seed=3))[0] for _ in range(2))
    assert torch.equal(first, again)


def test_checkpoint_round_trip(tmp_path):
    run = demo.begin(TINY, CPU)
    batches = demo.pack([torch.arange(200, dtype=torch.uint8)], 64, 64, seed=0)
    assert demo.train(run, batches, steps=3, seconds=60, learning_rate=1e-3)
    path = demo.save(run, tmp_path / "checkpoint.pt")
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.pt"]
    again = demo.load(str(path), CPU)
    assert again.losses == run.losses
    assert again.model.config == TINY
    for mine, expected in zip(again.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(mine, expected)
    moments = again.optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(moments, run.optimizer.state_dict()["state"][0]["exp_avg"])


def test_training_stops_when_time_is_over():
    run = demo.begin(TINY, CPU)
    batches = demo.pack([torch.arange(200, dtype=torch.uint8)], 64, 64, seed=0)
    assert demo.train(run, batches, steps=10**6, seconds=0.2, learning_rate=1e-3)
    assert 0 < len(run.losses) < 10**4


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 a broken archive", None])
def test_corrupt_checkpoint_is_a_one_line_error(content, tmp_path, capsys):
    path = tmp_path / "checkpoint.pt"
    if content is None:
        path = demo.save(demo.begin(TINY, CPU), path)
        content = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(content)
    assert main(["demo", "--resume", str(path), "--out", str(tmp_path)]) == 2
    assert_one_line(capsys, "checkpoint.pt")


@pytest.mark.parametrize("content", [{}, [1], {"config": {"depth": 3}, "model": {}, "optimizer": {}, "losses": []}])
def test_foreign_checkpoint_is_a_one_line_error(content, tmp_path):
    torch.save(content, tmp_path / "foreign.pt")
    with pytest.raises(UserError, match=r"foreign\.pt is not a checkpoint"):
        demo.load(str(tmp_path / "foreign.pt"), CPU)


@pytest.mark.parametrize("device", ["abacus", "cuda:99", "meta"])
def test_unknown_device_is_a_one_line_error(device, tmp_path, capsys):
    assert main(["demo", "--device", device, "--out", str(tmp_path)]) == 2
    assert_one_line(capsys, device)


def test_missing_checkpoint_is_a_one_line_error(tmp_path, capsys):
    assert main(["demo", "--resume", str(tmp_path / "none.pt"), "--out", str(tmp_path)]) == 2
    assert_one_line(capsys, "none.pt")


def test_unwritable_place_is_a_one_line_error(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["demo", "--out", str(tmp_path / "file" / "runs")]) == 2
    assert_one_line(capsys, "file")


def assert_one_line(capsys, mentions: str) -> None:
    said = capsys.readouterr().err
    assert said.startswith("flashqla: error: ")
    assert said.count("\n") == 1
    assert mentions in said


def test_whole_demo_in_a_few_steps(tmp_path, capsys):
    assert main(["demo", "--steps", "2", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "float64" in said.out
    assert "Decoding equals prefill" in said.out
    assert "FAILED" not in said.out
    assert "tokens/s" in said.err
    assert (tmp_path / "checkpoint.pt").stat().st_size > 10**5
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    checkpoint = str(tmp_path / "checkpoint.pt")
    assert main(["demo", "--steps", "0", "--resume", checkpoint, "--out", str(tmp_path)]) == 0  # only samples
    assert len(demo.load(checkpoint, CPU).losses) == 2


def test_without_matplotlib_the_curve_is_csv(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = demo.plot_losses([3.0, 2.0], tmp_path)
    assert path.read_text().split() == ["step,loss", "1,3.0", "2,2.0"]
    assert capsys.readouterr().out.count("\n") == 1


def test_interrupt_saves_what_there_is(tmp_path):
    command = [sys.executable, "-m", "flashqla", "demo", "--steps", "100000", "--out", str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        for line in process.stderr:  # the progress bar, which rewrites its line: universal newlines split it
            if "loss" in line:
                break
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in out
    assert demo.load(str(tmp_path / "checkpoint.pt"), CPU).losses
