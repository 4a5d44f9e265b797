"""`python -m flashqla report`: the README's results and its figures, from the committed measurements and nothing else.

Every result file under `notebooks/results/h200/` says at which commit it was measured. What was measured on other
kernels than those of this checkout is marked stale in the README's table of evidence; `--check`, a test in CI, fails
when README or figures are not what this command would write.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import flashqla
from flashqla.bench_peers import OURS, TABLES
from flashqla.console import UserError

ROOT = pathlib.Path(flashqla.__file__).resolve().parents[1]
RESULTS, FIGURES = pathlib.Path("notebooks", "results", "h200"), pathlib.Path("notebooks", "figures")
BEGIN = "<!-- results: made by python -m flashqla report -->"
END = "<!-- end of results -->"
KERNELS = ("flashqla/hopper/*.py", "flashqla/hopper/*.cuh")
NOT_DECODING = (":!flashqla/hopper/recurrent.py", ":!flashqla/hopper/launch_recurrent.py")
PEERS = {"flash_qla": "flash-qla", "flashinfer": "FlashInfer", "fla": "FLA"}
TITLES = {"forward": "Forward", "backward": "Backward alone", "step": "Forward and backward"}
STALE = "**stale**: kernels have changed since"


@dataclass(frozen=True)
class Evidence:
    """One result file: its path from the root, its environment and rows; for a log, the commits that it names."""

    path: pathlib.Path
    env: dict[str, Any]
    rows: list[dict[str, Any]]
    commits: tuple[str, ...]
    kind: str = "cases within their limits"

    @property
    def is_bench(self) -> bool:
        return any("pass" in row for row in self.rows)

    @property
    def says(self) -> str:
        """What it shows, in a few words."""
        if self.is_bench:
            passes = list(dict.fromkeys(row["pass"] for row in self.rows))
            return f"{len(self.rows)} rows of the benchmark ({', '.join(passes)})"
        if any("time_ms" in row for row in self.rows):
            return f"{len(self.rows)} rows of decoding"
        if self.rows:
            passed = sum(bool(row.get("ok")) for row in self.rows)
            skipped = sum(row.get("ok") is None for row in self.rows)
            return f"{passed} of {len(self.rows) - skipped} {self.kind}" + f", {skipped} skipped" * bool(skipped)
        return "log"


@dataclass
class Entry:
    """One row of a pass over all runs: the newest time of every contender, and within one run ours over the best."""

    name: str
    floor_ms: float
    time_ms: dict[str, float] = field(default_factory=dict)
    ratio: float | None = None
    best: str | None = None


def main(arguments: argparse.Namespace) -> int:
    """The command; arguments as `flashqla.cli` defines them. Returns 1 when `--check` finds something out of date."""
    root = pathlib.Path(arguments.root or ROOT)
    evidence = load(root)
    wrong = out_of_date(root, evidence)
    if arguments.check:
        print("\n".join(f"{path}: out of date, run python -m flashqla report" for path in wrong) or "all up to date")
        return 1 if wrong else 0
    readme = root / "README.md"
    readme.write_text(with_section(readme.read_text(), section(root, evidence)))
    for direction, entries in passes_of(evidence).items():
        if bars_of(entries):
            draw(direction, entries, root / figure_path(direction))
    print("\n".join(f"written: {path}" for path in wrong) or "nothing to change")
    return 0


def load(root: pathlib.Path) -> list[Evidence]:
    """All result files, newest first; UserError when there are none, or the README has no place for them."""
    folder, found = root / RESULTS, []
    if BEGIN not in (readme_of(root)):
        raise UserError(f"{root / 'README.md'} has no line {BEGIN!r}; reports are made in a checkout")
    for path in sorted(folder.glob("*")):
        if path.suffix == ".json":
            content = json.loads(path.read_text())
            env = content["env"]
            kind = Evidence.kind
            if notebooks := content.get("notebooks"):
                kind, content["rows"] = "notebooks without a failed check", list(notebooks.values())
            elif "command" in content:
                kind = f"tests passed ({content['command']})"
            commits = (env.get("commit") or "unknown",)
            found.append(Evidence(path.relative_to(root), env, content["rows"], commits, kind))
        elif path.suffix == ".txt":
            text = path.read_text()
            date = re.search(r"\d{4}-\d\d-\d\d", text)
            commits = tuple(dict.fromkeys(re.findall(r"\bcommit ([0-9a-f]{7,40}\b(?:\+dirty)?)", text)))
            env = {"date": date[0] if date else ""}
            found.append(Evidence(path.relative_to(root), env, [], commits or ("unknown",)))
    if not found:
        raise UserError(f"no results under {folder}")
    return sorted(found, key=lambda one: one.env["date"], reverse=True)


def readme_of(root: pathlib.Path) -> str:
    """The README of a checkout, empty where there is none."""
    path = root / "README.md"
    return path.read_text() if path.exists() else ""


# ---------------------------------------------------------------------------------------------------------------- stale


def kernels_changed(root: pathlib.Path, commit: str, date: str, kernels: Sequence[str] = KERNELS) -> bool:
    """Whether the kernels differ from those of a commit, or, where git does not know it, are younger than a date."""

    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)

    if git("rev-parse", "--git-dir").returncode:
        return False  # no history here, nothing to say
    if commit.endswith("+dirty"):
        return True  # nobody can say what was measured
    if not git("cat-file", "-e", f"{commit}^{{commit}}").returncode:
        return git("diff", "--quiet", commit, "--", *kernels).returncode != 0
    changed = git("log", "-1", "--date=format-local:%Y-%m-%dT%H:%M:%S", "--format=%cd", "--", *kernels).stdout.strip()
    return changed > date


def is_stale(root: pathlib.Path, one: Evidence) -> bool:
    """Whether some of it was measured on other kernels than those in the checkout."""
    kernels = KERNELS + NOT_DECODING if one.is_bench else KERNELS
    return any(kernels_changed(root, commit, one.env["date"], kernels) for commit in one.commits)


# --------------------------------------------------------------------------------------------------------------- tables


def passes_of(evidence: Iterable[Evidence]) -> dict[str, list[Entry]]:
    """Every pass with measurements, its rows in the order of the benchmark's table, others after them.

    A ratio compares times of one run only; over several runs the worst one counts.
    """
    found: dict[str, dict[str, Entry]] = {direction: {} for direction in TABLES}
    for one in evidence:
        for row in one.rows if one.is_bench else ():
            entry = found[row["pass"]].setdefault(row["name"], Entry(row["name"], row["floor_ms"]))
            times = row["time_ms"]
            for name, ms in times.items():
                entry.time_ms.setdefault(name, ms)
            for peer in times.keys() & PEERS.keys() if OURS in times else ():
                if entry.ratio is None or times[OURS] / times[peer] > entry.ratio:
                    entry.ratio, entry.best = times[OURS] / times[peer], peer
    order = {
        direction: sorted(rows.values(), key=lambda entry: position(direction, entry.name))
        for direction, rows in found.items()
    }
    return {direction: rows for direction, rows in order.items() if rows}


def position(direction: str, name: str) -> tuple[int, str]:
    """Where a row stands: as in the benchmark's table, unknown ones behind."""
    names = list(TABLES[direction])
    return (names.index(name) if name in names else len(names), name)


