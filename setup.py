"""Which packages the distribution has, and whether the CUDA extension is built; the rest is in pyproject.toml."""

import re
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, __version__, find_packages, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

# Without build isolation pip takes the installed setuptools. A new environment of Python 3.11 has 65.5.
if int(__version__.partition(".")[0]) < 77:
    sys.exit(
        f"setuptools is {__version__}; it needs to be 77 or later, which reads the license of pyproject.toml: "
        f'{sys.executable} -m pip install "setuptools>=77"'
    )

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))  # a build backend runs this file without its folder on the path

import build_cuda  # noqa: E402
from build_cuda import say  # noqa: E402

# Folders outside of the package are easy to find there, and are imported only below flash_dmattn: their bare names
# belong to other packages on PyPI.
PACKAGE_DIR = {
    "flash_dmattn": "flash_dmattn",
    "flash_dmattn.reference": "reference",
    "flash_dmattn.triton_kernels": "triton_kernels",
    "flash_dmattn.examples": "examples",
}
# setup.py runs once for each step of an installation; only these steps build, so only these speak or fail.
BUILDING = {"build", "build_ext", "bdist_wheel", "editable_wheel", "develop", "install"}
# Why there is no extension, and below that line the last that a compiler said; backends/cuda/extension.py reads it.
NOT_BUILT = "_C.not_built.txt"
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "flash_dmattn" / "_version.py").read_text())[1]
# A link to a file of the repository, or a picture that is there.
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^]]*)\]\((?P<path>(?!\w+:|#)[^)]+)\)")


class BuildCuda(build_ext):
    """setuptools' step of the build, with nvcc and ninja in the place of its compiler."""

    def build_extension(self, ext: Extension) -> None:
        """Build the one extension; `ext.optional` is FLASH_DMATTN_BUILD_CUDA=auto, which goes on without it."""
        output = Path(self.get_ext_fullpath(ext.name))
        try:
            # Not self.build_temp: an editable installation removes that, and would compile everything each time.
            kernels = build_cuda.build(output, ROOT / "build" / "cuda", VERSION)
        except build_cuda.BuildError as error:
            output.unlink(missing_ok=True)  # what an earlier build left does not go into this wheel
            above = ", and what it said is above" if error.output else ""
            if not ext.optional:
                sys.exit(f"{build_cuda.FORCE}, but the CUDA extension could not be built: {error}{above}.")
            say(f"the CUDA extension is not built: {error}{above}.")
            KeepReason.reason, KeepReason.output = str(error), error.output
            return
        allowed = build_cuda.SPILLED_BYTES_ALLOWED
        refused = [kernel.name for kernel in kernels if kernel.spilled_bytes > allowed]
        if refused and not ext.optional:
            output.unlink()
            sys.exit(
                f"{build_cuda.FORCE} refuses kernels that spill more than {allowed} bytes of registers: "
                f"{', '.join(refused)}."
            )
        serialized = [kernel.name for kernel in kernels if kernel.is_serialized]
        if serialized:
            told = f"kernels whose matrix products are serialized, for want of registers: {', '.join(serialized)}."
            if not ext.optional:
                output.unlink()
                sys.exit(f"{build_cuda.FORCE} refuses {told}")
            say(f"warning: there are {told} They may take a third longer.")
        spilled = [kernel.spilled_bytes for kernel in kernels if kernel.spilled_bytes]
        if spilled:
            say(
                f"warning: {len(spilled)} of {len(kernels)} kernels spill registers, up to {max(spilled)} bytes, and "
                f"may be slower for it; the end of {build_cuda.LOG} names them."
            )

    def copy_extensions_to_source(self) -> None:
        """End an editable installation; a build that failed does not leave the extension of an earlier one there."""
        if KeepReason.reason:
            for ext in self.extensions:
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            self.extensions = []  # or an installation by links would look for it
        super().copy_extensions_to_source()


class KeepReason(Command):
    """The last step of a build: why there is no extension goes where the extension would be.

    In the checkout where the installation is editable. A wheel has it where a compiler failed; one that was meant to
    have no extension says nothing of the machine that built it. A build that made one leaves no such file.
    """

    user_options: ClassVar[list[tuple[str, str, str]]] = []
    reason: ClassVar[str] = ""
    output: ClassVar[str] = ""

    def initialize_options(self) -> None:
        """As setuptools wants it; it sets `editable_mode` after this."""
        self.editable_mode = False
        self.build_lib = None

    def finalize_options(self) -> None:
        """Take the folder of the other steps."""
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    @property
    def is_kept(self) -> bool:
        """Whether there is something to write."""
        return bool(self.reason if self.editable_mode else self.output)

    def run(self) -> None:
        """Write the file, or remove that of an earlier build."""
        path = Path(ROOT if self.editable_mode else self.build_lib, "flash_dmattn", NOT_BUILT)
        if self.is_kept:
            path.write_text(f"{self.reason}\n{self.output}\n", encoding="utf-8")
        else:
            path.unlink(missing_ok=True)

    def get_outputs(self) -> list[str]:
        """Name the file, as if in a wheel."""
        return [str(Path(self.build_lib, "flash_dmattn", NOT_BUILT))] if self.is_kept else []

    def get_output_mapping(self) -> dict[str, str]:
        """Say where an editable installation finds it."""
        return {path: str(ROOT / "flash_dmattn" / NOT_BUILT) for path in self.get_outputs() if self.editable_mode}

    def get_source_files(self) -> list[str]:
        """Add nothing to a source distribution."""
        return []


class Build(build):
    """setuptools' build, with the step above at its end."""

    sub_commands = [*build.sub_commands, ("keep_reason", None)]


def cuda_extensions(building: bool) -> list[Extension]:
    """Return the extensions to build, as FLASH_DMATTN_BUILD_CUDA asks."""
    if not building:
        return []
    try:
        wish, reason = build_cuda.decide()
    except build_cuda.BuildError as error:
        sys.exit(f"{error}.")
    if wish != "skip" and reason:
        say(f"the CUDA extension is not built: {reason}.")
    KeepReason.reason = reason
    if reason:
        return []
    return [Extension("flash_dmattn._C", sources=[], py_limited_api=True, optional=wish == "auto")]


def readme_for_index() -> str:
    """Return README with links that work on a package index, which has no other file of the repository.

    They begin with the URL of the repository in pyproject.toml. If there is none yet, the text of links stays alone.
    """
    url = re.search(r'^Repository = "(.+?)/?"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)

    def outside(link: re.Match[str]) -> str:
        if url is None:
            return "" if link["picture"] else link["text"]
        view = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({url[1]}/{view}/v{VERSION}/{link['path']})"

    return LINK.sub(outside, (ROOT / "README.md").read_text(encoding="utf-8"))


setup(
    packages=[*find_packages(include=["flash_dmattn", "flash_dmattn.*"]), *list(PACKAGE_DIR)[1:]],
    package_dir=PACKAGE_DIR,
    ext_modules=cuda_extensions(building=not BUILDING.isdisjoint(sys.argv)),
    cmdclass={"build": Build, "build_ext": BuildCuda, "keep_reason": KeepReason},
    long_description=readme_for_index(),
    long_description_content_type="text/markdown",
    options={
        "bdist_wheel": {"py_limited_api": "cp310"},  # of no effect on a wheel without an extension
        "global": {"verbose": "0"},  # or a line for each file that is copied
    },
)
