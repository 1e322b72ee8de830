"""Faults of triton_kernels/, run by Triton's interpreter."""

from __future__ import annotations

from .fault import Fault

_LINES = "tests/test_triton_interpreter.py::test_lines_that_random_calls_may_miss"
SCORES, SOFTCAP, BANDS = (f"{_LINES}[scores-4]",), (f"{_LINES}[softcap-3]",), (f"{_LINES}[bands-7]",)
MASKS, PARTS, SINKS = (f"{_LINES}[masks-2]",), (f"{_LINES}[parts-11]",), (f"{_LINES}[sinks-4]",)
OF_FEW_ROWS = ("tests/test_triton_plan.py::test_tiles_and_shares_of_few_rows_go_by_how_many_heads_an_sm_has",)
EMPTY_ROWS = ("tests/test_triton_interpreter.py::test_the_lse_of_an_empty_row_takes_no_gradient",)
_PACKING = "tests/test_mask_pack_interpreter.py::test_interpreted"
INTERVALS = ("tests/test_triton_interpreter.py::test_interval_masks",)
PACKED, BEYOND_INT32 = (f"{_PACKING}[shapes]",), (f"{_PACKING}[beyond_int32]",)
RUNS = (f"{_PACKING}[runs]",)

_SHORT = "tests/test_triton_interpreter.py::test_short_rows"
SHORT = (f"{_SHORT}[0]", f"{_SHORT}[1]")
WALKS = ("tests/test_triton_interpreter.py::test_walks_of_several_heads",)

