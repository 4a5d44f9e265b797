"""pyproject.toml alone holds versions, environment.yml points at it, and the wheel holds exactly the package."""

import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import flashqla

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def requirement_name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower()


def environment_entries() -> tuple[list[str], list[str]]:
    """The conda requirements and the pip requirements of environment.yml, which has the plainest form of YAML."""
    lines = [line.rstrip() for line in (ROOT / "environment.yml").read_text().splitlines() if not line.startswith("#")]
    dependencies = lines[lines.index("dependencies:") + 1 :]
    conda = [line[4:] for line in dependencies if line.startswith("  - ") and line != "  - pip:"]
    pip = [line.strip()[2:] for line in dependencies if line.startswith("      - ")]
    assert len(conda) + len(pip) + 1 == len(dependencies), "a line of environment.yml was not understood"
    return conda, pip


def test_environment_has_one_pip_line_that_points_at_extras():
    _, pip = environment_entries()
    (line,) = pip
    extras = re.fullmatch(r"-e \.\[([\w,]+)\]", line)[1].split(",")
    assert set(extras) <= set(EXTRAS)
    assert "notebooks" in extras


def test_environment_agrees_with_pyproject():
    conda, _ = environment_entries()
    assert f"python{PROJECT['requires-python']}" in conda
    assert {"jupyterlab", "cuda-nvcc", "pip"} <= set(map(requirement_name, conda))
    for requirement in conda:  # versions stand in pyproject alone, except python's own
        assert requirement.startswith("python>=") or re.fullmatch(r"[\w-]+", requirement), requirement


def test_dependencies():
    names = {requirement_name(requirement): requirement for requirement in PROJECT["dependencies"]}
    assert set(names) == {"torch", "numpy", "tilelang", "tqdm"}
    assert names["torch"] == "torch>=2.8"
    assert names["tilelang"] == "tilelang==0.1.15"
    assert {"notebooks", "compare", "integrations", "test", "dev"} == set(EXTRAS)


def test_version():
    assert flashqla.__version__ == PROJECT["version"]


def test_wheel_holds_exactly_the_package(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "flashqla", source / "flashqla", ignore=ignored)
    for folder in ("tests", "notebooks", "derivations"):  # must not slip in
        (source / folder).mkdir()
        (source / folder / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True, text=True)

    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "flashqla").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == package
    assert "flashqla/py.typed" in held
    assert any(name.endswith("LICENSE") for name in zipfile.ZipFile(wheel).namelist())

    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    use = "import sys; sys.path.insert(0, sys.argv[1]); import flashqla.cli; print(flashqla.__file__)"
    command = [sys.executable, "-I", "-c", use, str(tmp_path / "installed")]
    ran = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert ran.stdout.startswith(str(tmp_path / "installed"))
