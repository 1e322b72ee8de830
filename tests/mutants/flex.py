"""Faults of calls with sequences on the flex backend: rows, limits, tile lists, and what goes there and back."""

from __future__ import annotations

from .fault import Fault

TILES, BLOCKS, CALL = (f"flash_dmattn/backends/flex/{name}.py" for name in ("tiles", "sequence_blocks", "sequences"))
_CALLS, _TILES = "tests/test_flex_sequences.py::test_", "tests/test_flex_tiles.py::test_"
RANDOM = tuple(f"{_CALLS}random_calls_with_nan_in_all_rows_of_no_sequence[{part}]" for part in range(3))
UNREAD = (f"{_CALLS}nothing_is_read_where_there_is_no_pair",)
EMPTY = (f"{_CALLS}calls_without_a_pair",)
LAYOUTS = tuple(f"{_TILES}layouts_of_random_sequences[{seed}]" for seed in range(12))
LISTS = (f"{_TILES}tile_lists_and_limits_against_brute_force",)
WILD = (f"{_TILES}wild_tables_leave_no_tensor",)
FORMS = (f"{_CALLS}every_form_of_a_bias_and_of_a_mask",)
COMPILED = (f"{_CALLS}compiled_nothing_of_one_sequence_reaches_another",)

FAULTS: tuple[Fault, ...] = (
    Fault(
        "sequences follow each other without tiles of their own",
        TILES,
        "    number = (lengths + (BLOCK - 1)) // BLOCK\n",
        "    number = lengths // BLOCK\n",
        LAYOUTS,
    ),
    Fault(
        "a sequence has one tile more than whole ones at most",
        TILES,
        "tokens // BLOCK + number)",
        "tokens // BLOCK + 1)",
        LAYOUTS,
    ),
    Fault("tokens beyond a sequence are in it", TILES, "(place < length)", "(place < BLOCK)", LAYOUTS),
    Fault(
        "gradients of rows of no sequence arrive",
        TILES,
        "_rows(gradient, ctx.dim, back, 0.0)",
        "_rows(gradient, ctx.dim, back, 1.0)",
        RANDOM,
    ),
    Fault(
        "rows without a token are those of the first",
        TILES,
        "return write(x.index_select(dim, which.clamp(min=0)), is_none, fill)",
        "return x.index_select(dim, which.clamp(min=0))",
        UNREAD,
    ),
    Fault(
        "places of rows without a token leave a bias", TILES, "(place % length.clamp(1, extent.most))", "place", WILD
    ),
    Fault(
        "rows without a token read what is beside their sequence",
        TILES,
        "(place % length.clamp(1, extent.most))",
        "(place % extent.most)",
        LAYOUTS,
    ),
    Fault(
        "tokens of rows without one leave a bias",
        BLOCKS,
        "(first[queries.sequence] + queries.place).clamp(max=len(queries.row) - 1)",
        "first[queries.sequence] + queries.place",
        WILD,
    ),
    Fault(
        "sequences share the entry of the first",
        TILES,
        "sequence = side.sequence if b > 1 else",
        "sequence = side.sequence if b > 9 else",
        FORMS,
    ),
    Fault(
        "causality is aligned to the first keys",
        BLOCKS,
        "middle = queries.place + (seqlen_k - seqlen_q)[own]",
        "middle = queries.place",
        RANDOM,
    ),
    Fault(
        "a window reaches into the sequence before",
        BLOCKS,
        "(middle - left).clamp(min=0)",
        "middle - left",
        LISTS,
    ),
    Fault("keys behind a sequence are seen", BLOCKS, "torch.minimum(last, middle + right)", "middle + right", LISTS),
    Fault(
        "tiles at the edge of a sequence count as whole",
        BLOCKS,
        "    every = some & whole\n",
        "    every = some\n",
        LISTS,
    ),
    Fault(
        "lists of tiles align causality to the first keys",
        BLOCKS,
        "offset = seqlen_k - seqlen_q\n",
        "offset = seqlen_k - seqlen_k\n",
        LISTS,
    ),
    Fault("columns of keys list all queries", BLOCKS, " & (local < tiles_q.number[own])", "", LISTS),
    Fault(
        "tiles of all sequences begin with the first",
        BLOCKS,
        "indices = (indices + first[:, None])",
        "indices = (indices + 0 * first[:, None])",
        COMPILED,
    ),
    Fault(
        "tiles that a mask of packed rows allows in part count as whole",
        BLOCKS,
        "count[..., :width] == BLOCK * BLOCK",
        "count[..., :width] > 0",
        LISTS,
    ),
    Fault(
        "a mask by position is that of the first sequence",
        BLOCKS,
        "entry = tiles_q.own if x.shape[0] > 1",
        "entry = tiles_q.own if x.shape[0] > 9",
        LISTS,
    ),
    Fault(
        "layers with other windows share lists",
        BLOCKS,
        "    found = kept.get((extents, window))\n",
        "    found = next(iter(kept.values()), None)\n",
        (f"{_TILES}layers_share_what_a_batch_needs_once",),
    ),
    Fault("rows of no sequence have the sink", CALL, "queries.token, -torch.inf)", "queries.token, 0.0)", EMPTY),
    Fault("a call without keys has no row for them", CALL, "if spec.rows_k == 0:", "if spec.rows_k < 0:", EMPTY),
)
