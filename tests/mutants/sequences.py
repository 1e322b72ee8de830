"""Faults of calls with sequences: values, the loop of eager, and the Triton kernels, run by Triton's interpreter."""

from __future__ import annotations

from .fault import Fault

VALUES, LAYOUT = "flash_dmattn/sequences/values.py", "flash_dmattn/sequences/layout.py"
PLAN, KEYS = "triton_kernels/plan_sequences.py", "triton_kernels/backward_keys.py"
LOOP = "reference/sequences.py"
_TESTS = "tests/test_sequences.py::test_"
RANDOM = tuple(f"{_TESTS}random_calls_beside_one_dense_call[eager-{part}]" for part in range(6))
BOUNDS = tuple(f"{_TESTS}bounds_never_leave_the_tensors[{seed}]" for seed in range(20))
INTERPRETED = (
    "tests/test_triton_interpreter.py::test_sequences[0]",
    "tests/test_triton_interpreter.py::test_sequences[1000]",
)

APPEND, WRITES, APPEND_KERNEL = (
    *("flash_dmattn/sequences/append.py", "flash_dmattn/sequences/cache_writes.py"),
    "triton_kernels/append.py",
)
_APPEND = "tests/test_append.py::test_"
WRITTEN = (f"{_APPEND}random_writes",)
WRITTEN_ANYHOW = (f"{_APPEND}wrong_tables_write_nowhere_else",)
WRITTEN_BY_KERNEL = (f"{_APPEND}random_writes_of_the_kernel",)
TREE_KERNEL = "triton_kernels/tree_mask.py"
TREES = tuple(f"tests/test_trees.py::test_random_calls_beside_one_dense_call[eager-{part}]" for part in range(3))
INTERPRETED_TREES = ("tests/test_trees.py::test_random_calls_of_the_kernels",)
PACK = "flash_dmattn/masks/prepared/sequence_packing.py"
_TILES = "tests/test_sequence_tiles.py::test_"
PACKED_TILES = tuple(f"{_TILES}tensors_against_a_loop[{chunk}]" for chunk in (1 << 24, 5000))
INTERPRETED_TILES = ("tests/test_triton_sequences.py::test_in_the_interpreter[made]",)
PACK_KERNEL, WALK = "triton_kernels/sequence_pack.py", "flash_dmattn/backends/sequence_walk.py"
_PACKS = "tests/test_sequence_pack.py::test_"
PACKED_BY_KERNEL = (f"{_PACKS}random_masks[0]",)
PACKED_BY_CALL = (f"{_PACKS}which_masks_are_packed_by_the_call",)
LAYER, _LAYER = "flash_dmattn/nn/layer_sequences.py", "tests/test_nn_sequences.py::test_"
PACKED_LAYER = (f"{_LAYER}packed_sequences_are_each_alone[plain]",)