def section(root: pathlib.Path, evidence: Sequence[Evidence]) -> str:
    """Everything between the two markers of the README."""
    parts = []
    for direction, entries in passes_of(evidence).items():
        runs = [one for one in evidence if any(row.get("pass") == direction for row in one.rows)]
        parts += [introduction(direction, runs), markdown(entries), verdict(entries)]
        if bars_of(entries):  # a peer was timed
            parts.append(f"![{TITLES[direction]}: best peer over {OURS}]({figure_path(direction).as_posix()})")
    parts.append(evidence_table(root, evidence))
    return "\n\n".join(parts)


def introduction(direction: str, runs: Sequence[Evidence]) -> str:
    """Where and when a pass was measured, and how exact the contenders were."""
    env, rows = runs[0].env, [row for one in runs for row in one.rows if row.get("pass") == direction]
    worst: dict[str, float] = {}
    for row in rows:
        for name in row["time_ms"]:
            worst[name] = max(worst.get(name, 0.0), *row["error"][name].values())
    installed = {name: version for one in reversed(runs) for name, version in one.env["peers"].items() if version}
    errors = ", ".join(
        f"{error:.1e} for {' '.join(filter(None, (PEERS.get(name, name), installed.get(name))))}"
        for name, error in worst.items()
    )
    dates = sorted({one.env["date"][:10] for one in runs})
    how = "medians of CUDA-graph replays"
    if waiting := sorted({name for one in runs for row in one.rows for name in row.get("eager", ())}):
        how += f" ({' and '.join(PEERS.get(name, name) for name in waiting)}: of calls queued back to back)"
    return (
        f"**{TITLES[direction]}** on one {env['gpu']}, {' and '.join(dates)}, K = V = 128, bfloat16, states given and "
        f"returned: milliseconds, {how}. Every contender was first held against float64 on the same inputs; largest "
        f"relative L2 of any result: {errors}. The last column compares within one run."
    )


