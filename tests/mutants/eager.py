"""Faults of the eager pair, its chunks and tiles, and of the formula that every test compares with."""

from __future__ import annotations

from .fault import Fault

EAGER, CHUNKS, TILES, FORMULA = (f"reference/{name}.py" for name in ("eager", "chunks", "tiles", "formula"))
SPLIT = "tests/test_eager_chunks.py::test_split_rows_beside_dropout_and_a_sink"
SINGLE_KEYS = ("tests/test_eager_chunks.py::test_any_chunk_size[True-1]",)
BATCHES = ("tests/test_eager_chunks.py::test_any_chunk_size[True-40000]",)
SOFTCAP = ("tests/test_eager_chunks.py::test_any_subset_of_gradients_with_a_softcap",)
SKIPPED = ("tests/test_eager_chunks.py::test_empty_chunks_are_skipped",)
WINDOW = ("tests/test_forward.py::test_window[eager-False-window_size4-lengths1]",)
BY_LOOPS = ("tests/test_formula.py::test_formula_is_the_contract_by_loops",)
GRADIENTS = ("tests/test_formula.py::test_gradients_are_those_of_autograd",)

_SINKS = "tests/test_sinks.py::test_a_sink_beside_everything_else"
SINKS = tuple(f"{_SINKS}[eager-{name}]" for name in ("bias per query", "many keys", "no key is allowed"))

