"""Run FlashAttention's own tests through `flash_dmattn.integrations.flash_attn`, on a GPU.

    python tests/peer_tests.py CHECKOUT --sample 40                 # forty of each test, the same ones every time
    python tests/peer_tests.py CHECKOUT --processes 12 --seconds 100  # as many of all as there is time for
    python tests/peer_tests.py CHECKOUT -- -x -k varlen             # all of some, with arguments of pytest

CHECKOUT is a clone of the repository flash-attention. Its package need not be built: modules that tests use beside the
functions, such as `bert_padding`, are read from there. Two things cannot be expressed and are left out: tests with
dropout, which read the probabilities that the function returns, and tests of its C++ entry points.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import torch  # noqa: E402

from benchmarks.machine import commit_of  # noqa: E402
from flash_dmattn.integrations import flash_attn  # noqa: E402

WORDS = ("passed", "failed", "skipped", "left out", "late")
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
    """A plugin of pytest that leaves out what cannot be expressed, draws a sample, and counts outcomes by test.

    Args:
        sample: how many of each test; None are all.
        part: the number of this process among `parts`, which share the tests.
        parts: how many processes there are.
        seconds: the time for tests; those that are left then are counted as late.
    """

    def __init__(self, sample: int | None, part: int, parts: int, seconds: float) -> None:
        self.sample, self.part, self.parts, self.end = sample, part, parts, time.monotonic() + seconds
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: dict[str, str] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        """Keep the tests that can be expressed, or so many of each, and of these the part of this process."""
        kept, by_test = [], defaultdict(list)
        for item in items:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            name = item.originalname or item.name
            if parameters.get("dropout_p", 0) > 0 or name in ENTRY_POINTS:
                self.counts[name]["left out"] += self.part == 0
            else:
                by_test[name].append(item)
        for own in by_test.values():
            few = self.sample is not None and self.sample < len(own)
            kept += random.Random(0).sample(own, self.sample) if few and self.sample is not None else own
        random.Random(1).shuffle(kept)  # what time leaves over is some of each test
        kept = kept[self.part :: self.parts]
        kept_ids = {item.nodeid for item in kept}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept_ids])
        items[:] = kept

    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        """Run a test if there is time."""
        if time.monotonic() < self.end:
            return None
        self.counts[item.originalname or item.name]["late"] += 1
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one outcome for each test."""
        if report.when == "call" or (report.outcome != "passed" and report.when == "setup"):
            self.counts[report.nodeid.split("::")[-1].split("[")[0]][report.outcome] += 1
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                message = str(report.longrepr) if crash is None else crash.message
                self.failed[report.nodeid] = message.splitlines()[0][:300]


def run_parts(processes: int, own: list[str], pytest_arguments: list[str]) -> list[dict[str, Any]]:
    """Run the processes, on all GPUs in turn, and return what each has written."""
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{part}.json" for part in range(processes)]
        started = [
            subprocess.Popen(
                [sys.executable, __file__, *own, "--part", str(part), "--out", str(file), "--", *pytest_arguments],
                env={**os.environ, **({"CUDA_VISIBLE_DEVICES": str(part % gpus)} if gpus > 1 else {})},
            )
            for part, file in enumerate(files)
        ]
        for process in started:
            process.wait()
        lost = [part for part, file in enumerate(files) if not file.exists()]
        if lost:
            raise RuntimeError(f"processes {lost} ended without a result")
        return [json.loads(file.read_text()) for file in files]


def main() -> int:
    """Run the tests of the command line; return 0, or 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--sample", type=int, help="run so many of each test")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no test after so many")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write counts to this JSON file")
    parser.add_argument("--version", default="", help="what the record calls the checkout, where git cannot say")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # the number of this process
    own, pytest_arguments = sys.argv[1:], []
    if "--" in own:
        own, pytest_arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    file = options.checkout / "tests" / "test_flash_attn.py"
    if not file.is_file():
        parser.error(f"{options.checkout} has no tests/test_flash_attn.py; it needs to be a clone of flash-attention")
    if options.part is not None:
        stand_in(options.checkout)
        selection = Selection(options.sample, options.part, options.processes, options.seconds)
        arguments = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "--rootdir", str(options.checkout)]
        pytest.main([str(file), *arguments, *pytest_arguments], plugins=[selection])
        options.out.write_text(json.dumps({"tests": selection.counts, "failed": selection.failed}))
        return 0
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failed: dict[str, str] = {}
    for content in run_parts(options.processes, own, pytest_arguments):
        failed.update(content["failed"])
        for name, outcomes in content["tests"].items():
            counts[name].update(outcomes)
    print(f"| test | {' | '.join(WORDS)} |\n| {' | '.join(['---'] * (1 + len(WORDS)))} |")
    for name, outcomes in counts.items():
        print(f"| {name} | {' | '.join(str(outcomes[word]) for word in WORDS)} |")
    causes: dict[str, list[str]] = defaultdict(list)
    for test, message in failed.items():
        causes[re.sub(r"-?\d[\d.e+-]*", "N", message)].append(test)
    for tests in sorted(causes.values(), key=len, reverse=True):
        print(f"{len(tests)} failed like {tests[0].split('::')[-1]}: {failed[tests[0]]}")
    if options.out is not None:
        version = options.version or commit_of(options.checkout)
        content = {"checkout": version, "commit": commit_of(ROOT), "device": device_name(), "tests": counts}
        options.out.write_text(json.dumps({**content, "failed": failed}, indent=1))
    return int(bool(failed))


def device_name() -> str:
    """Name the GPU, or the CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    sys.exit(main())
