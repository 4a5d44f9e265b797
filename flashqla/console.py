"""What the commands share: the one-line error, the choice of a device, tables, and a description of this machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Iterable, Sequence

import torch

import flashqla


class UserError(Exception):
    """Something the user can mend; the command line prints it as one line and exits with code 2."""


def pick_device(name: str) -> torch.device:
    """The device called `name` ("auto": a GPU if there is one); UserError if this machine does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:  # torch raises RuntimeError, AssertionError or its own kinds, one a device type
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--device {name!r} cannot be used here: {reason}") from error
    return device


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, without importing it; None when it is missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(device: torch.device) -> dict:
    """Everything a reader of a result file needs to know about where the numbers come from."""
    described = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "flashqla": flashqla.__version__,
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "tilelang", "triton", "numpy")},
        "system": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return described


def commit() -> str | None:
    """FLASHQLA_COMMIT, which names a copy of a checkout; else the commit of this one, "+dirty" when changed since."""
    if given := os.environ.get("FLASHQLA_COMMIT"):
        return given
    root = str(pathlib.Path(flashqla.__file__).resolve().parents[1])
    name = first_line("git", "-C", root, "rev-parse", "--short=12", "HEAD")
    if name is None:
        return None
    return name + ("+dirty" if first_line("git", "-C", root, "status", "--porcelain") else "")


def first_line(*command: str) -> str | None:
    """The first line that a command prints; None when it is missing, fails or says nothing."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next((line.strip() for line in ran.stdout.splitlines() if line.strip()), None)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Plain columns, the first one flush left and the others flush right."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))])
        for first, *rest in lines
    )


def write_json(path: str | pathlib.Path, content: dict) -> None:
    """Write a result file; UserError when the place cannot be written."""
    try:
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
