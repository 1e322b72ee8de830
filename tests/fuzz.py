"""Run random calls of every kind until a number or a time is reached, and shrink the failures.

    python tests/fuzz.py eager --calls 2000                     # on a CPU
    python tests/fuzz.py triton cuda --seconds 500 --processes 8  # on all GPUs that there are
    python tests/fuzz.py cuda:triton --calls 500                # a pair: out from one, gradients from the other
    python tests/fuzz.py triton cuda --calls 2000 --data uncentred  # great means, great biases, NaN: `Case.data`

The kinds of `run_calls.py` take turns, and every call has a number, so that two runs draw the same calls.
A result is compared with the fp64 formula by the rule of `accuracy.py`. A call that fails is printed with the command
that repeats it, and with the simplest call that still fails. The record of a run is written to `--out`: the same
command goes on after it, with other calls, and `tests/reliability.py` reads it. Exit status: 0, or 1 where a call
failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
if __name__ == "__main__" and "interpreter" in sys.argv[1:]:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton decides at its import

import draws  # noqa: E402
import torch  # noqa: E402
from outcomes import outcome_of  # noqa: E402
from run_calls import Check, Place, place_of, run_number  # noqa: E402

import flash_dmattn  # noqa: E402
from benchmarks.files import write_whole  # noqa: E402
from benchmarks.machine import commit_of  # noqa: E402

# The kinds that each place serves. A file is the emulated GPU, two names are a pair of backends.
KINDS = {
    "eager": ("dense", "short", "sequences", "trees", "tangents"),
    "reference": ("sequences", "trees"),
    "flex": ("dense",),
    "triton": ("dense", "short", "intervals", "wide", "sequences", "trees", "appends", "packs", "tangents"),
    "interpreter": ("dense", "short", "intervals", "wide", "sequences", "trees", "appends", "packs", "tangents"),
    "cuda": ("dense", "short", "intervals", "sequences"),
    **dict.fromkeys(("cuda:triton", "triton:cuda"), ("dense", "intervals", "sequences")),
}
PAIRS = ("dense", "sequences")  # dead keys of interval masks hold NaN, which eager multiplies by 0
EMULATED = ("dense", "intervals", "sequences")
UNCENTRED = ("dense", "short", "intervals", "wide", "sequences", "trees", "tangents")  # kinds that have such data
SHRINKING_SECONDS = 60.0
PROGRESS_SECONDS = 5.0


class Tally:
    """The record of all runs, in a file: by place and kind of calls the next number, counts, and what failed."""

    def __init__(self, file: Path, commit: str = "") -> None:
        self.file = file
        self.content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"places": {}}
        today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        commits = {**dict.fromkeys(self.content.get("commit", "").split(", ")), commit or commit_of(ROOT): None}
        self.content.update(commit=", ".join(filter(None, commits)), date=today, device=_device())

    def of(self, place: str, kind: str) -> dict[str, Any]:
        """Return the line of a place and a kind of calls."""
        kinds = self.content["places"].setdefault(place, {})
        line: dict[str, Any] = kinds.setdefault(kind, {"next": 0, "passed": 0, "refused": 0, "failed": []})
        return line

    def save(self) -> None:
        """Write the file at once, so that a run that is killed goes on where it was."""
        write_whole(self.file, json.dumps(self.content, indent=1))

    def counts(self) -> Counter[str]:
        """Count the calls of all places."""
        total: Counter[str] = Counter()
        for kinds in self.content["places"].values():
            for line in kinds.values():
                total.update(passed=line["passed"], refused=line["refused"], failed=len(line["failed"]))
        return total


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def fails(check: Check) -> str | None:
    """Return what a check raises; None if it passes or a rule refuses the call."""
    try:
        return outcome_of(check.run, check.told)
    except flash_dmattn.BackendUnsupportedError:
        return None


def shrink(check: Check, outcome: str, seconds: float = SHRINKING_SECONDS) -> str:
    """Return the outcome of the simplest call that still fails, found by taking away one thing after the other."""
    end = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for each in check.simpler():
            result = fails(each)
            if result is not None:
                check, outcome, progress = each, result, True
                break
            if time.monotonic() > end:
                break
    return outcome


def run_one(place: Place, name: str, kind: str, line: dict[str, Any], step: int) -> str | None:
    """Run the next call of a kind, `step` numbers further each time; what failed, in words."""
    number, line["next"] = line["next"], line["next"] + step
    ran = run_number(place, kind, number)
    if ran is None:
        line["refused"] += 1
        return None
    check, outcome = ran
    if outcome is None:
        line["passed"] += 1
        return None
    if "out of memory" in outcome:  # several processes share a GPU, and none of them knows what the others hold
        line["no memory"] = line.get("no memory", 0) + 1
        torch.cuda.empty_cache()
        return None
    line["failed"].append(number)
    data = next(data for data, share in draws.SHARES.items() if share == draws.UNCENTRED)
    repeat = f"python tests/run_calls.py {name} {kind} {number} 1" + f" --data {data}" * (data != "any")
    return f"{repeat}\n{outcome}\nthe simplest call that fails:\n{shrink(check, outcome)}"


def run(names: list[str], tally: Tally, calls: int, seconds: float, part: int, parts: int, before: Tally) -> bool:
    """Run calls of all kinds in turn; return whether none failed, now or before.

    Args:
        names: the places.
        tally: where they are counted, earlier ones too.
        calls: how many calls there shall be that a place served, with the earlier ones.
        seconds: in what time.
        part: the number of this process among `parts`; each has numbers of its own.
        before: the tally of earlier runs, whose numbers are not drawn again.
    """
    torch.set_num_threads(1)
    places = {name: place_of(name) for name in names}
    turns = [(name, kind) for name in names for kind in KINDS.get(name, PAIRS if ":" in name else EMULATED)]
    is_uncentred = draws.UNCENTRED == 1.0
    turns = [turn for turn in turns if turn[1] in UNCENTRED or not is_uncentred]
    begun = told = time.monotonic()
    had = tally.counts().total()

    def save() -> None:
        tally.save()
        counts = tally.counts()
        words = ", ".join(f"{counts[word]:,} {word}" for word in ("passed", "refused", "failed"))
        print(f"{words}; {(counts.total() - had) / (time.monotonic() - begun + 1e-3):.1f} calls a second", flush=True)

    try:
        for name, kind in itertools.cycle(turns):
            counts = tally.counts()
            if counts["passed"] + counts["failed"] >= calls or time.monotonic() - begun >= seconds:
                break
            told_kind = f"{kind}, uncentred" if is_uncentred else kind
            line = tally.of(name, told_kind)
            line["next"] = max(line["next"], before.of(name, told_kind)["next"] + part)
            failure = run_one(places[name], name, kind, line, parts)
            if failure is not None:
                print(failure, flush=True)
            if failure is not None or time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                save()
    finally:  # a run that is interrupted goes on where it was
        save()
    return tally.counts()["failed"] == 0


def table(tally: Tally) -> str:
    """Return the counts of each place and kind, as a table."""
    rows = ["| place | calls | passed | refused | no memory | failed |", "| --- | --- | --- | --- | --- | --- |"]
    for place, kinds in tally.content["places"].items():
        for kind, line in kinds.items():
            failed = ", ".join(map(str, line["failed"])) or "0"
            counts = f"{line['passed']:,} | {line['refused']:,} | {line.get('no memory', 0):,}"
            rows.append(f"| {place} | {kind} | {counts} | {failed} |")
    return "\n".join(rows)


def merge(parts: list[Tally], total: Tally) -> None:
    """Add the tallies of several processes, which each have numbers of their own, to one."""
    for part in parts:
        for place, kinds in part.content["places"].items():
            for kind, line in kinds.items():
                own = total.of(place, kind)
                own.update(next=max(own["next"], line["next"]), failed=sorted(own["failed"] + line["failed"]))
                for word in ("passed", "refused", "no memory"):
                    own[word] = own.get(word, 0) + line.get(word, 0)
    total.save()


def tallies_beside(file: Path) -> list[Tally]:
    """Return the tallies of processes whose record is to be added to a file."""
    return [Tally(part) for part in sorted(file.parent.glob(f"{file.stem}.*.json"))]


def take_in(total: Tally) -> None:
    """Add the tallies of processes to the total, and remove their files."""
    parts = tallies_beside(total.file)
    merge(parts, total)
    for part in parts:
        part.file.unlink()


def main() -> int:
    """Run the calls of the command line, in one process or in several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="+", metavar="PLACE", help="a backend, two, 'interpreter', or an emulated GPU")
    parser.add_argument("--calls", type=int, default=10**9, help="how many; a call that a rule refuses does not count")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz.json")
    parser.add_argument("--commit", default="", help="what the record calls this tree, where git is not there to say")
    parser.add_argument("--data", choices=draws.SHARES, default="any", help="only calls whose data are not centred")
    said = "be that one of the processes, from 0, with a record of its own beside --out, until that has --calls"
    parser.add_argument("--part", type=int, metavar="NUMBER", help=said)
    options = parser.parse_args()
    if options.calls == 10**9 and options.seconds == float("inf"):
        parser.error("--calls or --seconds is needed")
    draws.UNCENTRED = draws.SHARES[options.data]
    if options.part is not None:
        part = Tally(options.out.with_suffix(f".{options.part}.json"))
        limits = options.calls, options.seconds
        try:
            return int(not run(options.places, part, *limits, options.part, options.processes, Tally(options.out)))
        except KeyboardInterrupt:
            return 130  # the line before says how far it came
    tally = Tally(options.out, options.commit)
    take_in(tally)  # what a run has left that was ended
    limits = ["--calls", str(-(-options.calls // options.processes)), "--seconds", str(options.seconds)]
    command = [sys.executable, __file__, *options.places, *limits, "--data", options.data]
    command += ["--processes", str(options.processes)]
    gpus = torch.cuda.device_count()
    started = [
        subprocess.Popen(
            [*command, "--part", str(part), "--out", str(options.out)],
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": str(part % gpus)} if gpus > 1 else {})},
        )
        for part in range(options.processes)
    ]
    for process in started:
        process.wait()
    take_in(tally)
    lost = [f"process {part} ended with {p.returncode}" for part, p in enumerate(started) if p.returncode not in (0, 1)]
    print("\n".join([table(tally), *lost]))
    return int(tally.counts()["failed"] > 0 or bool(lost))


if __name__ == "__main__":
    sys.exit(main())
