"""Which packages the distribution has, and whether the CUDA extension is built; the rest is in pyproject.toml."""

import os
import re
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))  # a build backend runs this file without its folder on the path

import build_cuda  # noqa: E402

# The two folders are at the top of the tree to be easy to find, and are imported only below flash_dmattn: their bare
# names belong to other packages on PyPI.
PACKAGE_DIR = {
    "flash_dmattn": "flash_dmattn",
    "flash_dmattn.reference": "reference",
    "flash_dmattn.triton_kernels": "triton_kernels",
}
# setup.py runs once for each step of an installation; only these steps build, so only these speak or fail.
BUILDING = {"build", "build_ext", "bdist_wheel", "editable_wheel", "develop", "install"}


def say(text: str) -> None:
    """Print a line of the build at once, between those of ninja."""
    print(f"flash_dmattn: {text}", flush=True)


class BuildCuda(build_ext):
    """setuptools' step of the build, with nvcc and ninja in the place of its compiler."""

    def build_extension(self, ext: Extension) -> None:
        """Build the one extension; `ext.optional` is FLASH_DMATTN_BUILD_CUDA=auto, which goes on without it."""
        output = Path(self.get_ext_fullpath(ext.name))
        version = re.search(r'__version__ = "(.+)"', (ROOT / "flash_dmattn" / "_version.py").read_text())[1]
        try:
            # Not self.build_temp: an editable installation removes that, and would compile everything each time.
            kernels = build_cuda.build(output, ROOT / "build" / "cuda", version)
        except build_cuda.BuildError as error:
            output.unlink(missing_ok=True)  # what an earlier build left does not go into this wheel
            if not ext.optional:
                sys.exit(f"FLASH_DMATTN_BUILD_CUDA=force, but the CUDA extension could not be built: {error}.")
            say(f"the CUDA extension is not built: {error}.")
            return
        for kernel in kernels:
            say(str(kernel))
        allowed = build_cuda.SPILLED_BYTES_ALLOWED
        refused = [kernel.name for kernel in kernels if kernel.spilled_bytes > allowed]
        if refused and not ext.optional:
            output.unlink()
            sys.exit(
                f"FLASH_DMATTN_BUILD_CUDA=force refuses kernels that spill more than {allowed} bytes of registers: "
                f"{', '.join(refused)}."
            )
        spilled = [kernel.spilled_bytes for kernel in kernels if kernel.spilled_bytes]
        if spilled:
            say(
                f"warning: {len(spilled)} of {len(kernels)} kernels spill registers, up to {max(spilled)} bytes, and "
                "may be slower for it; they are named above."
            )


def cuda_extensions(building: bool) -> list[Extension]:
    """Return the extensions to build, as FLASH_DMATTN_BUILD_CUDA=auto|force|skip asks."""
    wish = os.environ.get("FLASH_DMATTN_BUILD_CUDA", "auto")
    if wish not in ("auto", "force", "skip"):
        sys.exit(f"FLASH_DMATTN_BUILD_CUDA is {wish!r}; it must be 'auto' (as when unset), 'force' or 'skip'.")
    if wish == "skip" or not building:
        return []
    reasons = "; ".join(build_cuda.reasons_not_to_build())
    if reasons and wish == "force":
        sys.exit(
            f"FLASH_DMATTN_BUILD_CUDA=force, but the CUDA extension cannot be built: {reasons}. "
            "Use 'auto' or 'skip' to install without it."
        )
    if reasons:
        say(f"the CUDA extension is not built: {reasons}.")
        return []
    return [Extension("flash_dmattn._C", sources=[], py_limited_api=True, optional=wish == "auto")]


setup(
    packages=[*find_packages(include=["flash_dmattn", "flash_dmattn.*"]), *list(PACKAGE_DIR)[1:]],
    package_dir=PACKAGE_DIR,
    ext_modules=cuda_extensions(building=not BUILDING.isdisjoint(sys.argv)),
    cmdclass={"build_ext": BuildCuda},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},  # of no effect on a wheel without an extension
)
