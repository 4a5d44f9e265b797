"""Run the notebooks as scripts, without Jupyter: every check, one after the other, and a summary.

    python notebooks/run.py                          all of them
    python notebooks/run.py 05 07 --json FILE        some; the summary as JSON
    python notebooks/run.py --figures FOLDER         save the figures as PNG

A notebook raises where a check fails; the others still run, and the exit code is 1. Without matplotlib nothing is
drawn. On a Hopper GPU the notebooks take real sizes: `results/h200/notebooks.json` is the summary of such a run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pathlib
import re
import runpy
import sys
import time
import traceback
import types

import numpy
import torch

from flashqla.console import environment, write_json

FOLDER = pathlib.Path(__file__).resolve().parent
CHECK = re.compile(r"^ok  (?P<label>.*?)(?:  rel (?P<error>\S+) \(limit (?P<limit>\S+)\))?$", re.MULTILINE)
SKIPPED = re.compile(r"^skipped: (.*)$", re.MULTILINE)


class Nothing:
    """Takes every call and attribute of a plot, and draws nothing."""

    def __getattr__(self, name: str) -> Nothing:
        return nothing(name)

    def __call__(self, *arguments: object, **keywords: object) -> Nothing:
        return self


def nothing(name: str) -> Nothing:
    """Any attribute of a plot; those that Python and numpy ask for are not there."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing()


def without_drawing() -> dict[str, types.ModuleType]:
    """Modules that stand in for matplotlib, as far as the notebooks use it."""

    def subplots(rows: int = 1, columns: int = 1, **options: object) -> tuple[Nothing, object]:
        axes = numpy.empty((rows, columns), dtype=object)
        axes.fill(Nothing())
        return Nothing(), axes[0, 0] if rows == columns == 1 else axes.squeeze()

    modules = {name: types.ModuleType(name) for name in ("matplotlib", "matplotlib.pyplot", "matplotlib.colors")}
    for module in modules.values():
        module.__getattr__ = nothing
    modules["matplotlib.pyplot"].subplots = subplots
    modules["matplotlib"].pyplot, modules["matplotlib"].colors = list(modules.values())[1:]
    return modules


def prepare_drawing(figures: pathlib.Path | None) -> None:
    """Let `plt.show` save and close, or do without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        sys.modules.update(without_drawing())
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def show() -> None:
        for number in plt.get_fignums():
            if figures is not None:
                figures.mkdir(parents=True, exist_ok=True)
                count = len(list(figures.glob(f"{show.notebook}_*.png")))
                plt.figure(number).savefig(figures / f"{show.notebook}_{count:02d}.png")
        plt.close("all")

    plt.show = show


def run(path: pathlib.Path) -> dict:
    """Run one notebook; what it checked, skipped and returned in its variable `results`, and how long it took."""
    torch.set_default_dtype(torch.float32)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].show.notebook = path.stem
    printed, error, variables, start = io.StringIO(), None, {}, time.perf_counter()
    here = pathlib.Path.cwd()
    with contextlib.redirect_stdout(printed):
        try:
            os.chdir(FOLDER)
            variables = runpy.run_path(str(path), run_name="__main__")
        except Exception as exception:  # whatever a cell raises, the next notebook goes on
            error = f"{type(exception).__name__}: {exception}"
            traceback.print_exc()
        finally:
            os.chdir(here)
    text = printed.getvalue()
    checks = [
        {"label": match["label"]}
        | {name: float(match[group]) for name, group in (("relative_l2", "error"), ("limit", "limit")) if match[group]}
        for match in CHECK.finditer(text)
    ]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {
        "ok": error is None,
        "error": error,
        "seconds": round(time.perf_counter() - start, 1),
        "checks": checks,
        "skipped": SKIPPED.findall(text),
        "results": variables.get("results", {}),
    }


def main() -> int:
    """The command; 1 when a notebook failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", help="numbers or names; default: all")
    parser.add_argument("--json", type=pathlib.Path, help="write the summary to this file")
    parser.add_argument("--figures", type=pathlib.Path, help="save the figures in this folder")
    arguments = parser.parse_args()
    paths = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
    if arguments.notebooks:
        paths = [path for path in paths if path.stem[:2] in {name[:2] for name in arguments.notebooks}]
    figures, json_file = (path and path.absolute() for path in (arguments.figures, arguments.json))
    prepare_drawing(figures)
    summary = {}
    for path in paths:
        found = summary[path.stem] = run(path)
        verdict = "ok" if found["ok"] else f"FAILED: {found['error']}"
        print(f"{path.stem:26}{found['seconds']:7.1f} s{len(found['checks']):5} checks  {verdict}", flush=True)
        for reason in found["skipped"]:
            print(f"{'':26}skipped: {reason}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if json_file is not None:
        write_json(json_file, {"env": environment(device), "notebooks": summary})
    return int(not paths or not all(found["ok"] for found in summary.values()))


if __name__ == "__main__":
    sys.exit(main())
