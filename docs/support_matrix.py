"""The support matrix, made from the rules of the backends: `python docs/support_matrix.py --write`.

Every cell is what a backend's rules answer to one problem; nothing is said here that the selection does not act on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flash_dmattn.backends.cuda import rules  # noqa: E402
from flash_dmattn.backends.protocol import Backend, Reason, Rule  # noqa: E402
from flash_dmattn.biases import ByDistance, ListBias  # noqa: E402
from flash_dmattn.dispatch.registry import BACKENDS  # noqa: E402
from flash_dmattn.dispatch.selection import passes_of, select_tangents  # noqa: E402
from flash_dmattn.explanation import explain, explain_problem  # noqa: E402
from flash_dmattn.masks import PreparedMask  # noqa: E402
from flash_dmattn.problem import AttentionProblem, SequenceSpec  # noqa: E402
from flash_dmattn.sequences import Sequences  # noqa: E402
from flash_dmattn.triton_kernels.gpus import GPUS, KIB  # noqa: E402

_TABLE = torch.arange(128).view(2, 64)
T5, BAND = ByDistance(128, "clamp", False), ByDistance(63, "zero", True)


class Row(NamedTuple):
    """One feature as one problem."""

    group: str
    name: str
    problem: AttentionProblem
    in_forward_mode: bool = False


def _row(group: str, name: str, *, forward_only: bool = False, in_forward_mode: bool = False, **changes: Any) -> Row:
    description: dict[str, Any] = {"q": (2, 4096, 16, 64), "dtype": "bf16", "device": "sm_90", "deterministic": False}
    description |= {"grad": not forward_only, "bias_grad": not forward_only, **changes}
    return Row(group, name, explain_problem(**description).problem, in_forward_mode)


def _sequences() -> dict[str, dict[str, Any]]:
    packed = SequenceSpec("packed", 8, 8192, 8192, 2048, 2048)
    padded = SequenceSpec("padded", 2, 4096, 4096, 4096, 4096)
    paged = SequenceSpec("paged", 2, 1, 4096, 1, 4096, page_size=64)
    mixed = SequenceSpec("paged_packed", 2, 512, 4096, 512, 4096, page_size=64)
    no_gradients = {"forward_only": True, "seqlen_k": 64, "is_causal": True}
    return {
        "packed": {"sequences": packed, "q": (1, 8192, 16, 64), "is_causal": True},
        "packed, by-position bias": {"sequences": packed, "q": (1, 8192, 16, 64), "bias": (1, 16, 2048, 2048)},
        "packed, dropout": {"sequences": packed, "q": (1, 8192, 16, 64), "dropout_p": 0.1},
        "padded": {"sequences": padded},
        "paged, one query": {"sequences": paged, "q": (2, 1, 16, 64), **no_gradients},
        "paged, queries packed": {"sequences": mixed, "q": (1, 512, 16, 64), **no_gradients},
    }


def _row_of_lists(
    name: str, *, heads: int = 1, block_size: int = 1, sequences: Sequences | None = None, **numbers: Any
) -> Row:
    rows_q = rows_k = 4096
    batch: tuple[int, ...] = (2,)
    shape_k: tuple[int, ...] = (2, 4096)
    grad = True
    if sequences is not None and sequences.layout == "packed":
        batch, shape_k = (), (4096,)
    elif sequences is not None:
        rows_q, shape_k, grad = 1, (128, 64), False
    with torch.device("meta"):
        q = torch.empty(*batch, rows_q, 16, 64, dtype=torch.bfloat16, requires_grad=grad)
        k = torch.empty(*shape_k, 1, 64, dtype=torch.bfloat16, requires_grad=grad)
        values = torch.empty(*batch, heads, rows_q, 64, requires_grad=grad)
    index = torch.zeros(*batch, heads, rows_q, 64, dtype=torch.int32)
    lists = PreparedMask.from_lists(
        index, seqlen_k=rows_k, sequences=sequences, block_size=(1, block_size), is_causal=True
    ).to("meta")
    decision = explain(q, k, k, lists, ListBias(values), sequences=lists.sequences, device="sm_90", **numbers)
    return Row("lists", name, decision.problem)


def rows() -> tuple[Row, ...]:
    """List every row; unless its name says otherwise it is bf16 on sm_90 with head dim 64 and all gradients."""
    full = (2, 16, 4096, 4096)
    return (
        _row("device", "sm_90"),
        _row("device", "sm_80", device="sm_80"),
        _row("device", "CPU, forward", device="cpu", dtype="fp32", forward_only=True),
        _row("device", "CPU, forward with lse", device="cpu", dtype="fp32", forward_only=True, return_lse=True),
        _row("device", "CPU, with gradients", device="cpu", dtype="fp32"),
        _row("dtype", "fp16", dtype="fp16"),
        _row("dtype", "bf16"),
        _row("dtype", "fp32", dtype="fp32"),
        _row("dtype", "fp64", dtype="fp64"),
        _row("dtype", "bias in fp32 with bf16", bias=full, bias_dtype="fp32"),
        *(_row("head dim", str(dim), q=(2, 4096, 16, dim)) for dim in (8, 16, 32, 64, 96, 128, 192, 256)),
        _row("head dim", "512", q=(2, 4096, 16, 512)),
        _row("head dim", "192, of v 128", q=(2, 4096, 16, 192), head_dim_v=128),
        _row("heads", "grouped (16 on 4)", kv_heads=4),
        _row("heads", "one key-value head", kv_heads=1),
        _row("lengths", "4095 queries and keys", q=(2, 4095, 16, 64)),
        _row("lengths", "1 query, 4096 keys, causal", q=(2, 1, 16, 64), seqlen_k=4096, is_causal=True),
        _row("lengths", "no keys", seqlen_k=0),
        _row("lengths", "no queries", q=(2, 0, 16, 64), seqlen_k=4096),
        _row("flags", "causal", is_causal=True),
        _row("flags", "sliding window", window_size=(256, 0)),
        _row("flags", "softcap", softcap=30.0),
        _row("flags", "softcap, head dim 256", q=(2, 4096, 16, 256), softcap=30.0),
        _row("flags", "lse returned", return_lse=True),
        _row("flags", "probabilities returned", return_probs=True),
        _row("flags", "largest scores of rows", max_scores=True),
        _row("flags", "entropies of rows", entropy=True),
        _row("flags", "sink", sink=True),
        _row("flags", "sink, CPU, forward", device="cpu", dtype="fp32", forward_only=True, sink=True),
        _row("flags", "dropout", dropout_p=0.1),
        _row("flags", "dropout, bias (1, H, Lq, Lk), dbias", dropout_p=0.1, bias=(1, 16, 4096, 4096)),
        _row("flags", "dropout, CPU", device="cpu", dtype="fp32", dropout_p=0.1),
        *(_row("sequences", name, **call) for name, call in _sequences().items()),
        _row("mask", "(B, H, Lq, Lk)", mask=full),
        _row("mask", "(B, Hk, Lq, Lk), grouped heads", kv_heads=4, mask=(2, 4, 4096, 4096)),
        _row("mask", "(1, 1, Lq, Lk)", mask=(1, 1, 4096, 4096)),
        _row("mask", "(B, 1, 1, Lk)", mask=(2, 1, 1, 4096)),
        _row("mask", "(B, H, Lq, 1)", mask=(2, 16, 4096, 1)),
        _row("bias", "(B, H, Lq, Lk), forward", bias=full, forward_only=True),
        _row("bias", "(B, H, Lq, Lk), dbias", bias=full),
        _row("bias", "(B, H, Lq, Lk), only dbias", bias=full, grad=False),
        _row("bias", "(1, H, Lq, Lk), dbias", bias=(1, 16, 4096, 4096)),
        _row("bias", "(B, Hk, 1, Lk), dbias, grouped heads", kv_heads=4, bias=(2, 4, 1, 4096)),
        _row("bias", "(B, H, Lq, 1), dbias", bias=(2, 16, 4096, 1)),
        _row("bias", "with a mask, dbias", mask=(2, 1, 4096, 4096), bias=full),
        _row("bias", "by distance, (H, n), gradient", bias=(16, 257), by_distance=T5),
        _row("bias", "by distance, packed sequences", bias=(16, 257), by_distance=T5, **_sequences()["packed"]),
        _row("bias", "by query and distance, (B, H, Lq, n)", bias=(2, 16, 4096, 64), by_distance=BAND),
        _row("bias", "above 2^31 elements, dbias", q=(1, 65536, 1, 64), bias=(1, 1, 65536, 65536)),
        _row_of_lists("keys, with values"),
        _row_of_lists("blocks of 64 keys, with values", block_size=64),
        _row_of_lists("for each query head", heads=16),
        _row_of_lists("with dropout", dropout_p=0.1),
        _row_of_lists("packed sequences", sequences=Sequences.packed(torch.tensor([0, 1024, 4096]))),
        _row_of_lists(
            "blocks of 64 keys, packed sequences",
            block_size=64,
            sequences=Sequences.packed(torch.tensor([0, 1024, 4096])),
        ),
        _row_of_lists("paged, one query", sequences=Sequences.paged(_TABLE, torch.tensor([4096, 4096]))),
        _row("forward mode", "causal", in_forward_mode=True, is_causal=True),
        _row("forward mode", "head dim 512", in_forward_mode=True, q=(2, 4096, 16, 512)),
        _row("forward mode", "CPU", in_forward_mode=True, device="cpu", dtype="fp32"),
        _row("deterministic", "forward", deterministic=True, forward_only=True),
        _row("deterministic", "dq, dk, dv", deterministic=True),
        _row("deterministic", "dq, dk, dv, dbias", deterministic=True, bias=full),
    )


def example_of(rule: Rule) -> AttentionProblem:
    """Describe the call that breaks a rule alone: see `Rule.example`."""
    is_backward = "forward" not in rule.passes
    call: dict[str, Any] = {"q": (2, 4096, 16, 64), "device": "sm_90", "deterministic": False, "grad": is_backward}
    call |= rule.example
    fields: dict[str, Any] = {name: call.pop(name) for name in ("k_strides", "mask_form") if name in call}
    if call["device"] == "mps":
        fields["device"] = call.pop("device")
    flags = {name: call.pop(name) for name in ("block_q", "block_k", "invariant") if name in call}
    bias_strides = call.pop("bias_strides", None)
    problem = explain_problem(**call).problem
    if bias_strides is not None and problem.bias is not None:
        fields["bias"] = problem.bias._replace(strides=bias_strides)
    return problem._replace(flags=problem.flags._replace(**flags), **fields)


def cell(backend: Backend, problem: AttentionProblem) -> tuple[str, tuple[Reason, ...]]:
    """Ask the rules of one backend, whether it works on this machine or not.

    Returns:
        A word, and its reasons if it is not a plain yes.
    """
    passes = passes_of(problem)
    refused = tuple(direction for direction in passes if not backend.accepts(problem, direction))
    if "forward" in refused:
        return "no", backend.broken_rules(problem, passes)
    if refused:
        return "forward", backend.broken_rules(problem, refused)
    unmet = backend.unmet(backend.auto_rules, problem, passes)
    return ("by name", unmet) if unmet else ("yes", ())


def tangents_cell(backend: Backend, problem: AttentionProblem) -> str:
    """Say whether a backend runs a call in forward mode itself, and else which one it pairs with."""
    if not backend.accepts(problem, "forward"):
        return "no"
    if backend.has_forward_ad or backend.serves_tangents(problem):
        return "yes"
    return f"by {select_tangents(problem, backend).name}"


def table(chosen: Sequence[Row], names: Sequence[str]) -> str:
    """Lay the rows out as a matrix in Markdown, above the words of rules: of its cells, and of rules with an example.

    Neighbours of one group with the same words share a row.
    """
    said: dict[tuple[str, str], list[str]] = {}
    merged: list[tuple[str, list[str], list[str]]] = []
    for row in chosen:
        words = []
        for name in names:
            if row.in_forward_mode:
                words.append(tangents_cell(BACKENDS[name], row.problem))
                continue
            word, reasons = cell(BACKENDS[name], row.problem)
            for reason in reasons:
                texts = said.setdefault((reason.backend, reason.code), [])
                texts += [str(reason)] if str(reason) not in texts else []
            words.append(word + (f": {', '.join(reason.code for reason in reasons)}" if reasons else ""))
        if merged and (merged[-1][0], merged[-1][2]) == (row.group, words):
            merged[-1][1].append(row.name)
        else:
            merged.append((row.group, [row.name], words))
    for name in names:
        for rule in (*BACKENDS[name].rules, *BACKENDS[name].auto_rules):
            if rule.example and (name, rule.code) not in said:
                said[name, rule.code] = [str(Reason(name, rule.code, rule.says(example_of(rule)), rule.hint))]
    lines = [f"| | | {' | '.join(f'`{name}`' for name in names)} |", f"|{' --- |' * (len(names) + 2)}"]
    group = None
    for row_group, calls, words in merged:
        lines.append(f"| {row_group if row_group != group else ''} | {'; '.join(calls)} | {' | '.join(words)} |")
        group = row_group
    lines += [
        "",
        "## The rules",
        "",
        "| backend | rule | what it says of these calls |",
        "| --- | --- | --- |",
    ]
    order = sorted(said, key=lambda rule: (names.index(rule[0]), rule[1]))
    lines += [f"| `{name}` | {code} | {'<br>'.join(said[name, code])} |" for name, code in order]
    return "\n".join(lines)


# The nearest GPU that the rules refuse, with its shared memory in KB.
REFUSED_GPU = ("sm_75", "T4, RTX 20", 64)

GPU_LEGEND = """\
The table says what is known of the kernels of this library on each GPU. `flex` and `eager` run what PyTorch has for it.