def markdown(entries: Sequence[Entry]) -> str:
    """The table of a pass; peers that were never timed have no column."""
    peers = [name for name in PEERS if any(name in entry.time_ms for entry in entries)]
    header = ["Hk/Hv, sequences", OURS, *(PEERS[name] for name in peers), "ours / best", "ours / floor"]
    lines = [header, ["---", *["--:"] * (len(header) - 1)]]
    for entry in entries:
        times = [f"{entry.time_ms[name]:.3f}" if name in entry.time_ms else "-" for name in (OURS, *peers)]
        ratio = "-" if entry.ratio is None else f"{entry.ratio:.2f}"
        floor = f"{entry.time_ms[OURS] / entry.floor_ms:.1f}" if OURS in entry.time_ms else "-"
        lines.append([entry.name, *times, ratio, floor])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict(entries: Sequence[Entry]) -> str:
    """How often we win, by how much, and every row on which we do not."""
    raced = [entry for entry in entries if entry.ratio is not None]
    if not raced:
        return "No peer was timed."
    gain = math.exp(statistics.fmean(-math.log(entry.ratio) for entry in raced))
    slower = sorted((entry for entry in raced if entry.ratio > 1), key=lambda entry: -entry.ratio)
    text = f"Faster than every peer timed on {len(raced) - len(slower)} of {len(raced)} rows; "
    text += f"geometric mean of best peer / {OURS}: {gain:.2f}."
    if slower:
        named = (f"{entry.name} ({entry.ratio:.2f} times as long as {PEERS[entry.best]})" for entry in slower)
        text += f" **Slower** on {', '.join(named)}."
    return text


def evidence_table(root: pathlib.Path, evidence: Iterable[Evidence]) -> str:
    """Every result file with its date and commit, and whether the kernels are still those that it speaks of."""
    lines = ["| evidence | shows | date | commit | kernels |", "|---|---|---|---|---|"]
    for one in sorted(evidence, key=lambda one: one.path.name):
        state = STALE if is_stale(root, one) else "as measured"
        cells = (f"[{one.path.name}]({one.path.as_posix()})", one.says, one.env["date"][:10], ", ".join(one.commits))
        lines.append(f"| {' | '.join(cells)} | {state} |")
    return "\n".join(lines)


def with_section(readme: str, text: str) -> str:
    """The README with everything between the markers replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise UserError(f"README.md has no line {END!r}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


# -------------------------------------------------------------------------------------------------------------- figures


def figure_path(direction: str) -> pathlib.Path:
    """Where the figure of a pass lies, from the root."""
    return FIGURES / f"bench-{direction}.svg"


def bars_of(entries: Iterable[Entry]) -> list[tuple[str, str, float]]:
    """What a figure shows: row, best peer, and how many times as long as ours it takes."""
    return [(entry.name, entry.best, 1 / entry.ratio) for entry in entries if entry.ratio is not None]


def digest(direction: str, entries: Iterable[Entry]) -> str:
    """Fingerprint of what a figure shows; it stands in the file, so that an old one can be told."""
    shown = [direction, *((name, best, f"{gain:.4f}") for name, best, gain in bars_of(entries))]
    return "data " + hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def draw(direction: str, entries: Sequence[Entry], path: pathlib.Path) -> None:
    """One bar a row: how many times as long as ours the best peer takes. The same data give the same bytes."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("figures need the package matplotlib (pip install matplotlib)") from error
    bars = bars_of(entries)
    names = [f"{name}  ({PEERS[best]})" for name, best, _ in bars]
    gains = [gain for *_, gain in bars]
    with matplotlib.rc_context({"svg.hashsalt": "flashqla", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8, 1.1 + 0.26 * len(bars)), layout="constrained")
        axes = figure.subplots()
        colors = ["#2a7f62" if gain >= 1 else "#c8553d" for gain in gains]
        axes.bar_label(axes.barh(range(len(bars)), gains, color=colors, height=0.7), fmt="%.2f", padding=3)
        axes.set_yticks(range(len(bars)), names)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(f"time of the best peer (in brackets) / time of {OURS}")
        axes.set_title(TITLES[direction])
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Creator": None, "Description": digest(direction, entries)}
        figure.savefig(path, format="svg", metadata=metadata)


def out_of_date(root: pathlib.Path, evidence: Sequence[Evidence]) -> list[str]:
    """README and figures that are not what this command would write, by their paths from the root."""
    readme = readme_of(root)
    wrong = [] if readme == with_section(readme, section(root, evidence)) else ["README.md"]
    for direction, entries in passes_of(evidence).items():
        path = root / figure_path(direction)
        if bars_of(entries) and (not path.exists() or digest(direction, entries) not in path.read_text()):
            wrong.append(figure_path(direction).as_posix())
    return wrong
