"""Which packages the distribution has, and whether the CUDA extension is built; the rest is in pyproject.toml."""

import os
import shutil
import sys

from setuptools import Extension, find_packages, setup

# The two folders are at the top of the tree to be easy to find, and are imported only below flash_dmattn: their bare
# names belong to other packages on PyPI.
PACKAGE_DIR = {
    "flash_dmattn": "flash_dmattn",
    "flash_dmattn.reference": "reference",
    "flash_dmattn.triton_kernels": "triton_kernels",
}
# setup.py runs once for each step of an installation; only these steps build, so only these speak or fail.
BUILDING = {"build", "build_ext", "bdist_wheel", "editable_wheel", "develop", "install"}


def find_nvcc() -> str | None:
    """Return the path of the CUDA compiler, or None."""
    homes = [os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
    folders = [os.path.join(home, "bin") for home in homes if home] + [os.environ.get("PATH", os.defpath)]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def reasons_not_to_build_cuda() -> list[str]:
    """Return every reason why the CUDA extension cannot be built here."""
    reasons = ["this version has no CUDA sources: csrc/ holds no kernel yet"]
    if find_nvcc() is None:
        reasons.append("nvcc was not found in CUDA_HOME, in CUDA_PATH or on PATH")
    return reasons


def cuda_extensions(building: bool) -> list[Extension]:
    """Return the extensions to build, as FLASH_DMATTN_BUILD_CUDA=auto|force|skip asks."""
    wish = os.environ.get("FLASH_DMATTN_BUILD_CUDA", "auto")
    if wish not in ("auto", "force", "skip"):
        sys.exit(f"FLASH_DMATTN_BUILD_CUDA is {wish!r}; it must be 'auto' (as when unset), 'force' or 'skip'.")
    if wish == "skip" or not building:
        return []
    reasons = "; ".join(reasons_not_to_build_cuda())
    if wish == "force":
        sys.exit(
            f"FLASH_DMATTN_BUILD_CUDA=force, but the CUDA extension cannot be built: {reasons}. "
            "Use 'auto' or 'skip' to install without it."
        )
    print(f"flash_dmattn: the CUDA extension is not built: {reasons}.", flush=True)
    return []


setup(
    packages=[*find_packages(include=["flash_dmattn", "flash_dmattn.*"]), *list(PACKAGE_DIR)[1:]],
    package_dir=PACKAGE_DIR,
    ext_modules=cuda_extensions(building=not BUILDING.isdisjoint(sys.argv)),
)
