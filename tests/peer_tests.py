"""Run FlashAttention's own tests through `flash_dmattn.integrations.flash_attn`, on a GPU.

    python tests/peer_tests.py CHECKOUT --sample 40          # forty of each test, the same ones every time
    python tests/peer_tests.py CHECKOUT -- -x -k varlen      # all of some, with arguments of pytest

CHECKOUT is a clone of the repository flash-attention. Its package need not be built: modules that tests use beside the
functions, such as `bert_padding`, are read from there. Two things cannot be expressed and are left out: tests with
dropout, which read the probabilities that the function returns, and tests of its C++ entry points.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import types
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

from benchmarks.machine import commit_of  # noqa: E402
from flash_dmattn.integrations import flash_attn  # noqa: E402

ENTRY_POINTS = ("test_flash_attn_generator_arg_must_be_none",)


def stand_in(checkout: Path) -> None:
    """Make `import flash_attn` give our functions, and the other modules of a checkout."""
    package = types.ModuleType("flash_attn")
    package.__path__ = [str(checkout / "flash_attn")]
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface.USE_TRITON_ROCM = False  # type: ignore[attr-defined]
    interface._get_block_size_n = None  # type: ignore[attr-defined]  # tests with dropout alone call it
    for name in flash_attn.__all__:
        for module in (package, interface):
            setattr(module, name, getattr(flash_attn, name))
    sys.modules.update({"flash_attn": package, "flash_attn.flash_attn_interface": interface})


class Selection:
    """A plugin of pytest that leaves out what cannot be expressed, draws a sample, and counts outcomes by test."""

    def __init__(self, sample: int | None) -> None:
        self.sample = sample
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        """Keep the tests that can be expressed, or so many of each."""
        kept, by_test = [], defaultdict(list)
        for item in items:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            name = item.originalname or item.name
            if parameters.get("dropout_p", 0) > 0 or name in ENTRY_POINTS:
                self.counts[name]["left out"] += 1
            else:
                by_test[name].append(item)
        for own in by_test.values():
            few = self.sample is not None and self.sample < len(own)
            kept += random.Random(0).sample(own, self.sample) if few and self.sample is not None else own
        kept_ids = {item.nodeid for item in kept}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept_ids])
        items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one outcome for each test."""
        if report.when == "call" or (report.outcome != "passed" and report.when == "setup"):
            self.counts[report.nodeid.split("::")[-1].split("[")[0]][report.outcome] += 1
            if report.failed:
                self.failed.append(report.nodeid)


def main() -> int:
    """Run the tests of the command line; return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--sample", type=int, help="run so many of each test")
    parser.add_argument("--out", type=Path, help="write counts to this JSON file")
    own, pytest_arguments = sys.argv[1:], []
    if "--" in own:
        own, pytest_arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    file = options.checkout / "tests" / "test_flash_attn.py"
    if not file.is_file():
        parser.error(f"{options.checkout} has no tests/test_flash_attn.py; it needs to be a clone of flash-attention")
    stand_in(options.checkout)
    selection = Selection(options.sample)
    arguments = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "--rootdir", str(options.checkout)]
    status = int(pytest.main([str(file), *arguments, *pytest_arguments], plugins=[selection]))
    print("| test | passed | failed | skipped by it | left out |\n| --- | --- | --- | --- | --- |")
    for name, counts in selection.counts.items():
        print(f"| {name} | " + " | ".join(str(counts[x]) for x in ("passed", "failed", "skipped", "left out")) + " |")
    if options.out is not None:
        content = {"checkout": commit_of(options.checkout), "tests": selection.counts, "failed": selection.failed}
        options.out.write_text(json.dumps(content, indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())
