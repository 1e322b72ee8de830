"""Faults of the masks: packing, preparation, builders, topk, broadcasting, blocks."""

from __future__ import annotations

from .fault import Fault

LIMITS = ("tests/test_prepared_mask.py::test_limits_beyond_the_mask_are_cut_to_what_fits_int32",)
TILE_MASK = ("tests/test_prepared_mask.py::test_tile_mask_against_loops",)
KEY_MASK = ("tests/test_prepared_mask.py::test_key_mask_against_loops",)
PREFIXES = ("tests/test_mask_topk.py::test_larger_prefixes_agree_with_the_chunked_selection",)
TIES = ("tests/test_mask_topk.py::test_the_two_zeros_tie_and_the_earliest_of_a_tie_is_kept",)

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a window's left side leaves int32",
        "flash_dmattn/problem/band.py",
        "max(aligned - left, -seqlen_q)",
        "aligned - left",
        LIMITS,
    ),
    Fault(
        "a window's right side leaves int32",
        "flash_dmattn/problem/band.py",
        "min(aligned + right, seqlen_k)",
        "aligned + right",
        LIMITS,
    ),
    Fault(
        "the highest diagonal of a band is not in its bits",
        "flash_dmattn/masks/prepared/packing.py",
        "(rows + (band.high + 1)).clamp(max=seqlen_k)",
        "(rows + band.high).clamp(max=seqlen_k)",
        TILE_MASK,
    ),
    Fault(
        "no tile of the last, cut row of tiles is full",
        "flash_dmattn/masks/prepared/packing.py",
        "pad(full, (0, 0, 0, missing), value=True)",
        "pad(full, (0, 0, 0, missing), value=False)",
        ("tests/test_prepared_mask.py::test_tiles_of_the_last_row_may_be_full_and_those_of_a_cut_column_may_not",),
    ),
    Fault(
        "lists have the number of partial tiles before that of full ones",
        "flash_dmattn/masks/prepared/packing.py",
        "for kind in (FULL, PARTIAL)]",
        "for kind in (PARTIAL, FULL)]",
        TILE_MASK,
    ),
    Fault(
        "rows of an odd stride are read as words",
        "flash_dmattn/masks/prepared/packing.py",
        "if padded.storage_offset() % 8 or any(stride % 8 for stride in padded.stride()[:-1]):",
        "if padded.storage_offset() % 8:",
        ("tests/test_prepared_mask.py::test_rows_that_start_between_words",),
    ),
    Fault(
        "a prefix of kept keys counts its own key",
        "flash_dmattn/masks/prepared/packing.py",
        "dtype=torch.int32), (1, 0))",
        "dtype=torch.int32), (0, 1))",
        KEY_MASK,
    ),
    Fault(
        "an expanded mask is prepared as if it were of its full size",
        "flash_dmattn/masks/prepared/operator.py",
        "    mask = collapse(mask)\n",
        "",
        ("tests/test_ops.py::test_expanded_dims_are_no_dims_of_the_prepared_mask",),
    ),
    Fault(
        "the fake lists of rows and columns have each other's length",
        "flash_dmattn/masks/prepared/operator.py",
        "(*heads, rows, 2 + columns), (*heads, columns, 2 + rows)]",
        "(*heads, rows, 2 + rows), (*heads, columns, 2 + columns)]",
        ("tests/test_ops.py::test_operator_that_prepares_a_mask",),
    ),
    Fault(
        "tiles of a key mask count as full though the band cuts their last row",
        "flash_dmattn/masks/prepared/types.py",
        "inside = (first_key >= last_row + low) &",
        "inside = (first_key >= first_row + low) &",
        KEY_MASK,
    ),
    Fault(
        "a query does not see its own key",
        "flash_dmattn/masks/builders.py",
        "return (keys <= rows)[None, None]",
        "return (keys < rows)[None, None]",
        ("tests/test_masks.py::test_causal_is_bottom_right_aligned",),
    ),
    Fault(
        "documents without tokens take a token of the next",
        "flash_dmattn/masks/builders.py",
        "torch.searchsorted(ends, positions, right=True)",
        "torch.searchsorted(ends, positions)",
        ("tests/test_masks.py::test_document_ids",),
    ),
    Fault(
        "padding attends to padding",
        "flash_dmattn/masks/builders.py",
        "    mask &= (of_q >= 0)[:, :, None]\n",
        "",
        ("tests/test_masks.py::test_document_mask_shared_and_per_batch",),
    ),
    Fault(
        "zeros of both signs do not tie",
        "flash_dmattn/masks/topk.py",
        "bits = (wide + 0.0).view(integers)",
        "bits = wide.view(integers)",
        TIES,
    ),
    Fault(
        "one of the keys that tie is left out",
        "flash_dmattn/masks/topk.py",
        "dtype=torch.int32) <= places)",
        "dtype=torch.int32) < places)",
        TIES,
    ),
    Fault(
        "a prefix keeps a key more",
        "flash_dmattn/masks/topk.py",
        "remaining = prefix.clamp(max=k) - 1",
        "remaining = prefix.clamp(max=k)",
        PREFIXES,
    ),
    Fault(
        "prefixes are aligned top-left",
        "flash_dmattn/masks/topk.py",
        "return kept.tril_(seqlen_k - seqlen_q).view(",
        "return kept.tril_().view(",
        ("tests/test_mask_topk.py::test_decoding_one_query_sees_the_whole_cache",),
    ),
    Fault(
        "key-value heads repeat in turn and not each for its group",
        "flash_dmattn/masks/broadcast.py",
        "tensor.repeat_interleave(num_heads // heads, dim=1)",
        "tensor.repeat(1, num_heads // heads, 1, 1)",
        ("tests/test_masks.py::test_combine_groups_heads_as_attention_does",),
    ),
    Fault(
        "no mask is left out of an or",
        "flash_dmattn/masks/broadcast.py",
        'if not given or (op == "or" and len(given) < len(masks)):',
        "if not given:",
        ("tests/test_masks.py::test_combine_and_none",),
    ),
    Fault(
        "half a tile is a majority",
        "flash_dmattn/masks/blocks.py",
        "dense = 2 * tile_counts(kept, blocks) > possible",
        "dense = 2 * tile_counts(kept, blocks) >= possible",
        ("tests/test_mask_blocks.py::test_half_a_tile_is_no_majority",),
    ),
    Fault(
        "tiles of 256 rows are counted in bytes",
        "flash_dmattn/masks/blocks.py",
        "if block_q <= 255 else",
        "if block_q <= 256 else",
        ("tests/test_mask_blocks.py::test_counts_of_tiles_with_as_many_rows_as_a_byte_counts",),
    ),
    Fault(
        "empty rows of an expanded mask count once",
        "flash_dmattn/masks/blocks.py",
        "empty_rows=copies * int(",
        "empty_rows=int(",
        ("tests/test_mask_blocks.py::test_stats_of_expanded_and_shortened_masks_are_those_of_the_full_ones",),
    ),
    Fault(
        "a prepared mask passes in a call with another window on the left",
        "flash_dmattn/validation.py",
        "if window_size[0] not in (-1, mask.window_size[0]):",
        "if window_size[0] < -1:",
        ("tests/test_mask_forms.py::test_other_limits_than_the_mask_has_are_refused",),
    ),
    Fault(
        "a causal mask is taken for one without a limit on the right",
        "flash_dmattn/validation.py",
        "right = 0 if mask.is_causal else mask.window_size[1]",
        "right = mask.window_size[1]",
        ("tests/test_mask_forms.py::test_the_same_limits_in_other_words",),
    ),
)