FAULTS: tuple[Fault, ...] = (
    # Sinks
    Fault(
        "a sink joins each share of the keys",
        "triton_kernels/forward_combine.py",
        "join_sink(natural, logit.to(tl.float32))",
        "join_sink(natural, logit.to(tl.float32) + tl.math.log2(splits * 1.0) * LN2)",
        PARTS,
    ),
    Fault(
        "out keeps the share of the sink",
        "triton_kernels/forward.py",
        "        acc_o = acc_o * share[:, None]\n    tl.store(out_rows",
        "        acc_o = acc_o\n    tl.store(out_rows",
        SINKS,
    ),
    Fault(
        "the sink of a group's first head serves all of it, where the heads are rows",
        "triton_kernels/plan.py",
        "(sink.shape[1], 1)",
        "(sink.shape[1], 0)",
        SINKS,
    ),
    Fault(
        "beside a sink few keys are normalised without it",
        "triton_kernels/tile_ops.py",
        "total += tl.math.exp2(tl.load(sink + h).to(tl.float32) * LOG2E - lse_rows)",
        "total += 0.0",
        SINKS,
    ),
    Fault(
        "short rows: normalised without the sink",
        "triton_kernels/short_backward.py",
        "total = row_totals(p, sink, h, lse_rows, 1, HAS_SINK)",
        "total = row_totals(p, sink, h, lse_rows, 1, False)",
        SHORT,
    ),
    Fault(
        "the dlse of a row without keys is dropped beside its sink",
        "triton_kernels/backward_delta.py",
        "d -= tl.where(empty, 0.0,",
        "d -= tl.where(empty | (d == 0.0), 0.0,",
        SINKS,
    ),
    Fault(
        "dsink of few keys from a delta without its sum",
        "triton_kernels/plan_backward.py",
        "if has_few_keys and sink is not None and (need_sink or per_row):",
        "if False:",
        SINKS,
    ),
    # Rows of one tile
    Fault(
        "short rows: an empty row is subtracted its maximum of -inf",
        "triton_kernels/short_forward.py",
        'tl.where(row_max == float("-inf"), 0.0, row_max)',
        "row_max",
        SHORT,
    ),
    Fault(
        "short rows: the gradient of lse is dropped",
        "triton_kernels/short_backward.py",
        "d -= tl.where(empty, 0.0, tl.load(at, mask=row_ok, other=0.0).to(tl.float32))",
        "d -= 0.0 * tl.where(empty, 0.0, tl.load(at, mask=row_ok, other=0.0).to(tl.float32))",
        SHORT,
    ),
    Fault(
        "short rows: an empty row has the p of one",
        "triton_kernels/short_backward.py",
        'lse_rows = tl.where(empty, float("inf"), natural * LOG2E)',
        "lse_rows = natural * LOG2E",
        SHORT,
    ),
    Fault(
        "short rows: a head is masked by the bools of the one before",
        "triton_kernels/short_backward.py",
        "tl.minimum(member + 1, end - 1)",
        "tl.minimum(member, end - 1)",
        WALKS,
    ),
    Fault(
        "short rows: the slope of a softcap is left out",
        "triton_kernels/short_backward.py",
        "ds = ds * slope",
        "ds = ds * 1.0",
        SHORT,
    ),
    Fault(
        "short rows: the second of two runs reads lse in the place of delta",
        "triton_kernels/short_backward.py",
        "d = tl.load(delta + line, mask=row_ok, other=0.0)",
        "d = tl.load(lse + line, mask=row_ok, other=0.0)",
        SHORT,
    ),
    Fault(
        "short rows: the last query of an interval is one too far",
        "triton_kernels/short_rows.py",
        "(rows[:, None] < end[None, :])",
        "(rows[:, None] <= end[None, :])",
        SHORT,
    ),
    Fault(
        "short rows: a walk goes on beyond its chunk",
        "triton_kernels/short_rows.py",
        "tl.minimum(begin + walk.chunk, members)",
        "members",
        SHORT,
    ),
    Fault(
        "short rows: a band is not folded into the bias",
        "triton_kernels/short_rows.py",
        "in_band(rows[:, None], keys[None, :], shape, LEFT, RIGHT)",
        "in_band(rows[:, None], keys[None, :], shape, False, False)",
        SHORT,
    ),
    Fault(
        "short rows: the members of an owner are those of one entry",
        "triton_kernels/short_rows.py",
        "members = shape.batch // walk.owners_b * members_h",
        "members = members_h",
        SHORT,
    ),
    Fault(
        "short rows: a mask's row stride of 0 is not seen",
        "triton_kernels/plan_short.py",
        "mask_kind = DENSE_ROW.value if one_row else call.mask_kind",
        'mask_kind = DENSE_ROW.value if call.mask.form == "dense" else call.mask_kind',
        SHORT,
    ),
    Fault(
        "the last slot is left out of a sum",
        "triton_kernels/sum_slots.py",
        "mask=(slot < count)[:, None]",
        "mask=(slot < count - 1)[:, None]",
        SHORT,
    ),
    Fault(
        "the entry of a mask or a bias does not begin anew",
        "triton_kernels/tile_ops.py",
        "    return b // strides.repeat % strides.entries\n",
        "    return b // strides.repeat\n",
        ("tests/test_triton_interpreter.py::test_entries_that_a_part_of_the_batch_shares[three dims]",),
    ),
    Fault(
        "the gradient of a shared bias sums over other entries than those that read it",
        "triton_kernels/tile_ops.py",
        "(number // repeat * entries + entry) * repeat + number % repeat",
        "(number // repeat * entries + entry) * repeat",
        ("tests/test_triton_interpreter.py::test_entries_that_a_part_of_the_batch_shares[bias per score]",),
    ),
    # Scores and their sums
    Fault(
        "forward: out is not corrected when a maximum rises",
        "triton_kernels/forward.py",
        "acc_o = acc_o * rescale[:, None]",
        "acc_o = acc_o * 1.0",
        SCORES,
    ),
    Fault(
        "forward: a negative scale taken as positive",
        "triton_kernels/plan_forward.py",
        "flags.softmax_scale < 0,",
        "False,",
        SCORES,
    ),
    Fault(
        "keys behind the last one are attended",
        "triton_kernels/tile_ops.py",
        "allowed = (keys < shape.seqlen_k) & (rows < shape.seqlen_q)",
        "allowed = (keys >= 0) & (rows < shape.seqlen_q)",
        SCORES,
    ),
    Fault(
        "the last block that is not whole is left out of a walk",
        "triton_kernels/tile_ops.py",
        "stop = tl.maximum(tl.cdiv(hi, BLOCK), start)",
        "stop = tl.maximum(hi // BLOCK, start)",
        SCORES,
    ),
    Fault(
        "dq: h % Hk in the place of h // G",
        "triton_kernels/backward_queries.py",
        "h_k = h // shape.group",
        "h_k = h % (shape.num_heads // shape.group)",
        SCORES,
    ),
    Fault(
        "dq from a stored ds lacks softmax_scale",
        "triton_kernels/backward_product.py",
        "(acc_dq * scale)",
        "(acc_dq)",
        SCORES,
    ),
    Fault(
        "dk and dv of a last block that is not whole are not stored",
        "triton_kernels/backward_keys.py",
        "key_ok = keys < shape.seqlen_k",
        "key_ok = keys < shape.seqlen_k // BLOCK_N * BLOCK_N",
        SCORES,
    ),
    Fault(
        "a shared dbias with softmax_scale, which scores had already",
        "triton_kernels/backward_bias.py",
        "acc += p * (dp - d[:, None])",
        "acc += p * (dp - d[:, None]) * scale_log2",
        SCORES,
    ),
    Fault(
        "delta without dlse",
        "triton_kernels/backward_delta.py",
        "if HAS_DLSE:",
        "if HAS_DLSE and FEW_KEYS:",
        SCORES,
    ),
    # A softcap
    Fault(
        "a shared dbias without the softcap",
        "triton_kernels/backward_bias.py",
        "if SOFTCAP:",
        "if SOFTCAP and FEW_KEYS:",
        SOFTCAP,
    ),
    Fault(
        "dk without the slope of a softcap, which dq has",
        "triton_kernels/backward_keys.py",
        "ds = ds * slope",
        "ds = ds * 1.0",
        SOFTCAP,
    ),
    Fault(
        "dq from a stored ds, which lacks the slope of a softcap",
        "triton_kernels/plan_backward.py",
        "product = stored and call.flags.softcap == 0 and",
        "product = stored and",
        SOFTCAP,
    ),
    # Bands
    Fault(
        "dk: causal queries aligned top-left",
        "triton_kernels/tile_ops.py",
        "lo = tl.maximum(0, first - shift - shape.right)",
        "lo = tl.maximum(0, first - shape.right)",
        BANDS,
    ),
    Fault(
        "a window without its leftmost key",
        "triton_kernels/tile_ops.py",
        "keys >= rows + (shift - shape.left)",
        "keys > rows + (shift - shape.left)",
        BANDS,
    ),
    Fault(
        "blocks at the left edge of a window taken as inside",
        "triton_kernels/tile_ops.py",
        "hi_full = tl.maximum(0, tl.minimum(shape.seqlen_q, first - shift + shape.left + 1))",
        "hi_full = tl.maximum(0, tl.minimum(shape.seqlen_q, last - shift + shape.left + 1))",
        BANDS,
    ),
    # Masks
    Fault(
        "the dlse of an empty row is not dropped",
        "triton_kernels/backward_delta.py",
        "d -= tl.where(empty, 0.0, tl.load(e_rows, mask=row_ok, other=0.0).to(tl.float32))",
        "d -= tl.load(e_rows, mask=row_ok, other=0.0).to(tl.float32)",
        EMPTY_ROWS,
    ),
    Fault(
        "the lse of an empty row stays -inf",
        "triton_kernels/backward_delta.py",
        'tl.where(empty, float("inf"), natural * LOG2E)',
        "natural * LOG2E",
        MASKS,
    ),
    Fault(
        "dk and dv: bits of the row before",
        "triton_kernels/tile_ops.py",
        "at = data + rows.to(tl.int64)[None, :] * stride",
        "at = data + (rows // 2 * 2).to(tl.int64)[None, :] * stride",
        MASKS,
    ),
    Fault(
        "the mask of another head",
        "triton_kernels/tile_ops.py",
        "h_m = (h // strides.group).to(tl.int64)",
        "h_m = (h % strides.group).to(tl.int64)",
        MASKS,
    ),
    Fault(
        "packing: an empty tile taken as full",
        "triton_kernels/mask_pack.py",
        "kind = seen + seen * ",
        "kind = 2 * (1 - seen) + seen + seen * ",
        PACKED,
    ),
    Fault(
        "packing: offsets of keys in 32 bits",
        "triton_kernels/mask_pack.py",
        "offsets = starts + (keys.to(tl.int64) * stride_k)",
        "offsets = starts + (keys * stride_k)",
        BEYOND_INT32,
    ),
    Fault(
        "two runs of queries pass for one",
        "triton_kernels/interval_pack.py",
        "if _any(tl.where(ends, ended, 0)) != 0:",
        "if _any(tl.where(ends, ended, 0)) > 1:",
        RUNS,
    ),
    Fault(
        "a run to the last query has no end",
        "triton_kernels/interval_pack.py",
        "triton.cdiv(seqlen_q + 1, ROWS)",
        "triton.cdiv(seqlen_q, ROWS)",
        RUNS,
    ),
    Fault(
        "of the changes in a word one is visited",
        "triton_kernels/interval_pack.py",
        "            some = _any(changes)\n\n",
        "            some = 0\n\n",
        RUNS,
    ),
    Fault(
        "the heads of a group are rows beside bounds of keys, which know of one query",
        "triton_kernels/launch.py",
        'return mask.form != "tiles"\n',
        'return mask.form != "tiles" or mask.tensors[0].shape[2] != 1\n',
        ("tests/test_triton_plan.py::test_bounds_of_keys_know_of_one_query",),
    ),
    # Keys that programs share
    Fault(
        "a row without a key in any part is NaN",
        "triton_kernels/forward_combine.py",
        'shift = tl.where(top == float("-inf"), 0.0, top)',
        "shift = top",
        PARTS,
    ),
    Fault(
        "parts weighed by another base",
        "triton_kernels/forward_combine.py",
        "total = tl.sum(tl.math.exp2((of_parts - shift) * LOG2E), 0)",
        "total = tl.sum(tl.math.exp2((of_parts - shift) * LN2), 0)",
        PARTS,
    ),
    Fault(
        "of more parts than are loaded at once, the first are added again",
        "triton_kernels/forward_combine.py",
        "some = first + tl.arange(0, AT_ONCE)",
        "some = tl.arange(0, AT_ONCE)",
        PARTS,
    ),
    Fault(
        "parts of a group's heads are combined as rows of queries",
        "triton_kernels/forward_combine.py",
        "    if not HEADS_FIRST:\n",
        "    if True:\n",
        PARTS,
    ),
    Fault(
        "a group's heads are written as rows of queries",
        "triton_kernels/forward.py",
        "statistics + rows if HEADS_FIRST else",
        "statistics + rows if False else",
        PARTS,
    ),
    Fault(
        "a share of blocks at an edge begins with those of all shares before",
        "triton_kernels/forward.py",
        "tl.maximum(begin_part - inside, 0)",
        "tl.maximum(begin_part - inside, 0) * 0",
        PARTS,
    ),
    Fault(
        "in one loop the blocks before the inside ones are left out",
        "triton_kernels/forward.py",
        "start - before, 0, 0, inside + before + after",
        "start, 0, 0, inside + before + after",
        PARTS,
    ),
    Fault(
        "a mask of each head of a group is packed as one of each group",
        "triton_kernels/launch.py",
        "return _packed(_heads_as_rows(bools, q, k), rows,",
        "return _packed(bools[:, :: bools.shape[1] // k.shape[2] or 1], rows,",
        PARTS,
    ),
    # Few rows
    Fault(
        "few rows of kept keys have a tile of their own however many heads there are",
        "triton_kernels/plan.py",
        "or self._heads <= 2 * self.num_sms",
        "or True",
        OF_FEW_ROWS,
    ),
    Fault(
        "few rows go by narrow blocks where many SMs have no head",
        "triton_kernels/plan.py",
        "return leaves_some or self._heads > 2 * self.num_sms",
        "return self._heads > 2 * self.num_sms",
        OF_FEW_ROWS,
    ),
    Fault(
        "shares of few rows' lists are as many as an SM each",
        "triton_kernels/plan_forward.py",
        "call.num_sms * (2 if call.mask_kind in _LISTS else 1)",
        "call.num_sms",
        OF_FEW_ROWS,
    ),
    # Interval masks
    Fault(
        "a key is seen by one row more",
        "triton_kernels/tile_ops.py",
        "(rows < (bounds >> 32).to(tl.int32))",
        "(rows <= (bounds >> 32).to(tl.int32))",
        INTERVALS,
    ),
    Fault(
        "dead keys beside live ones are copied as they are",
        "flash_dmattn/backends/triton/key_order.py",
        "[self._rows].masked_fill_(dead, 0)",
        "[self._rows]",
        INTERVALS,
    ),
    Fault(
        "dk and dv stay in the order of places",
        "flash_dmattn/backends/triton/key_order.py",
        ".index_copy_(0, self._rows.flatten(), rows)",
        ".index_copy_(0, self._rows.flatten().sort().values, rows)",
        INTERVALS,
    ),
    Fault(
        "the gradient of a bias per key stays in the order of places",
        "flash_dmattn/backends/triton/key_order.py",
        "ordered.scatter_(3, self._bias_order[:, :, None], gradient)",
        "ordered[..., : gradient.shape[3]] = gradient",
        INTERVALS,
    ),
    Fault(
        "a bias per key in the order of keys",
        "flash_dmattn/backends/triton/key_order.py",
        "self.bias = values.gather(3, self._bias_order[:, :, None])",
        "self.bias = values.contiguous()",
        INTERVALS,
    ),
    Fault(
        "the heads of a bias take the orders of one group after another",
        "flash_dmattn/backends/triton/key_order.py",
        "order.repeat_interleave(num_heads // order.shape[1], 1)",
        "order.repeat(1, num_heads // order.shape[1], 1)",
        INTERVALS,
    ),
)
