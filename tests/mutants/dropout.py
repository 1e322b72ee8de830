"""Faults of dropout: what is kept, its passes in eager and in the Triton kernels, and what carries its key."""

from __future__ import annotations

from .fault import Fault

REFERENCE, EAGER, FORMULA = "reference/dropout.py", "reference/eager.py", "reference/formula.py"
KERNELS, KEYS = "triton_kernels/dropout.py", "triton_kernels/backward_keys.py"
_TESTS = "tests/test_dropout.py::test_"
KNOWN, PLACES = (f"{_TESTS}known_answers_of_philox",), (f"{_TESTS}what_is_kept_follows_from_the_place_of_each",)
THRESHOLD = (f"{_TESTS}threshold_and_scale",)
VALUES = (f"{_TESTS}dropout_beside_everything_else",)
CHUNKS = (f"{_TESTS}chunks_have_no_say",)
SEQUENCES = (f"{_TESTS}sequences_with_dropout", f"{_TESTS}layouts_of_sequences_drop_the_same")
BITS = ("tests/test_triton_interpreter.py::test_dropout_bit_for_bit",)
LINES = ("tests/test_triton_interpreter.py::test_lines_that_random_calls_may_miss[dropout-9]",)
SHORT = tuple(f"tests/test_triton_interpreter.py::test_short_rows[{seed}]" for seed in range(2))

