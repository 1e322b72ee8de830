"""The examples as a user runs them: what they print, return and draw."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import by_path
import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
# In a process of its own, where several processes are what an example shows.
ELSEWHERE = {"distributed_training"}
# Which have tests of their own.
TESTED_ALONE = {"byte_model", "demo", "draw_mask", "dynamic_mask_model"}


def load(name: str) -> Any:
    return by_path.load(EXAMPLES / f"{name}.py")


def run(name: str, out: Path) -> dict[str, Any]:
    """The result of `main` of an example in its quick form, on a CPU, whose picture is drawn."""
    result: dict[str, Any] = load(name).main(["--quick", "--device", "cpu", "--out", str(out)])
    picture = (out / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000
    return result


def table_of(printed: str, title: str) -> list[list[str]]:
    """The rows of a table that an example has printed, without its head."""
    _, _, rest = printed.partition(f"\n{title}")
    lines = rest.split("\n\n")[0].splitlines()[3:]
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines if line.startswith("  ")]
    assert rows, printed
    return rows


def test_fine_tune_t5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    numbers = run("fine_tune_t5", tmp_path)
    assert numbers["loss_difference"] < 1e-12 and numbers["gradient_difference"] < 1e-11
    for attention in ("eager", "dmattn"):
        assert numbers["end"][attention] < 0.9 * numbers["first"][attention]
    assert abs(numbers["end"]["dmattn"] - numbers["end"]["eager"]) < 0.05 * numbers["end"]["eager"]
    assert numbers["end"]["dmattn"] != numbers["end"]["eager"]  # each drops its own
    assert numbers["backends"] == {"eager": [], "dmattn": ["eager, eager backward"]}  # no backend of ours there
    rows = table_of(capsys.readouterr().out, "T5")
    assert [row[:2] for row in rows] == [["eager", "0"], ["dmattn", "0"], ["eager", "0.1"], ["dmattn", "0.1"]]
    assert rows[0][3] == rows[1][3]


def test_packed_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    numbers = run("packed_documents", tmp_path)
    padded, described, packed = (numbers["steps"][way] for way in ("padded, sdpa", "padded, dmattn", "packed, dmattn"))
    assert numbers["difference"] < 1e-5
    assert len(packed["losses"]) == 4 and len(set(packed["losses"])) == 4 and min(packed["losses"]) > 4
    assert (padded["computed"], packed["computed"], numbers["real"]) == (4 * 96, 173, 173)
    assert packed["megabytes"] < 0.6 * described["megabytes"] and described["megabytes"] < padded["megabytes"]
    assert [row[1:3] for row in table_of(capsys.readouterr().out, "4 documents")] == [
        ["384", "45%"],
        ["384", "45%"],
        ["173", "100%"],
    ]


def test_long_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = run("long_context", tmp_path)
    assert numbers["lengths"] == [32, 64] and numbers["keep"] == 16
    kept, full = numbers["steps"]["16 keys per query"], numbers["steps"]["full attention"]
    for length, few, every in zip(numbers["lengths"], kept, full):
        assert every["pairs"] == length * (length + 1) / 2
        assert few["pairs"] == sum(min(query + 1, 16) for query in range(length))
        assert (few["backends"], every["backends"]) == ("eager, eager", "sdpa, sdpa")
    for losses in numbers["losses"].values():
        assert len(losses) == 4 and min(losses) > 3 and max(losses) < 7  # ln 256 is 5.5
    first = {name: losses[0] for name, losses in numbers["losses"].items()}
    assert first["16 keys per query"] != first["full attention"]
    assert [row[:3] for row in table_of(capsys.readouterr().out, "A training step")] == [
        ["32", "16 keys per query", "392"],
        ["32", "full attention", "528"],
        ["64", "16 keys per query", "904"],
        ["64", "full attention", "2,080"],
    ]


def test_static_cache_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    numbers = run("static_cache_generation", tmp_path)
    assert numbers["generated"] == 12 and numbers["equal"] == {"eager": 12, "sdpa": 12, "dmattn": 12}
    assert numbers["different_tokens"] > 4 and numbers["backends"] == "sdpa"
    assert numbers["mask_bytes"]["sdpa"] >= 2 * 30 * 30 and numbers["mask_bytes"]["dmattn"] < 2 * 2 * 40
    rows = table_of(capsys.readouterr().out, "2 prompts")
    assert [row[:2] for row in rows] == [[attention, "12 of 12"] for attention in ("eager", "sdpa", "dmattn")]


def test_paged_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    result = load("paged_decoding").main(["--quick", "--device", "cpu"])
    assert max(result["differences"]) < 1e-5 and result["pages"] == [2, 1, 3]
    rows = table_of(capsys.readouterr().out, "Texts in one pool")
    assert [row[:4] for row in rows] == [["0", "20", "24", "2"], ["1", "5", "9", "1"], ["2", "33", "37", "3"]]


def test_learned_distances(capsys: pytest.CaptureFixture[str]) -> None:
    result = load("learned_distances").main(["--quick", "--device", "cpu"])
    for x in result.values():
        assert x["losses"][-1] < x["losses"][0] / 100 and x["off"] < 0.3 and x["bytes"] == 4 * 4 * 17
    rows = table_of(capsys.readouterr().out, "A bias by distance")
    assert [row[:3] for row in rows] == [["32", "272", "16,384"], ["64", "272", "65,536"]]


def test_train_selector(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = run("train_selector", tmp_path)
    frozen = numbers["frozen"]
    for way in ("through attention", "by KL"):
        x = numbers[way]
        assert sum(x["losses"][-20:]) < 0.5 * sum(frozen["losses"][-20:])
        assert x["listed"] > 2 * frozen["listed"] and x["accuracy"] > 2 * frozen["accuracy"]
    rows = table_of(capsys.readouterr().out, "8 of 48 tokens in a list")
    assert [row[0] for row in rows] == ["through attention", "by KL", "frozen"]


def test_every_example_is_listed_and_says_how_it_is_run() -> None:
    """On the page and in its own docstring; a user's command line prints the options."""
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in TESTED_ALONE)
    assert len(names) >= 4
    for name in names:
        started = "torchrun --nproc-per-node 2" if name in ELSEWHERE else "python"
        source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        assert f"[{name}.py]({name}.py)" in page
        assert all(f"{started} examples/{name}.py" in text for text in (page, source))
    command = [sys.executable, str(EXAMPLES / "long_context.py"), "--help"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0 and "--quick" in done.stdout and "--out" in done.stdout
    tested = set(re.findall(r'(?:run|load)\("(\w+)"', Path(__file__).read_text(encoding="utf-8")))
    assert tested | ELSEWHERE >= set(names)
