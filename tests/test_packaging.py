"""The distribution: what the wheel holds, that every way of installing it works, and the switch of the CUDA build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "flash_dmattn" / "_version.py").read_text())[1]
SOURCES = ("flash_dmattn", "reference", "triton_kernels", "csrc")
# Where each folder of the checkout is found after an installation.
PACKAGES = {
    "flash_dmattn": "flash_dmattn",
    "reference": "flash_dmattn/reference",
    "triton_kernels": "flash_dmattn/triton_kernels",
}

# Calls attention on the formula and on eager, and looks where the modules came from. {place} is where they must lie.
CALL = """
import pathlib, site, sys
{setup}
import torch, flash_dmattn
import flash_dmattn.reference.formula as formula
q = torch.randn(2, 5, 4, 8, dtype=torch.float64)
k, v = torch.randn(2, 2, 7, 2, 8, dtype=torch.float64)
scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, dim=2)) * 8**-0.5
want = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.repeat_interleave(2, dim=2))
for backend in ("eager", "reference", "auto"):
    torch.testing.assert_close(flash_dmattn.attention(q, k, v, backend=backend), want)
bare = {{"reference", "triton_kernels"}} & {{name.partition(".")[0] for name in sys.modules}}
assert not bare, f"imported by their bare names: {{bare}}"
for module in (flash_dmattn, formula):
    assert pathlib.Path({place!r}) in pathlib.Path(module.__file__).parents, module.__file__
print("version", flash_dmattn.__version__)
"""


def missing_build_requirements() -> list[str]:
    """The requirements in pyproject's build-system that this interpreter does not meet: builds here have no network."""
    from importlib.metadata import PackageNotFoundError, version

    missing = []
    for requirement in map(Requirement, PYPROJECT["build-system"]["requires"]):
        try:
            if Version(version(requirement.name)) not in requirement.specifier:
                missing.append(f"{requirement} (found {version(requirement.name)})")
        except PackageNotFoundError:
            missing.append(f"{requirement} (not installed)")
    return missing


MISSING = missing_build_requirements()
builds = pytest.mark.skipif(bool(MISSING), reason=f"building the package offline needs {', '.join(MISSING)}")


def run(*command: str | Path, cwd: Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with nothing of the test session's import path, and show its output when it fails."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", *environment)}
    # Packages are tested without the extension, which has tests/test_cuda_extension.py.
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=inherited | {"FLASH_DMATTN_BUILD_CUDA": "skip"} | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    if check:
        assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stdout}"
    return done


def build(hook: str, tree: Path, out: Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call one PEP 517 hook of the build backend, as pip does with --no-build-isolation."""
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    return run(sys.executable, "-c", code, cwd=tree, check=check, **environment)


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that no build output of an earlier day gets in and none is left behind."""
    tree = tmp_path_factory.mktemp("checkout")
    for source in SOURCES:
        shutil.copytree(ROOT / source, tree / source, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"):
        shutil.copy(ROOT / file, tree)
    return tree


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", out, checkout, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@builds
def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    found = names(wheel)
    assert {name.partition("/")[0] for name in found} == {"flash_dmattn", f"flash_dmattn-{VERSION}.dist-info"}
    expected = {
        f"{package}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, package in PACKAGES.items()
        for file in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in found if name.endswith(".py")} == expected
    assert {"flash_dmattn/reference/formula.py", "flash_dmattn/py.typed"} <= found
    assert any(re.fullmatch(r"flash_dmattn-.*\.dist-info/(licenses/)?LICENSE", name) for name in found)


@builds
def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"flash_dmattn-{VERSION}.dist-info/METADATA").decode()
    for line in (f"Version: {VERSION}", "Requires-Python: >=3.10", "License-Expression: BSD-3-Clause"):
        assert line in metadata.splitlines()
    required = re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.MULTILINE)
    assert sorted(required) == ["einops", "packaging", "torch>=2.9"]


@builds
def test_installed_wheel_works_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", target, wheel, cwd=tmp_path)
    code = CALL.format(setup="", place=str(target))
    assert f"version {VERSION}" in run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(target)).stdout


def test_checkout_works_from_its_root() -> None:
    assert f"version {VERSION}" in run(sys.executable, "-c", CALL.format(setup="", place=str(ROOT)), cwd=ROOT).stdout


