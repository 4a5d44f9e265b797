"""Every notebook is a pair in sync, holds no outputs, and runs top to bottom on the CPU; the links of their README lead
somewhere."""

import os
import pathlib
import re

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
