"""Run FlashAttention's own tests through `flash_dmattn.integrations.flash_attn`, on a GPU.

    python tests/peer_tests.py CHECKOUT --sample 40 --processes 12 --seconds 100
    python tests/peer_tests.py CHECKOUT -- -x -k varlen

The first draws forty of each test, the same ones every time. The second passes arguments to pytest.
CHECKOUT is a clone of the repository flash-attention. Its package need not be built: modules that tests use beside the
functions, such as `bert_padding`, are read from there.

Three kinds cannot be expressed and are left out. Tests with dropout read the probabilities that the function returns.
Two tests call private functions. One wants an error for lengths on a GPU, for which the host would wait. Here kernels
clamp them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import torch  # noqa: E402

from benchmarks.files import write_whole  # noqa: E402
from benchmarks.machine import commit_of  # noqa: E402
from flash_dmattn.integrations import flash_attn  # noqa: E402

PROGRESS_SECONDS = 10.0
BUILT = (None, 64, 128)  # head dims whose calls wait for no compiler, here and wherever FlashAttention is used
WORDS = ("passed", "refused", "failed", "skipped", "left out", "late")
LEFT_OUT = (
    "test_flash_attn_generator_arg_must_be_none",
    "test_flash_attn_varlen_paged_kv_num_splits",
    "test_flash_attn_kvcache_paged_block_table_bounds",
)


def stand_in(checkout: Path) -> None:
    """Make `import flash_attn` give our functions, and the other modules of a checkout."""
    package = types.ModuleType("flash_attn")
    package.__path__ = [str(checkout / "flash_attn")]
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface.USE_TRITON_ROCM = False  # type: ignore[attr-defined]
    interface._get_block_size_n = None  # type: ignore[attr-defined]  # only tests with dropout call it
    for name in flash_attn.__all__:
        for module in (package, interface):
            setattr(module, name, getattr(flash_attn, name))
    sys.modules.update({"flash_attn": package, "flash_attn.flash_attn_interface": interface})


class Selection:
    """A plugin of pytest that leaves out what cannot be expressed, draws a sample, and counts outcomes by test.

    Args:
        sample: how many of each test. By default it is all of them.
        part: the number of this process.
        parts: how many processes share the tests.
        seconds: the time for tests. Later ones are counted as late.
        out: the file of outcomes, which is written after each test.
    """

    def __init__(self, sample: int | None, part: int, parts: int, seconds: float, out: Path) -> None:
        self.sample, self.part, self.parts, self.out = sample, part, parts, out
        self.end = time.monotonic() + seconds
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make the cases of a test that are drawn, and no others: there are half a million in all."""
        marks = [*metafunc.definition.iter_markers("parametrize")]
        if not marks:
            return
        names = [name.strip() for mark in marks for name in mark.args[0].split(",")]
        rows = [[row if "," in mark.args[0] else (row,) for row in mark.args[1]] for mark in marks]
        every = math.prod(map(len, rows))
        if "dropout_p" in names:
            place = next(number for number, mark in enumerate(marks) if mark.args[0] == "dropout_p")
            rows[place] = [row for row in rows[place] if row[0] == 0]
        number = math.prod(map(len, rows))
        if self.part == 0:
            self.counts[metafunc.function.__name__]["left out"] += every - number
        drawn = range(number)
        if self.sample is not None and self.sample < number:
            drawn = random.Random(0).sample(drawn, self.sample)
        cases = []
        for at in drawn:
            case: list[Any] = []
            for choices in rows:
                at, choice = divmod(at, len(choices))
                case += choices[choice]
            cases.append(tuple(case))
        metafunc.definition.own_markers[:] = [x for x in metafunc.definition.own_markers if x not in marks]
        metafunc.parametrize(names, cases)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        """Keep what can be expressed, and of that the part of this process; first what kernels were built for."""
        kept = [item for item in items if item.originalname not in LEFT_OUT]
        if self.part == 0:
            for item in items:
                self.counts[item.originalname]["left out"] += item not in kept
        random.Random(1).shuffle(kept)  # what time leaves over is some of each test
        kept.sort(key=lambda item: hasattr(item, "callspec") and item.callspec.params.get("d") not in BUILT)
        kept = kept[self.part :: self.parts]
        for item in kept:
            self.counts[item.originalname or item.name]["late"] += 1
        kept_ids = {item.nodeid for item in kept}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept_ids])
        items[:] = kept

    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        """Run a test if there is time."""
        return None if time.monotonic() < self.end else True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one outcome for each test."""
        if report.when == "call" or (report.outcome != "passed" and report.when == "setup"):
            outcome: str = report.outcome
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                message = str(report.longrepr) if crash is None else crash.message
                if message.startswith("NotImplementedError"):  # `integrations.flash_attn` names what it does not have
                    outcome = "refused"
                else:
                    self.failed[report.nodeid] = message.splitlines()[0][:300]
            self.counts[report.nodeid.split("::")[-1].split("[")[0]].update({outcome: 1, "late": -1})
            self.save()

    def save(self) -> None:
        """Write what came of the tests until now."""
        write_whole(self.out, json.dumps({"tests": self.counts, "failed": self.failed}))


class Total:
    """The outcomes of all processes."""

    def __init__(self, files: list[Path]) -> None:
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: dict[str, str] = {}
        for file in files:
            if file.exists():
                content = json.loads(file.read_text())
                self.failed.update(content["failed"])
                for name, outcomes in content["tests"].items():
                    self.counts[name].update(outcomes)

    def table(self) -> str:
        """Return the counts, and a line for each cause of failures."""
        rows = [f"| test | {' | '.join(WORDS)} |", f"| {' | '.join(['---'] * (1 + len(WORDS)))} |"]
        for name, outcomes in self.counts.items():
            rows.append(f"| {name} | {' | '.join(str(outcomes[word]) for word in WORDS)} |")
        causes: dict[str, list[str]] = defaultdict(list)
        for test, message in self.failed.items():
            causes[re.sub(r"-?\d[\d.e+-]*", "N", message)].append(test)
        for tests in sorted(causes.values(), key=len, reverse=True):
            rows.append(f"{len(tests)} failed like {tests[0].split('::')[-1]}: {self.failed[tests[0]]}")
        return "\n".join(rows)


def run_parts(processes: int, own: list[str], pytest_arguments: list[str], keep: Callable[[Total], None]) -> Total:
    """Run the processes, on all GPUs in turn, and return what came of all; `keep` gets it every few seconds."""
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
        told = time.monotonic()
        while any(process.poll() is None for process in started):
            time.sleep(0.5)
            if time.monotonic() - told > PROGRESS_SECONDS:
                told, total = time.monotonic(), Total(files)
                print(dict(sum(total.counts.values(), Counter())), flush=True)
                keep(total)
        lost = [part for part, file in enumerate(files) if not file.exists()]
        if lost:
            raise RuntimeError(f"processes {lost} ended without a result")
        return Total(files)


def main() -> int:
    """Run the tests of the command line; return 0, or 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--sample", type=int, help="run so many of each test")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no test after so many")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write counts to this JSON file")
    parser.add_argument("--commit", default="", help="what the record calls this tree, where git is not there to say")
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
        selection = Selection(options.sample, options.part, options.processes, options.seconds, options.out)
        arguments = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "--rootdir", str(options.checkout)]
        pytest.main([str(file), *arguments, *pytest_arguments], plugins=[selection])
        selection.save()
        return 0

    def keep(total: Total) -> None:
        if options.out is not None:
            version = options.version or commit_of(options.checkout)
            content = {"checkout": version, "commit": options.commit or commit_of(ROOT), "device": device_name()}
            options.out.write_text(json.dumps({**content, "tests": total.counts, "failed": total.failed}, indent=1))

    total = run_parts(options.processes, own, pytest_arguments, keep)
    keep(total)
    print(total.table())
    return int(bool(total.failed))


def device_name() -> str:
    """Name the GPU, or the CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    sys.exit(main())