* **measured**: tested and timed on such a GPU.
* **forced**: tested on a Hopper GPU, forward and gradients, with the tiles, instructions and shared memory of this GPU.
  Results are known so, and speed is not: [testing.md](testing.md#kernels-of-other-gpus-on-a-hopper-gpu).
* **compiled**: never run. Every run of the tests compiles each kernel for it, for a sample of calls. The kernels keep
  to the shared memory of a program, use the tensor cores, and spill no more registers than a bound.
  `python tests/compile_everything.py` compiles them for all calls. `backend="triton"` runs them.
* **refused**: an error says why.

Nothing is known of a GPU that is not listed. `triton` runs there by name, with tiles that fit the smallest of them.
On a GPU that is not measured, [`calibrate`](backends.md#calibrate) times the backends, and with `--tiles` the tiles of
`triton`. Its profile can be shared as a file."""


def gpu_table() -> str:
    """Tabulate the standing of each architecture, by the backends with kernels of our own."""
    known: list[tuple[str, str, int, str]] = [(*REFUSED_GPU, "refused")]
    known += [(gpu.arch, gpu.products, gpu.shared // KIB, gpu.standing) for gpu in GPUS]
    lines = ["| GPU | such as | shared memory | `cuda` | `triton` |", "| --- | --- | --- | --- | --- |"]
    for arch, products, shared, standing in known:
        problem = explain_problem(q=(2, 4096, 16, 64), dtype="bf16", device=arch, grad=True).problem
        # The CUDA kernels are for one architecture, on which they are measured.
        said = {"cuda": "measured", "triton": standing}
        words = [word if BACKENDS[name].accepts(problem, "forward") else "refused" for name, word in said.items()]
        lines.append(f"| {arch} | {products} | {shared} KB | {' | '.join(words)} |")
    return "\n".join(lines)


LEGEND = """\
* **yes**: forward and every gradient asked for.
* **forward**: no gradients.
* **by name**: served when the call names the backend, while `backend="auto"` passes it over.
* **no**: refused.
* **by** another backend: forward mode, as of `torch.func.jvp`, pairs with that one.

The names after a colon are rules, which the next table explains."""


def document(names: Sequence[str]) -> str:
    """Write the text of docs/support.md."""
    return f"""# Calls and the backends that serve them

This page is generated from the rules of the backends by `python docs/support_matrix.py --write`, and a
test asserts that it is current. The same rules decide each call and give the reasons in every error.
`flash_dmattn.explain(...)` says the same about your own call, and also whether a backend works on your machine.

Unless a row says otherwise, the call is bf16 on sm_90 with batch 2, 4096 queries and keys, 16 heads of dim 64, and all
gradients are needed. `reference` has no column: it serves every row, by name.

{LEGEND}

{table(rows(), [name for name in names if name != "reference"])}

## GPUs

{GPU_LEGEND}

{gpu_table()}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or with --write rewrite docs/support.md."""
    parser = argparse.ArgumentParser(description="Generate the support matrix from the rules.")
    parser.add_argument("--write", action="store_true", help="rewrite docs/support.md")
    arguments = parser.parse_args(argv)
    names = tuple(BACKENDS)
    # The page tells of every kernel there is, whichever this checkout has built.
    with patch.object(rules, "installed_instances", lambda: None):
        if not arguments.write:
            print(document(names), end="")
            return 0
        path = ROOT / "docs" / "support.md"
        path.write_text(document(names), encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
