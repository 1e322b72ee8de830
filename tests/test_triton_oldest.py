"""Triton: kernels of every kind compiled by the oldest version that is served, in a process of its own."""

from __future__ import annotations

import pytest
from oldest_versions import folder, run_with

OLDEST = folder("triton-3.5")
CODE = """
import triton
assert triton.__version__ == "3.5.0", triton.__version__
from compile_everything import compile_all
from compiled_catalogue import SEQUENCES, catalogue, sample

everything = catalogue(["sm_90"], ["bf16"])
of_sequences = [entry for entry in everything if entry.variant.startswith(SEQUENCES)]
chosen = {entry.label: entry for some in (everything, of_sequences) for entry in sample(some)}
results = compile_all(list(chosen.values()), workers=1)
failed = [result.line for result in results if result.kernel is None]
print(*failed, f"{len(results)} compiled", sep="\\n")
raise SystemExit(bool(failed))
"""


@pytest.mark.skipif(not (OLDEST / "triton").is_dir(), reason=f"{OLDEST} is empty: make test fills it")
def test_kernels_compile_with_the_oldest_version() -> None:
    """Each kernel once, and once more for sequences: a later version of the language takes what the oldest may not."""
    printed = run_with(OLDEST, "-c", CODE)
    assert int(printed.splitlines()[-1].partition(" ")[0]) >= 24, printed