@builds
@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_editable_install_works_from_elsewhere(mode: str, checkout: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta as b; b.build_editable({str(tmp_path)!r}, {{'editable_mode': {mode!r}}})"
    run(sys.executable, "-c", code, cwd=checkout)
    (editable,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(editable) as archive:
        archive.extractall(site)
    # -S leaves out every .pth of this interpreter: an editable install that it has must not answer instead.
    packages = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    code = CALL.format(setup=f"site.addsitedir({str(site)!r}); sys.path += {packages}", place=str(checkout))
    assert f"version {VERSION}" in run(sys.executable, "-S", "-c", code, cwd=tmp_path).stdout


@builds
def test_sdist_builds_the_same_wheel(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    build("build_sdist", checkout, tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path)
    (tree,) = tmp_path.glob("flash_dmattn-*/")
    build("build_wheel", tree, tmp_path)
    (rebuilt,) = tmp_path.glob("*.whl")
    assert names(rebuilt) == names(wheel)
    assert (tree / "csrc" / "README.md").is_file() and (tree / "CHANGELOG.md").is_file()


@builds
class TestCudaSwitch:
    """FLASH_DMATTN_BUILD_CUDA, with a machine without nvcc and one with it made by PATH alone."""

    NO_NVCC = "nvcc was not found in CUDA_HOME, in CUDA_PATH or on PATH"
    # Compilers by what they are: a line of shell that answers --version, and everything else.
    COMPILERS = {
        "none": ("", NO_NVCC),
        "silent": ("exit 0", "nvcc --version names no release"),
        "old": ("echo release 11.8", "nvcc is release 11.8; sm_90a needs 12.5"),
    }

    def build(self, tree: Path, out: Path, value: str, nvcc: str = "") -> subprocess.CompletedProcess[str]:
        tools = out / "tools"
        tools.mkdir()
        if nvcc:
            (tools / "nvcc").write_text(f"#!/bin/sh\n{nvcc}\n")
            (tools / "nvcc").chmod(0o755)
        environment = {"PATH": str(tools), "CUDA_HOME": "", "CUDA_PATH": "", "FLASH_DMATTN_BUILD_CUDA": value}
        return build("build_wheel", tree, out, check=False, **environment)

    @pytest.mark.parametrize("compiler", COMPILERS)
    def test_auto_prints_the_reason_and_goes_on(self, compiler: str, checkout: Path, tmp_path: Path) -> None:
        nvcc, reason = self.COMPILERS[compiler]
        done = self.build(checkout, tmp_path, "auto", nvcc)
        assert done.returncode == 0, done.stdout
        assert re.search(f"^flash_dmattn: the CUDA extension is not built: .*{reason}", done.stdout, re.MULTILINE)
        assert list(tmp_path.glob("*-py3-none-any.whl"))

    @pytest.mark.parametrize("compiler", COMPILERS)
    def test_force_fails_with_the_reason(self, compiler: str, checkout: Path, tmp_path: Path) -> None:
        nvcc, reason = self.COMPILERS[compiler]
        done = self.build(checkout, tmp_path, "force", nvcc)
        assert done.returncode != 0 and not list(tmp_path.glob("*.whl"))
        assert "FLASH_DMATTN_BUILD_CUDA=force, but the CUDA extension cannot be built" in done.stdout
        assert reason in done.stdout and "'auto' or 'skip'" in done.stdout

    def test_skip_is_silent(self, checkout: Path, tmp_path: Path) -> None:
        done = self.build(checkout, tmp_path, "skip")
        assert done.returncode == 0, done.stdout
        assert "CUDA" not in done.stdout

    def test_other_values_are_refused(self, checkout: Path, tmp_path: Path) -> None:
        done = self.build(checkout, tmp_path, "yes")
        assert done.returncode != 0
        assert "FLASH_DMATTN_BUILD_CUDA is 'yes'; it must be 'auto' (as when unset), 'force' or 'skip'" in done.stdout

    def test_force_does_not_stop_an_sdist(self, checkout: Path, tmp_path: Path) -> None:
        build("build_sdist", checkout, tmp_path, FLASH_DMATTN_BUILD_CUDA="force")
        assert list(tmp_path.glob("flash_dmattn-*.tar.gz"))


def test_changelog_speaks_of_this_version() -> None:
    latest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest is not None and latest[1] == VERSION
