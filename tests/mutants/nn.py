"""Faults of the layers: scores and the keys they keep, rotary positions, padding, the cache."""

from __future__ import annotations

from .fault import Fault

LAYER = "flash_dmattn/nn/dynamic_mask_attention.py"
CACHE = "flash_dmattn/nn/kv_cache.py"
ROTARY = "flash_dmattn/nn/rotary.py"
FORMULA = ("tests/test_nn.py::test_output_and_every_gradient_equal_the_formula",)
DECODING = ("tests/test_nn.py::test_decoding_from_the_cache_equals_the_full_forward",)
PADDING = ("tests/test_nn.py::test_padding_changes_nothing_for_the_real_tokens",)
ARGUMENTS = ("tests/test_nn.py::test_the_arguments_that_it_tells_of_give_its_output",)
CACHED = ("tests/test_nn.py::test_the_cache_returns_what_was_appended_and_keeps_it_when_it_grows",)

FAULTS: tuple[Fault, ...] = (
    Fault(
        "pairs are expanded over the rows that share them",
        "flash_dmattn/nn/pair_bias_attention.py",
        'bias = rearrange(self.pair_proj(self.pair_norm(pair)), "... i j h -> ... h i j").contiguous()',
        'bias = rearrange(self.pair_proj(self.pair_norm(pair)), "... i j h -> ... h i j")\n'
        "        bias = bias.expand(*x.shape[:-2], *bias.shape[-3:]).contiguous()",
        ("tests/test_nn_biases.py::test_pairs_that_rows_share_are_not_expanded",),
    ),
    Fault(
        "scores are cut to a step and not rounded to it",
        LAYER,
        "(scores / SCORE_STEP).round()",
        "(scores / SCORE_STEP).floor()",
        ("tests/test_nn.py::test_scores_are_ranked_by_the_nearest_step",),
    ),
    Fault(
        "the local window is a key longer than asked for",
        LAYER,
        "key > query - self.local_window_size",
        "key >= query - self.local_window_size",
        ARGUMENTS,
    ),
    Fault(
        "the local window shows padding",
        LAYER,
        "local if padding is None else local & padding",
        "local",
        ARGUMENTS,
    ),
    Fault(
        "padding competes for the kept keys",
        LAYER,
        "is_causal=True, mask=padding, seqlen_q=seqlen_q",
        "is_causal=True, seqlen_q=seqlen_q",
        ARGUMENTS,
    ),
    Fault(
        "every piece of a text starts at position 0",
        LAYER,
        "past = 0 if cache is None else cache.length",
        "past = 0",
        DECODING,
    ),
    Fault(
        "scores are computed in the dtype of the projection",
        LAYER,
        "work_dtype = torch.promote_types(wanted.dtype, torch.float32)",
        "work_dtype = wanted.dtype",
        ("tests/test_nn.py::test_autocast_keeps_the_score_in_fp32_and_the_backend_is_passed_on",),
    ),
    Fault(
        "the scale that the caller gave is not used",
        LAYER,
        'return call | {"softmax_scale": self.softmax_scale, "backend"',
        'return call | {"backend"',
        FORMULA,
    ),
    Fault(
        "an emptied cache keeps its storage",
        CACHE,
        "held if self.length else None, x, end)",
        "held, x, end)",
        ("tests/test_nn.py::test_a_cache_emptied_by_truncate_takes_another_batch_and_dtype",),
    ),
    Fault(
        "a cache that grows forgets its last token",
        CACHE,
        "grown[:, : self.length] = held[:, : self.length]",
        "grown[:, : self.length - 1] = held[:, : self.length - 1]",
        CACHED,
    ),
    Fault(
        "a cache is full a token early",
        CACHE,
        "held.shape[1] >= end:",
        "held.shape[1] >= end - 1:",
        CACHED,
    ),
    Fault(
        "rotary angles fall half as fast",
        ROTARY,
        "theta ** (-2 * channel / head_dim)",
        "theta ** (-channel / head_dim)",
        FORMULA,
    ),
    Fault(
        "the second channel of a pair turns the other way",
        ROTARY,
        "first * sin + second * cos), dim=-1).to(",
        "second * cos - first * sin), dim=-1).to(",
        FORMULA,
    ),
    Fault(
        "a key after the query takes the buckets of those before it",
        "flash_dmattn/nn/position_bias.py",
        "(distance > 0).long() * number",
        "(distance < 0).long() * number",
        ("tests/test_nn_biases.py::test_buckets",),
    ),
    Fault(
        "the first query stands at the first key, whatever the lengths",
        "flash_dmattn/nn/position_bias.py",
        "torch.arange(1 - seqlen_k, seqlen_q,",
        "torch.arange(1 - seqlen_q, seqlen_k,",
        ("tests/test_nn_biases.py::test_relative_position_bias",),
    ),
    Fault(
        "offsets in a window from the key to the query",
        "flash_dmattn/nn/position_bias.py",
        "(x[:, None] - x[None, :] for x in",
        "(x[None, :] - x[:, None] for x in",
        ("tests/test_nn_biases.py::test_window_position_bias",),
    ),
    Fault(
        "a pair bias of the key and the query",
        "flash_dmattn/nn/pair_bias_attention.py",
        '"... i j h -> ... h i j").contiguous()',
        '"... i j h -> ... h j i").contiguous()',
        ("tests/test_nn_biases.py::test_pair_bias_attention",),
    ),
)
