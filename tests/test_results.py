"""The README's results are those of the committed measurements, slower rows are named, and old evidence is marked."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flashqla import report
from flashqla.bench_peers import Row
from flashqla.cli import main

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / report.RESULTS
BENCHES = [path for path in sorted(RESULTS.glob("*.json")) if '"pass"' in path.read_text()]
COLUMNS = {"flashqla": "flashqla", **{shown: peer for peer, shown in report.PEERS.items()}}


def test_readme_and_figures_are_what_the_command_writes(capsys):
    """Also fails when a kernel is newer than evidence that the README does not mark as stale."""
    code = main(["report", "--check"])
    assert code == 0, capsys.readouterr().out


def measured(direction: str) -> dict[str, list[dict[str, float]]]:
    """Row name -> times of every run that has it."""
    found: dict[str, list[dict[str, float]]] = {}
    for path in BENCHES:
        for row in json.loads(path.read_text())["rows"]:
            if row["pass"] == direction:
                found.setdefault(row["name"], []).append(row["time_ms"])
    return found


def tables() -> dict[str, list[dict[str, str]]]:
    """Pass -> rows of its table in the README, by column, read without the code that wrote them."""
    readme, found = (ROOT / "README.md").read_text(), {}
    for direction, title in report.TITLES.items():
        match = re.search(rf"^\*\*{title}\*\* on .*?\n\n(\|.*?)\n\n", readme, re.MULTILINE | re.DOTALL)
        if match:
            header, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in match[1].split("\n"))
            found[direction] = [dict(zip(header, line, strict=True)) for line in lines]
    return found


@pytest.mark.parametrize("direction", report.TITLES)
def test_tables_show_the_measured_times(direction):
    shown, known = tables().get(direction, []), measured(direction)
    assert {row["Hk/Hv, sequences"] for row in shown} == known.keys()
    for row in shown:
        runs = known[row["Hk/Hv, sequences"]]
        for column, name in COLUMNS.items():
            times = {f"{run[name]:.3f}" for run in runs if name in run}
            assert row.get(column, "-") in (times or {"-"}), (row, column)
        peers = [[ms for name, ms in run.items() if name != "flashqla"] for run in runs]
        ratios = [run["flashqla"] / min(times) for run, times in zip(runs, peers, strict=True) if times]
        assert row["ours / best"] == (f"{max(ratios):.2f}" if ratios else "-")
        (ours,) = {f"{run['flashqla']:.3f}" for run in runs} & {row["flashqla"]} or {None}
        assert ours is not None


def test_slower_rows_are_named():
    readme = (ROOT / "README.md").read_text()
    for direction in report.TITLES:
        for row in tables().get(direction, []):
            if row["ours / best"] != "-" and float(row["ours / best"]) > 1:
                told = f"{row['Hk/Hv, sequences']} ({row['ours / best']} times as long as"
                assert told in readme


def test_every_measured_row_was_right():
    for path in BENCHES:
        for row in json.loads(path.read_text())["rows"]:
            limits = {"o": 6e-3, "final_state": 6e-3}
            assert row["name"] == Row.parse(row["name"]).name
            for name in row["time_ms"]:
                assert all(error <= limits.get(result, 2e-2) for result, error in row["error"][name].items())
    assert all(case["ok"] for case in json.loads((RESULTS / "selftest.json").read_text())["rows"])


# ---- the rules, on a small checkout


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository with one kernel, one measurement of it, and a README that says so."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    kernel = tmp_path / "flashqla" / "hopper" / "chunk.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("first\n")
    (tmp_path / "README.md").write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\nMore.\n")
    git(tmp_path, "init", "-q")
    commit_all(tmp_path)
    write_bench(tmp_path, git(tmp_path, "rev-parse", "--short=12", "HEAD"))
    assert main(["report", "--root", str(tmp_path)]) == 0
    commit_all(tmp_path)
    return tmp_path


def commit_all(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-qm", "change")


def write_bench(root: Path, commit: str, ours: float = 0.5, direction: str = "forward") -> None:
    row = {"pass": direction, "name": "2/8 1x8192", "floor_ms": 0.1, "time_ms": {"flashqla": ours, "flash_qla": 1.0}}
    row["error"] = {"flashqla": {"o": 1e-3}, "flash_qla": {"o": 2e-3}}
    env = {"gpu": "GPU", "date": "2026-12-01T00:00:00", "commit": commit, "peers": {"flash_qla": "0.1.3"}}
    path = root / report.RESULTS / "bench.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"env": env, "rows": [row]}))


def check(root: Path) -> int:
    return main(["report", "--check", "--root", str(root)])


def test_report_writes_between_the_markers(checkout):
    readme = (checkout / "README.md").read_text()
    assert readme.startswith(f"# Title\n\n{report.BEGIN}\n") and readme.endswith(f"{report.END}\n\nMore.\n")
    assert "| 2/8 1x8192 | 0.500 | 1.000 | 0.50 | 5.0 |" in readme
    assert "old" not in readme and report.STALE not in readme
    assert check(checkout) == 0


def test_old_evidence_must_be_marked(checkout):
    kernel = checkout / "flashqla" / "hopper" / "chunk.py"
    kernel.write_text("second\n")
    assert check(checkout) == 1  # also before the change is committed
    commit_all(checkout)
    assert check(checkout) == 1
    assert main(["report", "--root", str(checkout)]) == 0
    assert report.STALE in (checkout / "README.md").read_text()
    assert check(checkout) == 0
    kernel.write_text("first\n")  # the kernel that was measured is back
    assert check(checkout) == 1


def test_a_new_kernel_file_makes_evidence_old(checkout):
    (checkout / "flashqla" / "hopper" / "more.cuh").write_text("new\n")
    commit_all(checkout)
    assert check(checkout) == 1


@pytest.mark.parametrize("commit, stale", [("0123456789ab", True), ("HEAD+dirty", True), ("HEAD", False)])
def test_unknown_and_changed_commits(checkout, commit, stale):
    """What git does not know is older than the last change of a kernel if its date is."""
    write_bench(checkout, commit.replace("HEAD", git(checkout, "rev-parse", "--short=12", "HEAD")))
    assert main(["report", "--root", str(checkout)]) == 0
    assert (report.STALE in (checkout / "README.md").read_text()) == stale


def test_changed_numbers_are_found(checkout, capsys):
    write_bench(checkout, git(checkout, "rev-parse", "--short=12", "HEAD"), ours=2.0)
    capsys.readouterr()
    assert check(checkout) == 1
    assert capsys.readouterr().out.count("out of date") == 2  # README and figure
    assert main(["report", "--root", str(checkout)]) == 0
    assert "**Slower** on 2/8 1x8192 (2.00 times as long as flash-qla)." in (checkout / "README.md").read_text()


def test_figures_do_not_change_without_reason(checkout):
    path = checkout / report.figure_path("forward")
    before = path.read_bytes()
    assert main(["report", "--root", str(checkout)]) == 0
    assert path.read_bytes() == before


def test_without_results_is_one_line(tmp_path, capsys):
    assert main(["report", "--root", str(tmp_path)]) == 2
    assert "README.md" in capsys.readouterr().err
