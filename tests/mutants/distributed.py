"""Faults of context parallelism: layouts, slices, sums over ranks, agreement, choices."""

from __future__ import annotations

from .fault import Fault

PACKAGE = "flash_dmattn/distributed/"
SLICES = ("tests/test_distributed_layout.py::test_slices_allow_what_the_whole_call_allows",)
WHOLE = ("tests/test_distributed_slices.py::test_slices_together_are_the_whole_call",)
ONE_CALL = "tests/test_distributed_workers.py::test_a_call_over_processes_equals_one_call"
BYTES = "tests/test_distributed_explain.py::test_bytes_are_those_that_collectives_are_handed"
MISTAKE = "tests/test_distributed_workers.py::test_a_mistake_of_one_rank_raises_on_all"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "rows of joined ranks are in the order of ranks",
        PACKAGE + "layout.py",
        "runs = sorted((start, stop, r) for r",
        "runs = list((start, stop, r) for r",
        ("tests/test_distributed_layout.py::test_ranks_are_joined",),
    ),
    Fault(
        "over a mesh a sink is that of the first heads",
        PACKAGE + "both.py",
        "[heads.of(x.q.shape[2])]",
        "[: x.q.shape[2] // self.inner.size]",
        ("tests/test_distributed_workers.py::test_a_call_over_a_mesh_of_two_dims_equals_one_call[sink]",),
    ),
    Fault(
        "chunks of a rank are neighbours in zigzag",
        PACKAGE + "layout.py",
        "tuple((ends[r], ends[-1 - r]) for r in range(world_size))",
        "tuple((ends[2 * r], ends[2 * r + 1]) for r in range(world_size))",
        ("tests/test_distributed_layout.py::test_zigzag_shares_causal_work_equally",),
    ),
    Fault(
        "the smallest chunk is dealt first",
        PACKAGE + "layout.py",
        "key=lambda x: (-weights[x], x)",
        "key=lambda x: (weights[x], x)",
        ("tests/test_distributed_layout.py::test_balanced_work",),
    ),
    Fault(
        "parts are put together in the order of ranks",
        PACKAGE + "layout.py",
        "sorted(runs, key=lambda run: run[0])",
        "runs",
        ("tests/test_distributed_layout.py::test_every_position_is_on_one_rank_and_comes_back",),
    ),
    Fault(
        "a window does not shift with the end of its slice",
        PACKAGE + "slices.py",
        "left + shift if left >= 0 else -1",
        "left if left >= 0 else -1",
        SLICES,
    ),
    Fault(
        "keys right of the diagonal are cut off",
        PACKAGE + "slices.py",
        "min(seqlen_k, b + offset + right)",
        "min(seqlen_k, b + offset)",
        SLICES,
    ),
    Fault(
        "a slice starts one key late",
        PACKAGE + "slices.py",
        "max(0, a + offset - left)",
        "max(0, a + offset - left + 1)",
        SLICES,
    ),
    Fault(
        "a second slice forgets what the first added to dbias",
        PACKAGE + "rows.py",
        "else slice(None)] += dbias",
        "else slice(None)] = dbias",
        WHOLE,
    ),
    Fault(
        "the gradient of a bias is unwritten left of its slice",
        PACKAGE + "rows.py",
        "    rows[..., : part.start] = 0\n",
        "",
        ("tests/test_distributed_slices.py::test_gradients_of_pairs_that_no_slice_has_are_zero",),
    ),
    Fault(
        "the gradient of keys is that of the largest slice",
        PACKAGE + "rows.py",
        "            self._sum = self._whole(self._largest)\n            self._sum[:, part.keys] += gradient\n",
        "            self._sum = self._whole(self._largest)\n",
        WHOLE,
    ),
    Fault(
        "three slices are summed in 16 bits",
        PACKAGE + "rows.py",
        "number <= 2 and dtype == like.dtype",
        "dtype == like.dtype",
        ("tests/test_distributed_slices.py::test_gradients_of_keys_are_rounded_once",),
    ),
    Fault(
        "gradients of ranks are not summed but the first one's taken",
        PACKAGE + "exchange.py",
        "        total += x\n",
        "        total += 0 * x\n",
        (f"{ONE_CALL}[bias full-2]",),
    ),
    Fault(
        "a bias of one head reads the first of a group alone",
        PACKAGE + "problems.py",
        "width = heads // self.total",
        "width = 1",
        (f"{ONE_CALL}[left window, groups-2]",),
    ),
    Fault(
        "a summed bias gradient is that of one rank",
        PACKAGE + "sums.py",
        "return sum_over(x, size, group)",
        "return x.clone()",
        (f"{ONE_CALL}[reduced bias-2]",),
    ),
    Fault(
        "prepared masks of head groups are views",
        PACKAGE + "problems.py",
        'parts if view.form == "dense" else [x.contiguous() for x in parts]',
        "parts",
        ("tests/test_distributed_workers.py::test_a_backend_that_reads_prepared_masks_gets_those_of_its_slices",),
    ),
    Fault(
        "a rank that fails does not say so",
        PACKAGE + "api.py",
        "        agree(request.groups, (), error, always=always)\n",
        "        agree(request.groups, (), None, always=always)\n",
        (f"{MISTAKE}[mask shape]",),
    ),
    Fault(
        "ranks do not compare what needs gradients",
        PACKAGE + "call.py",
        '", ".join(needed) or "nothing"',
        '"something"',
        (f"{MISTAKE}[gradients]",),
    ),
    Fault(
        "ulysses is chosen where it sends more",
        PACKAGE + "strategy.py",
        "if size * share > even",
        "if size * share > 1",
        ("tests/test_distributed_call.py::test_auto_takes_what_sends_less",),
    ),
    Fault(
        "a gradient that heads share is split into groups",
        PACKAGE + "call.py",
        "if groups > 1 and bias is not None",
        "if groups < 1 and bias is not None",
        ("tests/test_distributed_call.py::test_refusals[head_groups of one head]",),
    ),
    Fault(
        "backends are those of this rank's first slice",
        PACKAGE + "choice.py",
        "    if len(selections) == 1:\n",
        "    if selections:\n",
        ("tests/test_distributed_call.py::test_one_pair_serves_every_slice_of_every_rank",),
    ),
    Fault(
        "shared key-value heads are those of the wrong rank",
        PACKAGE + "ulysses.py",
        "slice(self.rank // self.repeats, self.rank // self.repeats + 1)",
        "slice(0, 1)",
        (f"{ONE_CALL}[ulysses, shared heads-4]",),
    ),
    Fault(
        "gradients of keys are said to be sent in the dtype of keys",
        PACKAGE + "traffic.py",
        "(request.ours.exchange_dtype or p.dtype).itemsize",
        "p.dtype.itemsize",
        (f"{BYTES}[fp32 exchange-2]",),
    ),
    Fault(
        "bytes of a bias with a gradient are said to be those of its dtype",
        PACKAGE + "traffic.py",
        "dtype = sum_dtype(call.bias.dtype) if call.problem.needs_grad.bias else call.bias.dtype",
        "dtype = call.bias.dtype",
        (f"{BYTES}[bias in 16 bits-2]",),
    ),
    Fault(
        "key-value heads that ranks share are said to be sent once",
        PACKAGE + "traffic.py",
        "k.shape[2] * max(1, size // k.shape[2])",
        "k.shape[2]",
        (f"{BYTES}[ulysses, shared heads-4]",),
    ),
    Fault(
        "a backend is said to serve all slices that serves one",
        PACKAGE + "explanation.py",
        "is_pair and all(verdict.forward for",
        "is_pair and any(verdict.forward for",
        ("tests/test_distributed_explain.py::test_a_backend_that_serves_some_slices_serves_none",),
    ),
    Fault(
        "the rank over a mesh is that among the outer ones",
        PACKAGE + "explanation.py",
        "both.outer.rank * both.inner.size + both.inner.rank",
        "both.outer.rank",
        ("tests/test_distributed_explain.py::test_both_strategies_over_a_mesh",),
    ),
)
