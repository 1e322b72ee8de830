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
SOURCES = ("flash_dmattn", "reference", "triton_kernels", "examples", "csrc")
# The tests, and what they read and import besides.
TESTED = ("tests", "docs", "benchmarks", "release")
# Where each folder of the checkout is found after an installation.
PACKAGES = {
    "flash_dmattn": "flash_dmattn",
    "reference": "flash_dmattn/reference",
    "triton_kernels": "flash_dmattn/triton_kernels",
    "examples": "flash_dmattn/examples",
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
    return copy_of_checkout(tmp_path_factory.mktemp("checkout"), *SOURCES)


def copy_of_checkout(tree: Path, *folders: str) -> Path:
    """Copy folders of the checkout and the files next to them."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "_C.not_built.txt")
    for folder in folders:
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for file in ROOT.glob("[!.]*"):
        if file.is_file():
            shutil.copy(file, tree)
    return tree


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", out, checkout, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@builds
def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    files = names(wheel)
    assert {name.partition("/")[0] for name in files} == {"flash_dmattn", f"flash_dmattn-{VERSION}.dist-info"}
    expected = {
        f"{package}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, package in PACKAGES.items()
        for file in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in files if name.endswith(".py")} == expected
    assert {"flash_dmattn/reference/formula.py", "flash_dmattn/py.typed"} <= files
    assert any(re.fullmatch(r"flash_dmattn-.*\.dist-info/(licenses/)?LICENSE", name) for name in files)


@builds
def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"flash_dmattn-{VERSION}.dist-info/METADATA").decode()
    for line in (f"Version: {VERSION}", "Requires-Python: >=3.10", "License-Expression: BSD-3-Clause"):
        assert line in metadata.splitlines()
    required = re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.MULTILINE)
    assert sorted(required) == ["einops", "packaging", "torch>=2.9"]


LINK = re.compile(r"\]\((?!https?:|#)([^)]*)\)")


@builds
@pytest.mark.parametrize("url", ["", "https://example.org/owner/repository"])
def test_links_of_the_readme_work_on_an_index(url: str, tree: Path, tmp_path: Path) -> None:
    """They are absolute, or not there while the project has no URL."""
    if url:
        with (tree / "pyproject.toml").open("a") as file:
            file.write(f'\n[project.urls]\nRepository = "{url}"\n')
    build("build_sdist", tree, tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path)
    description = (tmp_path / f"flash_dmattn-{VERSION}" / "PKG-INFO").read_text().partition("\n\n")[2]
    assert not LINK.findall(description)
    relative = LINK.findall((ROOT / "README.md").read_text())
    absolute = re.findall(rf"{re.escape(url)}/(?:blob|raw)/v{VERSION}/([^)]*)\)", description) if url else []
    assert absolute == (relative if url else []) and len(relative) > 20
    assert "how it is measured" in description


@builds
def test_installed_wheel_works_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", target, wheel, cwd=tmp_path)
    code = CALL.format(setup="", place=str(target))
    assert f"version {VERSION}" in run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(target)).stdout


def test_checkout_works_from_its_root() -> None:
    assert f"version {VERSION}" in run(sys.executable, "-c", CALL.format(setup="", place=str(ROOT)), cwd=ROOT).stdout


@builds
@pytest.mark.parametrize("mode", ["compat", "lenient", "strict"])
def test_editable_install_works_from_elsewhere(mode: str, checkout: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta as b; b.build_editable({str(tmp_path)!r}, {{'editable_mode': {mode!r}}})"
    run(sys.executable, "-c", code, cwd=checkout)
    (editable,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(editable) as archive:
        archive.extractall(site)
    if mode == "compat":  # as `make` installs it: type checkers read folders of a .pth, and run no hook of imports
        (path,) = site.glob("*.pth")
        assert Path(path.read_text().strip(), "flash_dmattn", "py.typed").is_file()
    # -S leaves out every .pth of this interpreter: an editable install that it has must not answer instead.
    packages = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    code = CALL.format(setup=f"site.addsitedir({str(site)!r}); sys.path += {packages}", place=str(checkout))
    assert f"version {VERSION}" in run(sys.executable, "-S", "-c", code, cwd=tmp_path).stdout


@builds
def test_sdist_holds_what_is_tested_and_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    checkout = copy_of_checkout(tmp_path / "checkout", *SOURCES, *TESTED)
    build("build_sdist", checkout, tmp_path, FLASH_DMATTN_BUILD_CUDA="force")  # which stops only a wheel
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path)
    (tree,) = tmp_path.glob("flash_dmattn-*/")
    missing = {str(file.relative_to(checkout)) for file in checkout.rglob("*") if file.is_file()}
    missing -= {str(file.relative_to(tree)) for file in tree.rglob("*") if file.is_file()}
    assert not missing, f"the sdist cannot be tested: it lacks {sorted(missing)}"
    build("build_wheel", tree, tmp_path)
    (rebuilt,) = tmp_path.glob("*.whl")
    assert names(rebuilt) == names(wheel)


def install_block() -> list[str]:
    """The commands of README's section on installing."""
    section = (ROOT / "README.md").read_text().partition("## Install\n")[2].partition("\n## ")[0]
    return [line.partition("#")[0].strip() for line in section.splitlines() if line.startswith("    ")]


@builds
def test_the_install_block_of_the_readme_runs_as_printed(tree: Path, tmp_path: Path) -> None:
    """In a new environment, without a network: torch and what is built with are those of this interpreter.

    ensurepip brings the oldest pip that this Python may have, and up to 3.11 a setuptools that is too old.
    """
    environment = tmp_path / "venv"
    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    *installing, demo = install_block()
    assert demo.startswith("python -m flash_dmattn demo")  # tests/test_demo.py runs it
    first = installing[0]
    required = {Requirement(word.strip('"')).name for word in first.split()[4:]}
    assert {"torch", "setuptools"} <= required
    if sys.version_info < (3, 12):
        too_early = run(python, "-m", "pip", "install", "--no-build-isolation", tree, cwd=tmp_path, check=False)
        assert too_early.returncode != 0
        assert f"it needs to be 77 or later, which reads the license of pyproject.toml: {python}" in too_early.stdout
        run(python, "-m", "pip", "uninstall", "-y", "setuptools", cwd=tmp_path)
    (site,) = environment.glob("lib/python*/site-packages")
    packages = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    (site / "those_of_the_tests.pth").write_text("\n".join(packages))
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    script = "set -e\n" + "\n".join(installing)
    done = run("sh", "-c", script, cwd=tree, PATH=path, PIP_NO_INDEX="1", PIP_FIND_LINKS="").stdout
    assert f"{site / 'flash_dmattn'}\n" in done and re.search("backend eager +usable", done), done


def test_building_takes_setuptools_alone() -> None:
    assert [requirement.name for requirement in map(Requirement, PYPROJECT["build-system"]["requires"])] == [
        "setuptools"
    ]


# The switch of the CUDA build. Machines differ by what is on PATH: scripts stand in for the compiler and for the GPU.

COMPILER = """\
[ "$1" = --version ] && { echo "Cuda compilation tools, release 13.0"; exit; }
case "$*" in *BROKEN*) echo "BROKEN(3): error: 'TORCH_CHECK' was not declared in this scope" >&2; exit 1;; esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""
# As `COMPILER`, but it refuses this source.
BROKEN_SOURCE = "api/mask.cpp"
REFUSES = COMPILER.replace("BROKEN", BROKEN_SOURCE)
ERROR = f"{BROKEN_SOURCE}(3): error: 'TORCH_CHECK' was not declared in this scope"
HOPPER = {"nvcc": COMPILER, "nvidia-smi": "echo 9.0"}
ONLY_HOPPER = "and only a Hopper GPU (compute capability 9.0) can run it"
NO_GPU = f"the machine of the build showed no NVIDIA GPU, {ONLY_HOPPER}"
NOT_BUILT = "flash_dmattn/_C.not_built.txt"
EXTENSION = "flash_dmattn/_C.abi3.so"


class Machine:
    """Programs by their names, and the environment in which there are no others of theirs."""

    def __init__(self, folder: Path, programs: dict[str, str], torch: str = "", has_ninja: bool = True) -> None:
        self.tools, self.site = folder / "tools", folder / "site"
        self.tools.mkdir(parents=True)
        self.site.mkdir()
        for name, script in programs.items():
            self.set(name, script)
        for name in ("sh", "cat"):  # what the commands of ninja use
            program = shutil.which(name)
            assert program is not None
            (self.tools / name).symlink_to(program)
        if torch:
            (self.site / "torch").mkdir()
            (self.site / "torch" / "__init__.py").touch()
            (self.site / f"torch-{torch}.dist-info").mkdir()
            metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
            (self.site / f"torch-{torch}.dist-info" / "METADATA").write_text(metadata)
        if not has_ninja:
            (self.site / "sitecustomize.py").write_text("import sys\nsys.modules['ninja'] = None\n")

    def set(self, name: str, script: str) -> None:
        (self.tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.tools / name).chmod(0o755)

    def environment(self, wish: str) -> dict[str, str]:
        """The environment of a build; it hides a GPU that is really there."""
        none = dict.fromkeys(("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"), "")
        return {**none, "PATH": str(self.tools), "PYTHONPATH": str(self.site), "FLASH_DMATTN_BUILD_CUDA": wish}

    def build_wheel(self, tree: Path, out: Path, wish: str) -> subprocess.CompletedProcess[str]:
        return build("build_wheel", tree, out, check=False, **self.environment(wish))


def wheel_text(folder: Path, name: str) -> str | None:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name).decode() if name in archive.namelist() else None


@pytest.fixture
def tree(checkout: Path, tmp_path: Path) -> Path:
    """A checkout for one test, without what the build of another left."""
    return Path(shutil.copytree(checkout, tmp_path / "tree", ignore=shutil.ignore_patterns("build", "*.egg-info")))


# Why there is no extension: what is missing, and what the build says of it.
MISSING_TOOLS = {
    "no nvcc": ({"programs": {"nvidia-smi": "echo 9.0"}}, "nvcc was not found in CUDA_HOME, in CUDA_PATH or on PATH"),
    "silent nvcc": ({"programs": {**HOPPER, "nvcc": "exit 0"}}, "nvcc --version names no release"),
    "old nvcc": ({"programs": {**HOPPER, "nvcc": "echo release 11.8"}}, "nvcc is release 11.8; sm_90a needs 12.5"),
    "no ninja": ({"programs": HOPPER, "has_ninja": False}, "ninja was not found (pip install ninja)"),
    "old torch": ({"programs": HOPPER, "torch": "2.9.1"}, "torch is 2.9.1; its stable ABI is used as of 2.10"),
}


@pytest.mark.parametrize("missing", MISSING_TOOLS)
def test_what_a_build_lacks_is_said_before_it_starts(missing: str, tmp_path: Path) -> None:
    arguments, reason = MISSING_TOOLS[missing]
    machine = Machine(tmp_path, **arguments)
    command = (sys.executable, ROOT / "csrc" / "build_cuda.py")
    auto = run(*command, cwd=tmp_path, check=False, **machine.environment("auto"))
    assert auto.returncode == 1 and auto.stdout.startswith("the CUDA extension is not built: "), auto.stdout
    assert auto.stdout.rstrip().endswith(reason)
    force = run(*command, cwd=tmp_path, check=False, **machine.environment("force"))
    assert force.returncode == 1 and f"{reason}. Use 'auto' or 'skip' to install without it" in force.stdout


# A stand-in for nvidia-smi, and why auto does not build with it; empty if it builds.
GPUS = {
    "hopper": ("echo 9.0", ""),
    "hopper with another": ("echo 8.9; echo 9.0", ""),
    "others": (
        "echo 12.0; echo 8.9; echo 8.9",
        f"the machine of the build had GPUs of compute capability 12.0, 8.9, {ONLY_HOPPER}",
    ),
    "no driver": ("echo NVIDIA-SMI has failed; exit 9", NO_GPU),
    "none": ("", NO_GPU),
}


@pytest.mark.parametrize("gpu", GPUS)
def test_auto_builds_where_a_hopper_gpu_is(gpu: str, tmp_path: Path) -> None:
    script, reason = GPUS[gpu]
    machine = Machine(tmp_path, {"nvcc": COMPILER, **({"nvidia-smi": script} if script else {})})
    command = (sys.executable, ROOT / "csrc" / "build_cuda.py")
    auto = run(*command, cwd=tmp_path, check=False, **machine.environment("auto"))
    assert auto.stdout.strip() == (
        f"the CUDA extension is not built: {reason}" if reason else "the CUDA extension is built, in some minutes"
    )
    assert auto.returncode == (1 if reason else 0)
    assert run(*command, cwd=tmp_path, **machine.environment("force")).stdout.startswith("the CUDA extension is built")


@builds
@pytest.mark.parametrize(("wish", "programs"), [("auto", HOPPER), ("force", {"nvcc": COMPILER})])
def test_a_wheel_with_the_extension_keeps_no_reason(
    wish: str, programs: dict[str, str], tree: Path, tmp_path: Path
) -> None:
    stale = tree / NOT_BUILT
    stale.write_text("nvcc was not found\n")
    done = Machine(tmp_path / "machine", programs).build_wheel(tree, tmp_path, wish)
    assert done.returncode == 0, done.stdout
    assert wheel_text(tmp_path, EXTENSION) is not None and wheel_text(tmp_path, NOT_BUILT) is None
    log = (tree / "build" / "cuda" / "build.log").read_text()
    assert re.search(r"^\[\d+/\d+\] forward_d128_bf16$", log, re.MULTILINE), log


@builds
def test_a_wheel_that_nobody_tried_to_build_it_for_says_nothing_of_the_machine(tree: Path, tmp_path: Path) -> None:
    done = Machine(tmp_path / "machine", {"nvcc": COMPILER}).build_wheel(tree, tmp_path, "auto")
    assert done.returncode == 0 and list(tmp_path.glob("*-py3-none-any.whl")), done.stdout
    assert f"flash_dmattn: the CUDA extension is not built: {NO_GPU}." in done.stdout.splitlines()
    assert wheel_text(tmp_path, NOT_BUILT) is None


@builds
def test_a_compiler_that_fails_is_quoted_in_the_wheel(tree: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", {**HOPPER, "nvcc": REFUSES})
    done = machine.build_wheel(tree, tmp_path, "auto")
    assert done.returncode == 0, done.stdout
    kept = wheel_text(tmp_path, NOT_BUILT)
    assert kept is not None and wheel_text(tmp_path, EXTENSION) is None
    reason, *output = kept.splitlines()
    assert re.fullmatch(r"a command of the build failed \(nvcc 13\.0, torch 2\.\S+\)", reason)
    assert ERROR in output and not any(line.startswith("[") for line in output), kept
    # No kernel is compiled before what a torch that does not fit would break.
    log = (tree / "build" / "cuda" / "build.log").read_text()
    assert not re.search(r"\] (forward|backward)_d", log), log
    (tmp_path / "force").mkdir()
    forced = machine.build_wheel(tree, tmp_path / "force", "force")
    assert forced.returncode != 0 and not list((tmp_path / "force").iterdir())
    assert ERROR in forced.stdout and f"could not be built: {reason}, and what it said is above." in forced.stdout


# Looks at an installation in a folder, without the .pth of this interpreter: an editable one must not answer instead.
LOOK = """
import site, sys
site.addsitedir({site!r})
sys.path += {packages}
import torch, flash_dmattn
from flash_dmattn.__main__ import main
main(["info"])
q = torch.randn(1, 4, 1, 8)
try:
    flash_dmattn.attention(q, q, q, backend="cuda")
except flash_dmattn.BackendUnavailableError as error:
    print("RAISED", error)
"""


def look(site: Path, cwd: Path) -> tuple[str, str]:
    """Return what `info` prints of an installation, and what a call of `cuda` raises there."""
    packages = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    code = LOOK.format(site=str(site), packages=packages)
    info, _, raised = run(sys.executable, "-S", "-c", code, cwd=cwd).stdout.partition("RAISED ")
    return info, raised


@builds
def test_editable_installs_keep_the_reason_until_a_build_succeeds(tree: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", {**HOPPER, "nvcc": REFUSES})

    def install(site: Path, wish: str) -> None:
        code = f"from setuptools import build_meta; build_meta.build_editable({str(site)!r})"
        site.mkdir()
        run(sys.executable, "-c", code, cwd=tree, **machine.environment(wish))
        (editable,) = site.glob("*.whl")
        with zipfile.ZipFile(editable) as archive:
            archive.extractall(site)

    (tree / EXTENSION).write_text("of an earlier build")
    install(tmp_path / "failed", "auto")
    assert not (tree / EXTENSION).exists()
    info, raised = look(tmp_path / "failed", tmp_path)
    assert f"| {ERROR}\n" in info and f"| {ERROR}\n" in raised

    install(tmp_path / "skipped", "skip")
    info, raised = look(tmp_path / "skipped", tmp_path)
    assert "none: not built: FLASH_DMATTN_BUILD_CUDA was 'skip'\n" in info and ERROR not in info + raised

    machine.set("nvcc", COMPILER)
    install(tmp_path / "built", "auto")
    assert (tree / EXTENSION).exists() and not (tree / NOT_BUILT).exists()
    # The compiler of this test makes empty files, which is what is said then.
    assert "cannot be read: cannot mmap an empty file" in look(tmp_path / "built", tmp_path)[0]


@builds
@pytest.mark.parametrize(
    ("wish", "programs", "refusal"),
    [
        ("skip", HOPPER, ""),
        ("force", {}, "FLASH_DMATTN_BUILD_CUDA=force, but the CUDA extension cannot be built: nvcc was not found"),
        ("yes", HOPPER, "FLASH_DMATTN_BUILD_CUDA is 'yes'; it must be 'auto' (as when unset), 'force' or 'skip'."),
    ],
)
def test_the_other_wishes(wish: str, programs: dict[str, str], refusal: str, tree: Path, tmp_path: Path) -> None:
    """Skip is silent; force fails where nothing can be built; other words are refused."""
    done = Machine(tmp_path / "machine", programs).build_wheel(tree, tmp_path, wish)
    if refusal:
        assert done.returncode != 0 and refusal in done.stdout and not list(tmp_path.glob("*.whl"))
    else:
        assert done.returncode == 0 and "CUDA" not in done.stdout, done.stdout
        assert wheel_text(tmp_path, NOT_BUILT) is None


def test_changelog_speaks_of_this_version() -> None:
    latest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest is not None and latest[1] == VERSION
