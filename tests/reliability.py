"""Write the tables of docs/reliability.md from the files that runs have left in tests/results.

    python tests/reliability.py            # write the page
    python tests/reliability.py --check    # fail where the page is not what the files say

fuzz-*.json is written by `fuzz.py`, and on a GPU by `gpu_checks.py` with checks-*.json, peers*.json by `peer_tests.py`,
faults-*.json by `mutants/run.py`. People write one verdict there, "equal", for a fault that changes no result, and the
reason as `by`. `bounds.py` writes bounds.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "results"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- Written by `python tests/reliability.py`, up to the next heading. -->"


def read(pattern: str) -> list[dict[str, Any]]:
    """Return the contents of the files of a kind, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def random_calls() -> list[str]:
    """Return the table of random calls."""
    rows = ["| device | place | kinds of calls | passed | refused | no memory | outside the rule | commit, date |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for content in read("fuzz-*.json"):
        for place, kinds in content["places"].items():
            words = ("passed", "refused", "no memory")
            counts = " | ".join(f"{sum(line.get(word, 0) for line in kinds.values()):,}" for word in words)
            failed = [f"{kind} {number}" for kind, line in kinds.items() for number in line["failed"]]
            place = "emulated GPU" if place.endswith(".so") else place
            rows.append(
                f"| {content['device']} | {place} | {', '.join(kinds)} | {counts} "
                f"| {', '.join(failed) or '0'} | {content['commit']}, {content['date']} |"
            )
    return rows


def gpu_suite() -> list[str]:
    """Return the table of the GPU suite."""
    rows = ["| run | parts | passed | failed | not ended |", "| --- | --- | --- | --- | --- |"]
    for content in read("checks-*.json"):
        counts = Counter(row["status"] for row in content["parts"].values())
        name = f"{content.get('device', 'GPU')}, commit {content['commit']}"
        rows.append(f"| {name} | {counts.total()} | {counts['passed']} | {counts['failed']} | {counts['late']} |")
    return rows


def their_tests() -> list[str]:
    """Return the table of the tests of FlashAttention."""
    words = ("passed", "refused", "failed", "skipped", "left out", "late")
    rows = ["| FlashAttention's test | passed | refused by name | failed | skipped by it | left out | not reached |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for content in read("peers*.json"):
        total: Counter[str] = Counter()
        for name, counts in content["tests"].items():
            total.update(counts)
            rows.append(f"| `{name}` | {' | '.join(f'{counts.get(word, 0):,}' for word in words)} |")
        name = f"all, of its commit {content['checkout']}; {content['device']}, commit {content['commit']}"
        rows.append(f"| {name} | {' | '.join(f'{total[word]:,}' for word in words)} |")
    return rows


def drawn_faults() -> list[str]:
    """Return the table of faults that were drawn from the syntax tree, and lists of survivors and of equal ones."""
    rows = ["| faults | noticed | survivors | share noticed | equal | not judged |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    listed: dict[str, list[str]] = {"survived": [], "equal": []}
    for content in read("faults-*.json"):
        verdicts = Counter(row["verdict"] for row in content["faults"])
        killed, survived, equal = (verdicts[word] for word in ("killed", "survived", "equal"))
        share = f"{100 * killed / max(killed + survived, 1):.1f} %"
        left = verdicts.total() - killed - survived - equal
        rows.append(f"| {content['drawn']} | {killed} | {survived} | {share} | {equal} | {left} |")
        for row in content["faults"]:
            if row["verdict"] in listed:
                reason = f": {row['by']}." if row["verdict"] == "equal" else ""
                listed[row["verdict"]].append(f"* {row['file']}, `{row['what']}`{reason}")
    for title, verdict in (("Survivors:", "survived"), ("Equal, and why:", "equal")):
        rows += ["", title, "", *sorted(listed[verdict])] if listed[verdict] else []
    return rows


# The questions that `bounds.py` asks about each form, and the columns of the answers.
BOUNDS = {"outside": "inside of tensors", "wraps": "no wrapped number", "two programs": "no two programs"}


def bounds_of(kernels: dict[str, Any]) -> list[str]:
    """Return the table of forms of kernels, and a list of what is open, and why."""
    rows = [f"| kernel | forms | launches | {' | '.join(BOUNDS.values())} | decided | faults |", f"|{' --- |' * 8}"]
    totals: Counter[str] = Counter()
    open_: list[str] = []
    for name, own in kernels.items():
        line = Counter({"forms": own["forms"], "launches": own["launches"], "faults": own["all"].get("fault", 0)})
        line.update({question: own[question].get("proved", 0) for question in BOUNDS})
        line["some"] = own["two programs"].get("sampled", 0)
        line["decided"] = own["all"].get("proved", 0) + own["all"].get("fault", 0)
        totals.update(line)
        rows.append(_bounds_row(f"`{name}`", line))
        if own["reasons"]:
            open_.append(f"* `{name}`, {own['all']['undecided']} of {own['forms']}: {'; '.join(own['reasons'])}")
    rows.append(_bounds_row("all", totals))
    unreached, accesses = (sum(own[word] for own in kernels.values()) for word in ("unreached", "accesses"))
    rows += [
        "",
        f"{unreached:,} of {accesses:,} accesses are reached by no program of their launch, and prove nothing.",
    ]
    return [*rows, "", "Open, and why:", "", *open_] if open_ else rows


def _bounds_row(name: str, line: Counter[str]) -> str:
    some = f" + {line['some']:,} of some programs" if line["some"] else ""
    counts = " | ".join(f"{line[word]:,}" for word in ("forms", "launches", *BOUNDS))
    share = f", {100 * line['decided'] / max(line['forms'], 1):.1f} %" if name == "all" else ""
    return f"| {name} | {counts}{some} | {line['decided']:,}{share} | {line['faults']:,} |"


def compiled_forms() -> list[str]:
    """Return the table of the compiled forms of kernels."""
    return [row for content in read("bounds*.json") for row in bounds_of(content["kernels"])]


def written(page: str) -> str:
    """Return the page with its tables made anew."""
    tables = {
        "Random calls": random_calls(),
        "The GPU suite": gpu_suite(),
        "FlashAttention's own tests": their_tests(),
        "Drawn faults": drawn_faults(),
        "Compiled kernels": compiled_forms(),
    }
    for heading, rows in tables.items():
        before, title, rest = page.partition(f"## {heading}\n")
        if not title:
            raise ValueError(f"{PAGE.name} has no heading {heading!r}")
        text, mark, rest = rest.partition(BEGIN)
        if not mark:
            raise ValueError(f"{PAGE.name} has no mark for the table below {heading!r}")
        _, mark, rest = rest.partition("\n## ")
        page = f"{before}{title}{text}{BEGIN}\n\n" + "\n".join(rows) + "\n" + mark + rest
    return page


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    page = PAGE.read_text()
    new = written(page)
    if options.check:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