FAULTS: tuple[Fault, ...] = (
    Fault("six rounds of Philox", REFERENCE, "ROUNDS = 7", "ROUNDS = 6", KNOWN),
    Fault("the key does not change from round to round", REFERENCE, "(key_b + _WEYL[1])", "key_b", KNOWN),
    Fault(
        "the upper word of a product lacks what its multiplier was short of",
        REFERENCE,
        "(product >> 32) + word",
        "product >> 32",
        KNOWN,
    ),
    Fault(
        "what equals the threshold is dropped", REFERENCE, "[word >= threshold for", "[word > threshold for", THRESHOLD
    ),
    Fault(
        "the words of two queries and two keys are taken for each other",
        REFERENCE,
        "halves.permute(2, 3, 4, 0, 5, 6, 1, 7)",
        "halves.permute(2, 3, 4, 1, 5, 6, 0, 7)",
        PLACES,
    ),
    Fault(
        "entries are numbered from 0 in every part",
        REFERENCE,
        "counter(self.first_entry + batch.start, self.first_entry + batch.stop, 0)",
        "counter(self.first_entry, self.first_entry + batch.stop - batch.start, 0)",
        PLACES,
    ),
    Fault(
        "p = 1 divides by 0", REFERENCE, "0.0 if p == 1.0 else 1.0 / (1.0 - p)", "1.0 / max(1.0 - p, 1e-300)", VALUES
    ),
    Fault(
        "eager: a chunk has the heads of the first",
        EAGER,
        "slice(block.heads.start * chunks.group, block.heads.stop * chunks.group)",
        "slice(0, (block.heads.stop - block.heads.start) * chunks.group)",
        CHUNKS,
    ),
    Fault("eager: out is not scaled", EAGER, "acc_o.mul_(dropout.scale)", "acc_o", VALUES),
    Fault(
        "eager: dv takes what was dropped",
        EAGER,
        "multiply(weights.mT, dout_block,",
        "multiply(p.mT, dout_block,",
        VALUES,
    ),
    Fault("eager: ds takes dp of what was dropped", EAGER, "ds.mul_(kept)", "ds.mul_(1.0)", VALUES),
    Fault(
        "the oracle: the sum of a row is that of what is kept",
        FORMULA,
        'weights = p if dropout is None else dropout.apply(p)\n    out = torch.einsum("bhgij,bjhd->bihgd", weights.to(',
        "weights = p if dropout is None else dropout.apply(p)\n    lse = lse + weights.sum(-1).clamp(min=1e-9).log()\n"
        '    out = torch.einsum("bhgij,bjhd->bihgd", weights.to(',
        VALUES,
    ),
    Fault(
        "every sequence is the first entry",
        "reference/sequences.py",
        "dropout.of_entry(s.number)",
        "dropout.of_entry(0)",
        SEQUENCES,
    ),
    Fault(
        "mapped calls are folded into one batch",
        "flash_dmattn/autograd.py",
        "return plan.parts.has_dropout or plan.parts.num_sequence_tensors > 0",
        "return plan.parts.num_sequence_tensors > 0",
        (
            f"{_TESTS}a_map_drops_as_its_randomness_says",
            f"{_TESTS}a_mapped_backward_pass_drops_what_the_forward_pass_did",
        ),
    ),
    Fault(
        "a call without dropout draws a key",
        "flash_dmattn/call.py",
        "draw_key(call.q.device) if problem.flags.dropout_p > 0 else None",
        "draw_key(call.q.device) if problem.flags.dropout_p >= 0 else None",
        (f"{_TESTS}no_dropout_draws_nothing",),
    ),
    Fault(
        "triton: the halves of a tile by key are in another order",
        KERNELS,
        "tl.permute(blocks, (0, 4, 1, 2, 5, 3))",
        "tl.permute(blocks, (0, 5, 1, 2, 4, 3))",
        BITS,
    ),
    Fault(
        "triton: a set of keys counts by place",
        KERNELS,
        "rows, keys = (rows >> 4) * 8 + (rows & 7), (keys >> 4) * 8 + (keys & 7)",
        "rows, keys = (rows >> 4) * 8 + (rows & 7), (keys >> 4) * 8 + (tl.arange(0, BLOCK_N) & 7)",
        BITS,
    ),
    Fault(
        "triton: dv is not scaled",
        KEYS,
        "acc_dv = acc_dv * tl.cast(dropout.scale, tl.float32)",
        "acc_dv = acc_dv * 1.0",
        LINES,
    ),
    Fault(
        "triton: dk and a stored dbias take dp of what was dropped",
        KEYS,
        "dp = tl.where(kept, dp * tl.cast(dropout.scale, tl.float32), 0.0)",
        "dp = dp * tl.cast(dropout.scale, tl.float32)",
        LINES,
    ),
    Fault(
        "triton: dq with dp that is not scaled",
        "triton_kernels/backward_queries.py",
        "dp = tl.where(kept, dp * tl.cast(dropout.scale, tl.float32), 0.0)",
        "dp = tl.where(kept, dp, 0.0)",
        LINES,
    ),
    Fault(
        "triton: a shared dbias drops what the first head of its owner does",
        "triton_kernels/backward_bias.py",
        "is_kept(dropout_key, dropout, b, h, first,",
        "is_kept(dropout_key, dropout, b, owner * members, first,",
        LINES,
    ),
    Fault(
        "triton: lse is that of what is kept",
        "triton_kernels/forward.py",
        "row_sum = row_sum * rescale + tl.sum(p, 1)\n            if DROPOUT:",
        "row_sum = row_sum * rescale + tl.sum(p, 1) * (0.9 if DROPOUT else 1.0)\n            if DROPOUT:",
        LINES,
    ),
    Fault(
        "triton: the heads of a group are queries of one",
        "triton_kernels/launch.py",
        "if flags.left >= 0 or flags.dropout_p > 0:",
        "if flags.left >= 0:",
        LINES,
    ),
    Fault(
        "keys follow the order of a mask",
        "flash_dmattn/backends/mask_choice.py",
        "problem.dropout_p == 0 and not reads_scores(problem)",
        "not reads_scores(problem)",
        BITS,
    ),
    Fault(
        "triton: short rows store dv of what was dropped",
        "triton_kernels/short_backward.py",
        "weights = tl.where(kept, p * tl.cast(dropout.scale, tl.float32), 0.0)",
        "weights = p * tl.cast(dropout.scale, tl.float32)",
        BITS,
    ),
    Fault(
        "triton: short rows scale out before it is dropped, and not after",
        "triton_kernels/short_forward.py",
        "p = tl.where(kept, p * tl.cast(dropout.scale, tl.float32), 0.0)",
        "p = tl.where(kept, p, 0.0)",
        SHORT,
    ),
)
