"""Every notebook is a pair in sync, holds no outputs, and runs top to bottom on the CPU; the links of their README lead
somewhere."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

jupytext = pytest.importorskip("jupytext", reason="needs jupytext, of the extra `test`")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient, of the extra `test`")
pytest.importorskip("ipykernel", reason="needs ipykernel, of the extra `test`")

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
ALL = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def cells(path: pathlib.Path) -> list[tuple[str, str, dict]]:
    """Kind, text and metadata of every cell."""
    return [
        (cell.cell_type, cell.source, {name: value for name, value in cell.metadata.items() if name == "jupyter"})
        for cell in jupytext.read(path).cells
    ]


def test_every_notebook_has_its_pair():
    assert SOURCES
    assert {path.stem for path in SOURCES} == {path.stem for path in FOLDER.glob("*.ipynb")}


@ALL
def test_pair_is_in_sync(source):
    assert cells(source) == cells(source.with_suffix(".ipynb")), f"run: jupytext --sync notebooks/{source.name}"


@ALL
def test_no_outputs(source):
    for cell in jupytext.read(source.with_suffix(".ipynb")).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None, cell.source


@ALL
def test_runs_top_to_bottom(source, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent), prepend=os.pathsep)
    path = source.with_suffix(".ipynb")
    notebook = jupytext.read(path)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()  # raises what a cell raises
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    )
    assert printed.count("ok  ") >= 8, "a notebook checks itself against the library"


def test_run_as_scripts_without_matplotlib(tmp_path):
    """`run.py` on a machine that cannot draw, from another folder."""
    code = "import runpy, sys; sys.modules['matplotlib'] = None; sys.argv[0] = 'run.py'; "
    code += f"runpy.run_path({str(FOLDER / 'run.py')!r}, run_name='__main__')"
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code, "04", "07", "--json", "summary.json"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())["notebooks"]
    assert list(summary) == ["04_inverse", "07_context_parallel"]
    for found in summary.values():
        assert found["ok"] and len(found["checks"]) >= 8 and found["seconds"] > 0
    exact = next(check for check in summary["04_inverse"]["checks"] if check["label"] == "eq. 5.1")
    assert 0 <= exact["relative_l2"] <= exact["limit"] == 1e-12


def test_run_reports_a_failure(tmp_path):
    """A notebook that raises does not keep the others from running, and the exit code tells."""
    for name in ("00_wrong.py", "01_right.py"):
        line = "from flashqla.testing import check\nimport torch\n"
        values = ("2.0", "1.0") if "wrong" in name else ("1.0", "1.0")
        (tmp_path / name).write_text(line + "check('x', torch.tensor({}), torch.tensor({}))".format(*values))
    (tmp_path / "run.py").write_text((FOLDER / "run.py").read_text())
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, tmp_path / "run.py", "--json", tmp_path / "summary.json"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    summary = json.loads((tmp_path / "summary.json").read_text())["notebooks"]
    assert ran.returncode == 1 and "FAILED: AssertionError: x: relative L2" in ran.stdout
    assert not summary["00_wrong"]["ok"] and summary["01_right"]["ok"]
    assert [check["label"] for check in summary["01_right"]["checks"]] == ["x"]


COMMITTED = FOLDER / "results" / "h200" / "notebooks.json"


@pytest.mark.skipif(not COMMITTED.exists(), reason="no run on a Hopper GPU is committed")
def test_committed_run_has_every_notebook():
    """The run on a Hopper GPU, committed: every notebook, nothing failed."""
    run = json.loads(COMMITTED.read_text())
    assert run["env"]["capability"] == "9.0"
    assert set(run["notebooks"]) == {path.stem for path in SOURCES}
    for name, found in run["notebooks"].items():
        assert found["ok"], (name, found["error"])
        assert len(found["checks"]) >= 8
        assert all(check.get("relative_l2", 0) <= check.get("limit", 0) for check in found["checks"])


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)#:\s]+)\)", text)


def test_links_of_the_readme():
    text = (FOLDER / "README.md").read_text()
    for target in links(text):
        assert (FOLDER / target).exists(), target
    assert {f"{source.stem}.ipynb" for source in SOURCES} <= set(links(text)), "a notebook is missing"


@ALL
def test_links_and_equations(source):
    text = "\n".join(text for kind, text, _ in cells(source) if kind == "markdown")
    for target in links(text):
        assert (FOLDER / target).exists(), target
    numbered = set(re.findall(r"^\| (\d+\.\d+) \|", (FOLDER.parent / "derivations" / "README.md").read_text(), re.M))
    for number in re.findall(r"eq\. (\d+\.\d+)", source.read_text()):
        assert number in numbered, f"eq. {number}"