FAULTS: tuple[Fault, ...] = (
    Fault("new tokens go behind the keys", WRITES, "place = keys - tokens + token", "place = keys + token", WRITTEN),
    Fault(
        "tokens of no sequence are written",
        WRITES,
        "is_written = is_token & (place >= 0)",
        "is_written = place >= 0",
        WRITTEN,
    ),
    Fault(
        "a token before the first key is written",
        WRITES,
        "is_written = is_token & (place >= 0)",
        "is_written = is_token",
        WRITTEN_ANYHOW,
    ),
    Fault("a wrong page is written to", WRITES, ".clamp(0, pages - 1)", "", WRITTEN_ANYHOW),
    Fault(
        "the value of an unwritten row is changed",
        WRITES,
        "torch.where(is_written[leader], new.flatten(0, 1)[source], cache[entry, row])",
        "new.flatten(0, 1)[source]",
        WRITTEN_ANYHOW,
    ),
    Fault(
        "a cache may share memory among heads",
        APPEND,
        "n > 1 and stride == 0",
        "n > 99 and stride == 0",
        (f"{_APPEND}bad_input_is_refused_by_name[one memory for all heads]",),
    ),
    Fault(
        "new tokens need not be counted",
        APPEND,
        "if tokens > keys:",
        "if tokens > keys + 9:",
        (f"{_APPEND}bad_input_is_refused_by_name[uncounted]",),
    ),
    Fault(
        "two keys may go to one place",
        APPEND,
        "if count > 1:",
        "if count > 9:",
        (f"{_APPEND}bad_input_is_refused_by_name[a page of two]",),
    ),
    Fault(
        "the kernel finds the sequence before",
        APPEND_KERNEL,
        "            high = tl.where(is_behind, middle, high)\n",
        "            high = tl.where(is_behind, middle, high - 1)\n",
        WRITTEN_BY_KERNEL,
    ),
    Fault(
        "the kernel writes tokens of no sequence",
        APPEND_KERNEL,
        "(token < tokens) & (place >= 0)",
        "(place >= 0)",
        WRITTEN_BY_KERNEL,
    ),
    Fault(
        "the kernel writes before the first key",
        APPEND_KERNEL,
        "(token < tokens) & (place >= 0)",
        "(token < tokens)",
        WRITTEN_BY_KERNEL,
    ),
    Fault(
        "the kernel writes to a wrong page",
        APPEND_KERNEL,
        "tl.minimum(tl.maximum(page, 0), pages - 1)",
        "tl.minimum(page, pages - 1)",
        WRITTEN_BY_KERNEL,
    ),
    Fault(
        "the kernel writes values by the strides of keys",
        APPEND_KERNEL,
        "v_cache, v_cache_strides, v, v_strides, entry",
        "v_cache, k_cache_strides, v, v_strides, entry",
        WRITTEN_BY_KERNEL,
    ),
    Fault(
        "a tree of one sequence is that of the first",
        LOOP,
        "own = x[s.number if x.shape[0] > 1 else 0]",
        "own = x[0]",
        TREES,
    ),
    Fault(
        "new tokens are taken for the first keys",
        LOOP,
        "allowed[..., s.seqlen_k - tail :]",
        "allowed[..., :tail]",
        TREES,
    ),
    Fault(
        "beside a tree causality is dropped",
        "flash_dmattn/validation.py",
        "    if is_causal or window[1] != -1:",
        "    if window[1] != -1:",
        ("tests/test_trees.py::test_bad_input_is_refused_by_name[causal]",),
    ),
    Fault(
        "a tree may have more tokens than the call",
        "flash_dmattn/problem/sequences.py",
        "if tokens != spec.max_seqlen_q:",
        "if tokens < spec.max_seqlen_q:",
        ("tests/test_trees.py::test_bad_input_is_refused_by_name[tokens]",),
    ),
    Fault(
        "bit 31 of a tree is lost",
        "flash_dmattn/masks/prepared/tree.py",
        "shifts = torch.arange(WORD, device=tree.device)",
        "shifts = torch.arange(WORD, device=tree.device) % 31",
        ("tests/test_trees.py::test_bits[33]",),
    ),
    Fault(
        "the kernel takes all new tokens as seen by all",
        TREE_KERNEL,
        "tl.where(is_token & (sees == 0), tokens, shape.seqlen_q)",
        "tl.where(is_token & (sees == 0), shape.seqlen_q, shape.seqlen_q)",
        INTERPRETED_TREES,
    ),
    Fault(
        "the kernel stops before the last token that is seen",
        TREE_KERNEL,
        "tl.where(is_token & sees, tokens + 1, 0)",
        "tl.where(is_token & sees, tokens, 0)",
        INTERPRETED_TREES,
    ),
    Fault(
        "the kernel reads the bits of the key's place",
        TREE_KERNEL,
        "token = (keys - old)[None, :]",
        "token = (keys - old // 32 * 32)[None, :]",
        INTERPRETED_TREES,
    ),
    Fault(
        "the kernel reads the tree of the first sequence",
        "triton_kernels/tile_ops.py",
        "        return data + entry_of(b, strides) * strides.batch, 0\n",
        "        return data, 0\n",
        INTERPRETED_TREES,
    ),
    Fault(
        "a chain has other bits than causality",
        "triton_kernels/plan.py",
        "read = BAND.value if self.mask_kind == TREE.value else self.mask_kind",
        "read = self.mask_kind",
        ("tests/test_trees.py::test_a_chain_has_the_tiles_of_causality",),
    ),
    Fault(
        "positions of packed tokens go on from text to text",
        LAYER,
        "(place + lengths[:, 3] - lengths[:, 1])",
        "(place + lengths[:, 2] + lengths[:, 3] - lengths[:, 1])",
        PACKED_LAYER,
    ),
    Fault(
        "new tokens begin at position 0",
        LAYER,
        "(place + lengths[:, 3] - lengths[:, 1])",
        "place",
        (f"{_LAYER}decoding_from_pages_equals_the_full_forward[by slots-plain]",),
    ),
    Fault(
        "scores of packed keys are those of the first sequence",
        LAYER,
        "place = self._bounds[:, 2:3].long() +",
        "place = 0 * self._bounds[:, 2:3].long() +",
        PACKED_LAYER,
    ),
    Fault(
        "other keys than queries are taken for the same",
        LAYER,
        "if not torch.equal(self._bounds[:, :2], self._bounds[:, 2:]):",
        "if False:",
        (f"{_LAYER}bad_input_is_refused_by_name[other keys]",),
    ),
    Fault(
        "scores are not written to pages",
        "flash_dmattn/nn/paged_cache.py",
        "            append_to_cache(self.scores[..., None], None, scores[..., None], None, sequences)",
        "            pass",
        (f"{_LAYER}decoding_from_pages_equals_the_full_forward[by slots-plain]",),
    ),
    Fault(
        "tables that fall are taken as they are",
        VALUES,
        "cu_seqlens.clamp(0, rows).cummax(0).values",
        "cu_seqlens.clamp(0, rows)",
        BOUNDS,
    ),
    Fault("a length may leave its tensor", VALUES, "lengths.clamp(0, min(rows, most))", "lengths", BOUNDS),
    Fault(
        "bounds are remembered though a table has changed",
        LAYOUT,
        "key = (spec, pages, torch.is_inference_mode_enabled(), *(x._version for x in self._tensors))",
        "key = (spec, pages)",
        (f"{_TESTS}what_changes_in_place_counts_from_the_next_call_on",),
    ),
    Fault(
        "keys of a sequence begin one early",
        LOOP,
        "slice(first_k, first_k + len_k),",
        "slice(max(first_k - 1, 0), first_k + len_k - 1),",
        RANDOM,
    ),
    Fault(
        "a bias by position is that of the first sequence",
        LOOP,
        'if packing == "none" and x.shape[0] > 1',
        'if packing == "none" and x.shape[0] < 0',
        RANDOM,
    ),
    Fault(
        "rows of no sequence are not written",
        PLAN,
        "        fill(out, lse, sequences.bounds)\n",
        "",
        INTERPRETED,
    ),
    Fault(
        "rows of no sequence have a sink",
        PLAN,
        "sink_gradient(sink, lse.masked_fill(lse == -torch.inf, torch.inf), rows)",
        "sink_gradient(sink, lse, rows)",
        ("tests/test_triton_sequences.py::test_in_the_interpreter[made]",),
    ),
    Fault(
        "causality is aligned to the first key",
        "triton_kernels/forward.py",
        "shape = shape_of(shape, tl.load(bounds + own * 4 + 1), tl.load(bounds + own * 4 + 3))",
        "shape = shape_of(shape, tl.load(bounds + own * 4 + 1), tl.load(bounds + own * 4 + 1))",
        INTERPRETED,
    ),
    Fault(
        "tiles of keys are counted by the places of queries",
        KEYS,
        "SEARCH, 2, BLOCK_N)",
        "SEARCH, 0, BLOCK_N)",
        INTERPRETED,
    ),
    Fault(
        "delta of few keys is taken twice",
        "triton_kernels/backward_delta.py",
        "d = tl.where(takes_sum, d, 0.0)",
        "d = tl.where(takes_sum, d, d)",
        INTERPRETED,
    ),
    Fault(
        "each part of the keys has all of them",
        "triton_kernels/forward.py",
        "begin_part = (inside + before + after) * part // splits",
        "begin_part = 0",
        ("tests/test_triton_interpreter.py::test_lines_that_random_calls_may_miss[parts-11]",),
    ),
    Fault(
        "rows behind a sequence have bits",
        PACK,
        "[:, None]) & is_used[:, None]",
        "[:, None]) & (place >= 0)[:, None]",
        PACKED_TILES,
    ),
    Fault(
        "a prepared band is aligned to the first key",
        PACK,
        "(place + keys.lengths[own] - queries.lengths[own])",
        "(place)",
        PACKED_TILES,
    ),
    Fault(
        "rows that are missing make a tile partial",
        PACK,
        "queries.lengths[own][:, None] - 1\n",
        "queries.lengths[own][:, None] + TILE\n",
        PACKED_TILES,
    ),
    Fault(
        "a column lists the tiles of the next sequence",
        PACK,
        "exists = (inner * TILE < queries.lengths[own][:, None])",
        "exists = (inner * TILE < queries.lengths[own][:, None] + 128)",
        PACKED_TILES,
    ),
    Fault(
        "tiles of two sequences meet",
        PACK,
        "return self.first // TILE + torch.arange(self.first.shape[0], device=self.first.device)",
        "return self.first // TILE",
        PACKED_TILES,
    ),
    Fault(
        "gradients of a tree have no earlier keys",
        PACK,
        "within(mask.shape[3], token)) | (token < 0))[None]",
        "within(mask.shape[3], token)))[None]",
        INTERPRETED_TREES,
    ),
    Fault(
        "gradients of a tree take the tree of the first sequence",
        PACK,
        "mask[within(mask.shape[0], own), 0, within(mask.shape[2], place)]",
        "mask[within(mask.shape[0], own * 0), 0, within(mask.shape[2], place)]",
        INTERPRETED_TREES,
    ),
    Fault(
        "pairs of a ragged mask begin with those before",
        PACK,
        "(pairs.cumsum(0) - pairs)[own]",
        "pairs.cumsum(0)[own]",
        (f"{_TILES}ragged_masks",),
    ),
    Fault(
        "packing: rows that are missing make a tile partial",
        PACK_KERNEL,
        "all_bits = ((bits == 0xFFFFFFFF) | (rows >= seqlen_q)[:, None])",
        "all_bits = (bits == 0xFFFFFFFF)",
        PACKED_BY_KERNEL,
    ),
    Fault(
        "packing: a band is aligned to the first key",
        PACK_KERNEL,
        "high = seqlen_k - seqlen_q + right",
        "high = right",
        PACKED_BY_KERNEL,
    ),
    Fault(
        "packing: rows behind a sequence are left as they were",
        PACK_KERNEL,
        "(at_rows < behind_q)",
        "(at_rows < first_q + seqlen_q)",
        PACKED_BY_KERNEL,
    ),
    Fault(
        "packing: rows before the first sequence are left as they were",
        PACK_KERNEL,
        "(at_rows >= 0) & ",
        "(rows >= 0) & ",
        PACKED_BY_KERNEL,
    ),
    Fault(
        "packing: keys behind a sequence have bits",
        PACK_KERNEL,
        "bits &= ones_below(seqlen_k - words * 32)[None, :]",
        "bits &= ones_below(seqlen_k + 15 - words * 32)[None, :]",
        PACKED_BY_KERNEL,
    ),
    Fault(
        "packing: a column lists the tiles of the next sequence",
        PACK_KERNEL,
        "existing = tl.where(has_keys, tl.cdiv(seqlen_q, TILE), 0)",
        "existing = tl.where(has_keys, most_rows, 0)",
        PACKED_BY_KERNEL,
    ),
    Fault(
        "packing: pairs begin with those of the first sequence",
        PACK_KERNEL,
        "first_pair = tl.load(pairs_ptr + own)",
        "first_pair = tl.load(pairs_ptr)",
        PACKED_BY_KERNEL,
    ),
    Fault(
        "stats: rows of no sequence are empty ones",
        "flash_dmattn/masks/prepared/sequence_tiles.py",
        ".all(-1).sum()) - heads * (rows - queries),",
        ".all(-1).sum()),",
        (f"{_TILES}stats_are_the_sums_of_those_of_each_sequence",),
    ),
    Fault(
        "a padded sequence is drawn from the first slot",
        "flash_dmattn/masks/prepared/sequence_tiles.py",
        "first += 0 if self.spec.packs_queries else number * self.spec.rows_q",
        "first += 0",
        ("tests/test_mask_drawing.py::test_of_a_mask_beside_sequences_one_is_drawn[padded]",),
    ),
    Fault(
        "packing: earlier keys are not seen by a tree",
        PACK_KERNEL,
        "(token >= 0)[None, :, :], other=1)",
        "(token >= 0)[None, :, :], other=0)",
        PACKED_BY_KERNEL,
    ),
    Fault(
        "packing: keys begin with those of the first sequence",
        PACK_KERNEL,
        'of_first_k = of_key if mask_packing == "keys" else 0',
        "of_first_k = 0",
        PACKED_BY_KERNEL,
    ),
    Fault(
        "packing: a dim of size 1 is walked by its stride",
        PACK_KERNEL,
        "stride // unit if size > 1 else 0 for",
        "stride // unit if size > 0 else 0 for",
        PACKED_BY_KERNEL,
    ),
    Fault(
        "packing: heads of a mask lie within 2 GB",
        PACK_KERNEL,
        "start = own.to(tl.int64) * stride_own + head * stride_h",
        "start = own.to(tl.int64) * stride_own + (head * stride_h).to(tl.int32)",
        (f"{_PACKS}offsets_beyond_int32",),
    ),
    Fault(
        "a mask with one value for all keys is packed by the call",
        WALK,
        "if shares_queries or shares_keys or",
        "if shares_queries or",
        PACKED_BY_CALL,
    ),
    Fault(
        "one tile of keys is packed by the call",
        WALK,
        "p.seqlen_k > FEW_KEYS",
        "p.seqlen_k >= FEW_KEYS",
        PACKED_BY_CALL,
    ),
    Fault(
        "tiles are made for a pass that reads none",
        "flash_dmattn/dispatch/mask_view.py",
        "if sequences is None or not reads_it or not walks_tiles(sized):",
        "if sequences is None or not walks_tiles(sized):",
        PACKED_BY_CALL,
    ),
    Fault(
        "the switch of packing by calls has no effect",
        WALK,
        "if not PREPARES or p.mask is None",
        "if p.mask is None",
        (f"{_PACKS}calls_in_graphs_under_transforms_of_a_layer_and_switched_off[off-1]",),
    ),
    Fault(
        "masks beside sequences are packed by Triton on GPUs of AMD",
        "flash_dmattn/dispatch/packers.py",
        'if family == "sm_" else',
        "if family else",
        (f"{_PACKS}who_packs",),
    ),
    Fault(
        "a mask of other sequences is taken",
        LAYOUT,
        "mask.sequences is not sequences",
        "mask.sequences is None",
        (f"{_TILES}bad_input_is_refused_by_name[others]",),
    ),
    Fault(
        "the band of a prepared mask is the call's",
        "flash_dmattn/validation.py",
        "return unpacked_spec(mask.shape), mask.form, mask_packing, mask.is_causal, mask.window_size",
        "return unpacked_spec(mask.shape), mask.form, mask_packing, is_causal, (-1, -1)",
        (f"{_TILES}explain_says_what_a_mask_costs",),
    ),
    Fault(
        "bits are read from the first row of all",
        "triton_kernels/tile_ops.py",
        "    data += first_row.to(tl.int64) * strides.row\n",
        "",
        INTERPRETED_TILES,
    ),
    Fault(
        "lists are read from the first tile of all",
        "triton_kernels/tile_ops.py",
        "    index += (first_place // TILE + own).to(tl.int64) * strides.list_row\n",
        "",
        INTERPRETED_TILES,
    ),
    Fault(
        "columns are found by the places of queries",
        KEYS,
        "mask_strides, queries_before, first_row, own)",
        "mask_strides, queries_before, queries_before, own)",
        INTERPRETED_TILES,
    ),
    Fault(
        "classes of the first sequence count for all",
        "triton_kernels/backward_bias.py",
        "                tile += (first_row // TILE).to(tl.int32) + b.to(tl.int32)\n",
        "                tile += 0\n",
        INTERPRETED_TILES,
    ),
    Fault(
        "heads of a group read the lists of the first",
        "triton_kernels/forward.py",
        "h_k * shape.group if GROUPED else h, MASK)",
        "h_k if GROUPED else h, MASK)",
        INTERPRETED_TILES,
    ),
    Fault(
        "heads with lists of their own share a tile",
        PLAN,
        "is_few = is_few and not (call.has_tiles",
        "is_few = is_few and not (not call.has_tiles",
        INTERPRETED_TILES,
    ),
)