FAULTS: tuple[Fault, ...] = (
    # Split rows
    Fault(
        "delta of a split row in 16 bits is of what dropout has left in",
        EAGER,
        "dp.mul_(_kept(dropout, chunks, block, keys))",
        "pass",
        (f"{SPLIT}[dtype0-dropout]",),
    ),
    Fault(
        "delta of a split row in 16 bits leaves its sink out",
        EAGER,
        "row_sum += share",
        "row_sum += 0.0",
        (f"{SPLIT}[dtype0-sink]",),
    ),
    Fault(
        "the last, smaller chunk of entries has no mask",
        CHUNKS,
        "-(-batch.stop // self.extent.batch)]",
        "batch.stop // self.extent.batch]",
        ("tests/test_eager_chunks.py::test_the_last_smaller_chunk_of_each_dim[entry]",),
    ),
    # Hidden scores
    Fault(
        "a NaN in a hidden key outlives the -inf that is added on a CPU",
        TILES,
        "_adds_mask(s.device) and not s.sum().isnan()",
        "_adds_mask(s.device)",
        ("tests/test_edges.py::test_a_key_that_is_not_allowed_may_hold_anything",),
    ),
    # Sinks
    Fault(
        "dbias of one value per query has no term of the sink",
        "reference/sinks.py",
        "return moved if dlse is None else dlse + moved",
        "return dlse",
        SINKS,
    ),
    Fault(
        "the dlse of a row without keys is dropped beside its sink",
        "reference/sinks.py",
        "dlse.to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)",
        "dlse.to(lse.dtype).masked_fill((out == 0).all(-1).mT, 0.0)",
        SINKS,
    ),
    Fault(
        "a row is normalised again without its sink",
        "reference/eager.py",
        "total += share",
        "total += 0.0",
        SINKS,
    ),
    Fault(
        "a row without keys has no sink",
        "reference/eager.py",
        "lse.copy_(sink[:, None])  # of the rows that no chunk visits",
        "pass",
        SINKS,
    ),
    Fault(
        "delta of a sink has the wrong sign",
        "reference/sinks.py",
        "torch.where(share == 0, 0.0, -share * delta)",
        "torch.where(share == 0, 0.0, share * delta)",
        SINKS,
    ),
    Fault(
        "chunks reach across entries of a mask or a bias that a part of the batch shares",
        "reference/chunks.py",
        "        for batch in _slices(self.batch, self.extent.batch, self._steps):\n",
        "        for batch in _slices(self.batch, self.extent.batch):\n",
        ("tests/test_leading_dims.py::test_chunks_of_eager_do_not_mix_entries",),
    ),
    Fault(
        "what a mask occupies in a chunk is that of its first entry",
        "reference/chunks.py",
        "            row = [any(cells) for cells in zip(*found)]\n",
        "            row = found[0]\n",
        ("tests/test_leading_dims.py::test_chunks_of_eager_do_not_mix_entries",),
    ),
    Fault(
        "an empty row among split rows is divided by its sum of 0",
        EAGER,
        "                    row_sum.masked_fill_(row_sum == 0, 1.0)\n",
        "",
        ("tests/test_eager_chunks.py::test_an_empty_row_among_split_rows",),
    ),
    Fault(
        "split rows are never normalised again",
        EAGER,
        "LARGE_LSE = 128.0",
        "LARGE_LSE = 1e38",
        ("tests/test_eager_chunks.py::test_split_rows_are_normalised_again_where_lse_is_large",),
    ),
    Fault(
        "the output so far keeps its scale when the maximum of a row rises",
        EAGER,
        "acc_o.mul_(rescale), keep=True)",
        "acc_o, keep=True)",
        SINGLE_KEYS,
    ),
    Fault(
        "the sum so far keeps its scale when the maximum of a row rises",
        EAGER,
        "row_sum.mul_(rescale).add_(",
        "row_sum.add_(",
        SINGLE_KEYS,
    ),
    Fault(
        "the dlse of an empty row counts",
        EAGER,
        "dlse.to(lse.dtype).masked_fill(empty, 0.0)",
        "dlse.to(lse.dtype)",
        ("tests/test_edges.py::test_the_lse_of_an_empty_row_takes_no_gradient[eager-bias0]",),
    ),
    Fault(
        "dlse has the wrong sign",
        EAGER,
        "ds.addcmul_(p, dlse_block)",
        "ds.addcmul_(p, dlse_block, value=-1)",
        SINGLE_KEYS,
    ),
    Fault(
        "dv is that of the last rows",
        EAGER,
        "dv_sum[:, keys], scale, keep=True)",
        "dv_sum[:, keys], scale)",
        SINGLE_KEYS,
    ),
    Fault(
        "dk alone is computed without the slope of the softcap",
        EAGER,
        "keep_slope=need_q or need_k, repeats",
        "keep_slope=need_q, repeats",
        SOFTCAP,
    ),
    Fault(
        "dbias has the slope of the softcap in it",
        EAGER,
        "                    dbias.add(block, keys, ds)\n",
        "                    dbias.add(block, keys, ds if scores.slope is None else ds * scores.slope)\n",
        SOFTCAP,
    ),
    Fault(
        "scores are not divided by the softcap",
        TILES,
        "self._scale / self._softcap).tanh_()",
        "self._scale).tanh_()",
        SOFTCAP,
    ),
    Fault(
        "the gradient of a bias is not zeroed where chunks are skipped",
        TILES,
        "self._written_once and chunks.skip_nothing()",
        "self._written_once",
        ("tests/test_eager_chunks.py::test_places_of_bias_that_no_chunk_reaches_have_a_gradient_of_zero",),
    ),
    Fault(
        "converted keys are kept for the next heads and batch entries",
        TILES,
        "if self._held != block[:2]:",
        "if self._held is None:",
        BATCHES,
    ),
    Fault(
        "on a GPU a mask hides what it allows",
        TILES,
        "self._chunks.group).masked_fill_(~mask, -math.inf)",
        "self._chunks.group).masked_fill_(mask, -math.inf)",
        ("tests/test_eager_chunks.py::test_both_ways_of_hiding_scores_agree",),
    ),
    Fault(
        "the keys of a block end where its first row does",
        CHUNKS,
        "block.rows.stop + shift + self.right)",
        "block.rows.start + shift + self.right)",
        WINDOW,
    ),
    Fault(
        "the keys of a block begin where the window of its last row does",
        CHUNKS,
        "block.rows.start + shift - self.left)",
        "block.rows.stop + shift - self.left)",
        WINDOW,
    ),
    Fault(
        "the left edge of a window is cut for the first row alone",
        CHUNKS,
        "hi = min(keys.stop, last - self.left)",
        "hi = min(keys.stop, first - self.left)",
        WINDOW,
    ),
    Fault(
        "keys that a mask allows at the end of a row are skipped",
        CHUNKS,
        "enumerate([*occupied, False])",
        "enumerate(occupied)",
        SKIPPED,
    ),
    Fault(
        "the mask of the first head of a group decides what is skipped for all",
        CHUNKS,
        "occupied = found.amax(2).bool()",
        "occupied = found[:, :, 0].bool()",
        SKIPPED,
    ),
    Fault(
        "the oracle's window ends a key early on the left",
        FORMULA,
        "inside = offset >= -left",
        "inside = offset > -left",
        BY_LOOPS,
    ),
    Fault(
        "the oracle's windows are aligned top-left",
        FORMULA,
        ".unsqueeze(1) + (seqlen_k - seqlen_q)\n",
        ".unsqueeze(1)\n",
        BY_LOOPS,
    ),
    Fault(
        "the oracle adds dlse to delta",
        FORMULA,
        "delta = delta - dlse.to(wide)",
        "delta = delta + dlse.to(wide)",
        GRADIENTS,
    ),
    Fault(
        "the oracle's softcap has the slope of another function",
        FORMULA,
        "softcap * t, 1 - t * t",
        "softcap * t, 1 - t",
        GRADIENTS,
    ),
)
