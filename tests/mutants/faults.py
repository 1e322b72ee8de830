"""Faults written by hand: defects that were found here, or that no change of a syntax tree would make.

Quoted texts are as short as they can be and still stand once in their file, so that few edits move them.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One fault: `before` stands exactly once in `file`, and `after` takes its place.

    `tests` are arguments of pytest, files or node ids. Each draws its data from a fixed seed and would see the fault
    with any other seed, too.
    """

    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


_PLANS = "tests/test_call_cache.py::"
_INTERPRETED = "tests/test_triton_interpreter.py::"
_LINES = f"{_INTERPRETED}test_lines_that_random_calls_may_miss"
_TANGENTS = "tests/test_tangents.py::test_random_calls_on_triton["
_FORWARD_MODE = f"{_INTERPRETED}test_calls_written_by_hand[forward mode]"
_WORKERS = "tests/test_distributed_workers.py::"
_RARE = "tests/test_cuda_rare.py::"
_DISTANCES = "tests/test_cuda_relative.py::"
_WHOLE = "tests/test_cuda_backward.py::test_whole_tiles_of_keys_of_wide_heads[any order-(300, 330)-{}-q-cuda]"
_SDPA = "tests/test_sdpa_backend.py::"
_PIECES = f"{_INTERPRETED}test_fp32_on_pieces_keeps_its_accuracy[{{}}]"
_SEQUENCES = "tests/test_cuda_sequences.py::"

_DEFAULTS = "tests/test_citizen.py::test_no_call_looks_at_the_default_device_or_dtype_of_torch"
_KEPT = "tests/test_autograd.py::test_what_is_kept_outlives_a_transform"
_UNDER_TRANSFORMS = "tests/test_settings.py::test_decisions_and_settings_under_transforms"
_SPOILT = "tests/test_edges.py::test_what_is_no_number_reaches_all_that_see_it"

_LISTS = "tests/test_lists.py::"
_STATISTICS = "tests/test_statistics.py::"
_LIST_TILES = "tests/test_list_tiles.py::"
_LIST_CALLS = "tests/test_triton_lists.py::test_random_calls[0]"
_LIST_EDGES = "tests/test_triton_lists.py::test_edges[{}]"

_PYTHON = (
    # Forward mode
    Fault(
        "the gradients of dual tensors lose their tangents",
        "flash_dmattn/autograd.py",
        "if is_jvp_innermost() and not is_recorded:",
        "if is_jvp_innermost():",
        ("tests/test_derived.py::test_forward_mode_is_that_of_the_reference[gradients of dual tensors-numbers]",),
    ),
    Fault(
        "a loss of the tangent of lse alone takes the plain backward pass",
        "flash_dmattn/autograd.py",
        "if cotangents[2] is None and cotangents[3] is None:",
        "if cotangents[2] is None:",
        ("tests/test_tangents.py::test_gradients_of_tangents_in_chunks",),
    ),
    Fault(
        "triton: rows of the tangent of v lie as those of v",
        "triton_kernels/tangents.py",
        "tv = rows_from(tv, tv_strides, at.first_k, SEQUENCES)",
        "tv = rows_from(tv, v_strides, at.first_k, SEQUENCES)",
        (f"{_TANGENTS}1000]",),
    ),
    Fault(
        "triton: a new mean of the tangents does not move the sum so far",
        "triton_kernels/tangents.py",
        "acc_t += acc_o * lift[:, None]",
        "acc_t += 0.0",
        (f"{_TANGENTS}0]",),
    ),
    Fault(
        "triton: the descriptors of tangents stand in the places of the inputs",
        "triton_kernels/plan_tangents.py",
        "d._replace(slot=d.slot + _FIRST_TANGENT)",
        "d",
        (_FORWARD_MODE,),
    ),
    # The second of two features
    Fault(
        "keys follow an order beside dropout",
        "flash_dmattn/backends/mask_choice.py",
        "return problem.dropout_p == 0 and not reads_scores(problem)",
        "return not reads_scores(problem)",
        (f"{_INTERPRETED}test_interval_masks",),
    ),
    Fault(
        "gradients of keys that ranks read of each other are summed in 16 bits",
        "flash_dmattn/distributed/exchange.py",
        "rows, dtype = length_of(moves.own), sum_dtype(tensors[0].dtype)",
        "rows, dtype = length_of(moves.own), tensors[0].dtype",
        ("tests/test_distributed_slices.py::test_gradients_of_all_ranks_are_added_in_fp32[True]",),
    ),
    Fault(
        "gradients of all keys are summed in 16 bits",
        "flash_dmattn/distributed/exchange.py",
        "total = first.to(sum_dtype(first.dtype), copy=True)",
        "total = first.clone()",
        ("tests/test_distributed_slices.py::test_gradients_of_all_ranks_are_added_in_fp32[False]",),
    ),
    Fault(
        "of more ranks than key-value heads every other one has a head",
        "flash_dmattn/distributed/slices.py",
        "first = self.place // (self.number // heads)",
        "first = self.place % heads",
        ("tests/test_distributed_slices.py::test_ranks_of_a_head_stand_side_by_side",),
    ),
    Fault(
        "pages that alone need a gradient are taken as constants",
        "flash_dmattn/integrations/flash_attn.py",
        "needing = [x for x in (q, k, v) if isinstance(x, Tensor) and x.requires_grad]",
        "needing = [x for x in (q,) if isinstance(x, Tensor) and x.requires_grad]",
        ("tests/test_flash_attn.py::test_a_call_with_pages_has_a_forward_pass_alone",),
    ),
    Fault(
        "nested results lose their lengths",
        "flash_dmattn/sequences/padding.py",
        "nested_tensor_from_jagged(values, like.offsets(), like.lengths())",
        "nested_tensor_from_jagged(values, like.offsets())",
        ("tests/test_sequences.py::test_nested_tensors_are_packed_sequences",),
    ),
    Fault(
        "blocks of queries read a bias that other entries share",
        "reference/query_blocks.py",
        "and entries <= {1, batch}",
        "and mask.start.shape[0] in (1, batch)",
        ("tests/test_eager_skips.py::test_blocks_of_few_keys_read_the_bias_of_their_entry",),
    ),
    # Lists of keys
    Fault(
        "the last of equal entries counts",
        "flash_dmattn/masks/prepared/lists.py",
        "again[..., 1:] = key[..., 1:] == key[..., :-1]",
        "again[..., :-1] = key[..., 1:] == key[..., :-1]",
        (f"{_LISTS}test_of_equal_entries_the_first_counts_and_others_have_no_gradient",),
    ),
    Fault(
        "the gradient of scores at lists reaches the key of the entry before",
        "flash_dmattn/masks/prepared/lists.py",
        "place = index[:, :, rows].long()\n            place = torch.where(place < 0, number, place)",
        "place = index[:, :, rows].long().roll(1, 3)\n            place = torch.where(place < 0, number, place)",
        (f"{_LISTS}test_a_bias_beside_chosen_values",),
    ),
    Fault(
        "triton reads the entry of another call from values that a part of the batch shares",
        "flash_dmattn/backends/triton/lists.py",
        "f.mask_repeat, f.bias_repeat",
        "f.mask_repeat, f.mask_repeat",
        (f"{_LISTS}test_triton_serves_calls_with_lists",),
    ),
    Fault(
        "triton: lists beside sequences name keys of all tokens",
        "flash_dmattn/backends/triton/lists.py",
        "keys = keys + first",
        "pass",
        (f"{_LISTS}test_triton_serves_calls_with_lists",),
    ),
    Fault(
        "triton: pages of lists lie side by side",
        "flash_dmattn/backends/triton/lists.py",
        "keys = page * pitch + keys % size",
        "keys = page * size + keys % size",
        (f"{_LISTS}test_triton_serves_calls_with_lists",),
    ),
    Fault(
        "triton: lists give rows of no sequence a sink",
        "flash_dmattn/backends/triton/lists.py",
        "return out, lse.masked_fill_(~is_used, -torch.inf)",
        "return out, lse",
        (f"{_LISTS}test_triton_serves_calls_with_lists",),
    ),
    Fault(
        "causality of lists beside sequences aligns the first query with the first key",
        "flash_dmattn/masks/prepared/lists.py",
        "diagonal, (left, right) = place + seqlen_k - seqlen_q, window",
        "diagonal, (left, right) = place, window",
        (f"{_LISTS}test_a_mask_of_lists_beside_sequences_is_the_mask_that_it_stands_for",),
    ),
    Fault(
        "a listed tile that the band cuts is full",
        "flash_dmattn/masks/prepared/lists.py",
        "torch.where(listed, classes, 0)",
        "torch.where(listed, 2 * (classes > 0), 0)",
        (f"{_LIST_TILES}test_walks_of_the_listed_tiles_see_what_the_lists_say",),
    ),
    Fault(
        "triton: an entry behind the count is key 0",
        "triton_kernels/list_forward.py",
        "end = tl.load(counts + number) * KEYS_EACH",
        "end = lists.most * KEYS_EACH",
        (_LIST_CALLS,),
    ),
    Fault(
        "triton: places of rows forget the words before",
        "triton_kernels/list_ops.py",
        " + tl.load(before + at, mask=key_ok, other=0)",
        "",
        (_LIST_EDGES.format("shares"),),
    ),
    Fault(
        "triton: ds of places without a key is what memory held",
        "triton_kernels/list_pairs.py",
        "(place < pitch)[None, :]",
        "key_ok[None, :]",
        (_LIST_EDGES.format("wide heads"),),
    ),
    Fault(
        "triton: p of hidden pairs is not 0 in inverse lists",
        "triton_kernels/list_keys.py",
        "p = tl.where(allowed, exp_of_rows(s, lse_rows, low_rows, 0, BIASED, IS_WIDE), 0.0)",
        "p = exp_of_rows(s, lse_rows, low_rows, 0, BIASED, IS_WIDE)",
        (_LIST_CALLS,),
    ),
    # Sums of probabilities
    Fault(
        "sums take the plan of a call of attention, which has no gradient",
        "flash_dmattn/call.py",
        "key = (needs_grad, *key)",
        "pass",
        (f"{_STATISTICS}test_a_call_of_attention_leaves_no_plan_for_sums",),
    ),
    Fault(
        "heads of another group share a column",
        "flash_dmattn/statistics.py",
        "own.repeat(num_heads // columns, 1)",
        "own.repeat_interleave(num_heads // columns, 0)",
        (f"{_STATISTICS}test_key_sums_of_random_calls[q]",),
    ),
    Fault(
        "sums of many rows overflow float16",
        "flash_dmattn/statistics.py",
        "math.ceil(math.log2(added)) - _LOG2_OF_MOST_ROWS",
        "0",
        (f"{_STATISTICS}test_sums_of_many_rows_in_float16",),
    ),
    Fault(
        "the weight of a row without keys counts",
        "flash_dmattn/statistics.py",
        "weights.detach().to(dtype).masked_fill(lse == -torch.inf, 0.0)",
        "weights.detach().to(dtype)",
        (f"{_STATISTICS}test_rows_without_keys_count_nothing",),
    ),
    Fault(
        "sums over pages lie by head before sequence",
        "flash_dmattn/statistics.py",
        "sums.view(shape[0], sequences.number, sequences.max_seqlen_k).transpose(0, 1)",
        "sums.view(sequences.number, shape[0], sequences.max_seqlen_k)",
        (f"{_STATISTICS}test_key_sums_of_sequences_in_every_layout",),
    ),
    Fault(
        "keys in pages are read past the longest sequence",
        "flash_dmattn/statistics.py",
        "[:, : sequences.max_seqlen_k]",
        "",
        (f"{_STATISTICS}test_key_sums_of_sequences_in_every_layout",),
    ),
    Fault(
        "a list sums the heads of all groups in turn",
        "flash_dmattn/statistics.py",
        "sums.unflatten(1, (heads, -1)).sum(2)",
        "sums.unflatten(1, (-1, heads)).sum(1)",
        (f"{_STATISTICS}test_list_sums_of_random_calls",),
    ),
    Fault(
        "values of key-value heads go to query heads in turn",
        "flash_dmattn/statistics.py",
        "values.repeat_interleave(most // values.shape[-3], -3)",
        "values.tile(most // values.shape[-3], 1, 1)",
        (f"{_STATISTICS}test_heads_share_values_by_groups",),
    ),
    Fault(
        "lists count every query alike",
        "flash_dmattn/statistics.py",
        "_rows_of(call, weights))",
        "torch.ones_like(_rows_of(call, weights)))",
        (f"{_STATISTICS}test_list_sums_of_random_calls",),
    ),
    Fault(
        "a list without a teacher has a loss",
        "flash_dmattn/statistics.py",
        " * is_taught.squeeze(-1)",
        "",
        (f"{_STATISTICS}test_selector_loss_is_the_divergence",),
    ),
    Fault(
        "an entry without a key is 0 * -inf in the loss",
        "flash_dmattn/statistics.py",
        "a.masked_fill(tau == 0, 0.0)",
        "a",
        (f"{_STATISTICS}test_selector_loss_is_the_divergence",),
    ),
    # Biases by distance
    Fault(
        "the gradient of the last value lacks what lies beyond it",
        "reference/distances.py",
        " + F.pad(high, (n - 1, 0))",
        "",
        ("tests/test_relative.py::test_dense_is_the_matrix_of_the_values",),
    ),
    Fault(
        "triton reads a bias by distance mirrored",
        "triton_kernels/bias_forms.py",
        "tl.reshape(steps + (BLOCK_M - 1), ",
        "tl.reshape((BLOCK_N - 1) - steps, ",
        (f"{_INTERPRETED}test_calls_written_by_hand[relative]",),
    ),
    Fault(
        "the gradient of a bias by distance reads the values of another head",
        "triton_kernels/backward_diagonals.py",
        "owner.to(tl.int64) * bias_strides.head",
        "owner_b.to(tl.int64) * bias_strides.head",
        (f"{_INTERPRETED}test_calls_written_by_hand[relative]",),
    ),
    Fault(
        "T5's values of distances do not count the keys of a cache",
        "flash_dmattn/integrations/transformers/models.py",
        " - self.seen, ",
        ", ",
        ("tests/test_transformers_tables.py::test_generation_is_that_of_eager",),
    ),
    # Defaults of torch
    Fault(
        "sdpa: what is added to scores follows the default device",
        "flash_dmattn/backends/sdpa/cpu.py",
        '(torch.tensor(x, dtype=added_dtype(p), device="cpu") for',
        "(torch.tensor(x, dtype=added_dtype(p)) for",
        (f"{_DEFAULTS}[mask on auto]",),
    ),
    Fault(
        "sdpa: diagonals of a band follow the default device",
        "flash_dmattn/backends/sdpa/cpu.py",
        'torch.arange(p.seqlen_k, device="cpu") -',
        "torch.arange(p.seqlen_k) -",
        (f"{_DEFAULTS}[window on auto]",),
    ),
    Fault(
        "places of blocks of queries follow the default device",
        "reference/query_blocks.py",
        "torch.arange(total, device=q.device)",
        "torch.arange(total)",
        (f"{_DEFAULTS}[many intervals]",),
    ),
    Fault(
        "keys of a static cache follow the default device",
        "flash_dmattn/integrations/transformers/mask_function.py",
        'torch.arange(keys, device="cpu")',
        "torch.arange(keys)",
        (f"{_DEFAULTS}[transformers]",),
    ),
    Fault(
        "slopes of ALiBi follow the default dtype",
        "flash_dmattn/nn/positions.py",
        "torch.tensor(slopes, dtype=torch.float32, device=device)",
        "torch.tensor(slopes, device=device)",
        (f"{_DEFAULTS}[alibi_slopes]",),
    ),
    # Caches that a transform fills
    Fault(
        "a layout that is kept belongs to the transform that made it",
        "flash_dmattn/sequences/layout.py",
        "with outside_of_transforms():\n            states",
        "if True:\n            states",
        (f"{_KEPT}[packed-jvp]",),
    ),
    Fault(
        "layouts of tensors of a transform are kept",
        "flash_dmattn/sequences/layout.py",
        "if is_of_transform(*tensors):",
        "if False:",
        ("tests/test_autograd.py::test_sequences_of_a_transform_that_has_ended",),
    ),
    Fault(
        "places of lists belong to the transform that made them",
        "flash_dmattn/masks/prepared/storage.py",
        "with outside_of_transforms():\n            return self._moved()",
        "if True:\n            return self._moved()",
        (f"{_KEPT}[places of lists-jvp]",),
    ),
    Fault(
        "flex: lists of sequences belong to the transform that made them",
        "flash_dmattn/backends/flex/sequences.py",
        "with outside_of_transforms():",
        "if True:",
        (f"{_KEPT}[lists of flex-jvp]",),
    ),
    Fault(
        "transformers: arguments that layers share belong to the transform that made them",
        "flash_dmattn/integrations/transformers/mask_function.py",
        "if is_transformed():  # tensors that are made",
        "if False:  # tensors that are made",
        (f"{_KEPT}[documents-jvp]",),
    ),
    Fault(
        "transformers: keys of a static cache belong to the transform that made them",
        "flash_dmattn/integrations/transformers/mask_function.py",
        "None if is_transformed() else made",
        "made",
        (f"{_KEPT}[a static cache-jvp]",),
    ),
    Fault(
        "values made of tensors are kept inside of a transform",
        "flash_dmattn/remembered.py",
        "if is_transformed() or not all(",
        "if not all(",
        (f"{_KEPT}[copies-jvp]",),
    ),
    Fault(
        "changes that NumPy makes of lengths are not seen",
        "flash_dmattn/problem/checks.py",
        "return storage.resizable() and not storage.is_shared()",
        "return not storage.is_shared()",
        ("tests/test_sequences.py::test_each_table_alone_is_followed",),
    ),
    # Promises
    Fault(
        "sdpa: results are views, which nobody may write to",
        "flash_dmattn/backends/sdpa/cpu.py",
        "out.transpose_(1, 2).contiguous(), lse.contiguous()",
        "out.transpose(1, 2), lse.view_as(lse)",
        ("tests/test_autograd.py::test_results_may_be_written_to",),
    ),
    Fault(
        "forward mode runs on eager where it is switched off",
        "flash_dmattn/dispatch/selection.py",
        "if backend.name in disabled() or getattr",
        "if getattr",
        (_UNDER_TRANSFORMS,),
    ),
    Fault(
        "a record has the call that is written, not the one that a transform makes of it",
        "flash_dmattn/autograd.py",
        "if not is_transformed():\n            record(plan)",
        "if True:\n            record(plan)",
        (_UNDER_TRANSFORMS,),
    ),
    Fault(
        "a mesh of two dims is one group",
        "flash_dmattn/distributed/group.py",
        "group.ndim == 2:",
        "group.ndim == 3:",
        ("tests/test_distributed_call.py::test_a_mesh_is_a_group",),
    ),
    Fault(
        "warn-only determinism refuses",
        "flash_dmattn/validation.py",
        "return torch.is_deterministic_algorithms_warn_only_enabled()",
        "return False",
        ("tests/test_flex.py::test_warn_only_determinism_warns_where_a_named_backend_has_no_order",),
    ),
    Fault(
        "T5's values of an odd number of buckets lose one",
        "flash_dmattn/biases.py",
        "if is_bidirectional and weight.shape[0] % 2:",
        "if False:",
        ("tests/test_relative.py",),
    ),
    Fault(
        "ints of NumPy are no sizes",
        "flash_dmattn/problem/checks.py",
        "isinstance(x, (int, torch.SymInt, Integral)) and",
        "isinstance(x, (int, torch.SymInt)) and",
        ("tests/test_validation.py::test_ints_of_numpy_are_sizes",),
    ),
    Fault(
        "auto refuses a second derivative where the first ran on sdpa",
        "flash_dmattn/dispatch/selection.py",
        '    if requested != "auto":',
        "    if True:",
        ("tests/test_autograd.py::test_auto_takes_the_second_derivative_of_eager",),
    ),
    Fault(
        "a profile is written where FLASH_DMATTN_PROFILE=off",
        "flash_dmattn/tools/calibrate.py",
        'if process.profile == "off":\n        stream.write',
        "if False:\n        stream.write",
        ("tests/test_calibrate.py",),
    ),
    Fault(
        "values at lists and a bias are added in 16 bits",
        "flash_dmattn/biases.py",
        "torch.promote_types(torch.promote_types(values.dtype, bias.dtype), torch.float32)",
        "torch.promote_types(values.dtype, bias.dtype)",
        (f"{_LISTS}test_a_bias_and_chosen_values_of_16_bits_are_added_in_fp32",),
    ),
    Fault(
        "topk_mask reads a batch as queries",
        "flash_dmattn/masks/topk.py",
        "x.dim() < 4 and x.shape[-2] != seqlen_k",
        "x.dim() < 2",
        ("tests/test_mask_topk.py::test_errors",),
    ),
    # Great and spoilt numbers
    Fault(
        "sdpa: a bias of NaN hides its keys",
        "flash_dmattn/backends/sdpa/cpu.py",
        "seen = mask != -torch.inf",
        "seen = mask > -torch.inf",
        (f"{_SPOILT}[sdpa-bias B-Hq-Lq-Lk, full-nan]", f"{_SPOILT}[sdpa-bias without a gradient-nan]"),
    ),
    Fault(
        "sdpa: rows of NaN stay as torch's kernel writes them",
        "flash_dmattn/backends/sdpa/cpu.py",
        "is_lost = (lse == 0) | is_inexact",
        "is_lost = lse == 0",
        ("tests/test_edges.py",),
    ),
    Fault(
        "sdpa: p of a row with a great bias is made of its rounded lse",
        "flash_dmattn/backends/sdpa/cpu.py",
        "if largest > LARGE_LSE:",
        "if False:",
        (f"{_SDPA}test_gradients_beside_great_and_spoiled_numbers",),
    ),
    Fault(
        "sdpa: out of a row with a great bias has the kernel's rounding",
        "flash_dmattn/backends/sdpa/cpu.py",
        "mask is not None and x.bias is not None and is_great.any()",
        "False",
        (f"{_SDPA}test_gradients_beside_great_and_spoiled_numbers",),
    ),
    # Keys of plans
    Fault(
        "a cached plan ignores the strides of its tensors",
        "flash_dmattn/call.py",
        "x.shape, x.stride(), ",
        "x.shape, ",
        (f"{_PLANS}test_each_input_alone_changes_the_key",),
    ),
    Fault(
        "a cached plan runs on a backend that was disabled since",
        "flash_dmattn/call.py",
        "            active_blocks.disabled,\n",
        "",
        (f"{_PLANS}test_settings_outside_of_the_call_are_noticed",),
    ),
    # The call and its gradients
    Fault(
        "the gradient of an expanded bias is summed in 16 bits",
        "flash_dmattn/problem/leading.py",
        "        x = x.float()",
        "        pass",
        ("tests/test_leading_dims.py::test_the_gradient_of_a_shared_bias_is_rounded_once",),
    ),
    Fault(
        "a profile that the user's group may write is read",
        "flash_dmattn/dispatch/profiles.py",
        "(stat.S_IWGRP | stat.S_IWOTH)",
        "stat.S_IWOTH",
        ("tests/test_profile.py::test_a_profile_counts_if_nobody_else_may_write_it",),
    ),
    # Torch's kernels
    Fault(
        "sdpa: packed sequences of one query each are told to be so",
        "flash_dmattn/backends/sdpa/cuda.py",
        "(max(p.seqlen_q, 2), p.seqlen_k)",
        "(p.seqlen_q, p.seqlen_k)",
        (f"{_SDPA}test_packed_sequences_around_the_operators_of_gpus[one query each-False]",),
    ),
    Fault(
        "causality of torch's kernel on a CPU counts from the first key in any call",
        "flash_dmattn/backends/sdpa/cpu.py",
        "(left, right) == (-1, 0) and p.seqlen_q == p.seqlen_k and",
        "(left, right) == (-1, 0) and",
        (f"{_SDPA}test_gradients_without_lse[more keys, causal]",),
    ),
    Fault(
        "a hidden key with NaN shows in torch's kernel on a CPU",
        "flash_dmattn/backends/sdpa/cpu.py",
        "if not _size(lse, torch.inf) < torch.inf:",
        "if False:",
        (f"{_SDPA}test_nan_in_hidden_keys_stays_hidden",),
    ),
    Fault(
        "FlashAttention-2 returns an lse of +inf for rows without keys",
        "flash_dmattn/backends/sdpa/cuda.py",
        "if has_empty_rows:",
        "if False:",
        (f"{_SDPA}test_what_is_around_the_operators_of_gpus[more queries, causal]",),
    ),
    # Formula and eager
    Fault(
        "a NaN in a masked key leaks, since -inf is added to it",
        "reference/tiles.py",
        " and not s.sum().isnan()",
        "",
        ("tests/test_edges.py::test_a_key_that_is_not_allowed_may_hold_anything",),
    ),
    Fault(
        "the dlse of an empty row has an effect",
        "reference/eager.py",
        "dlse.to(lse.dtype).masked_fill(empty, 0.0)",
        "dlse.to(lse.dtype)",
        ("tests/test_edges.py::test_the_lse_of_an_empty_row_takes_no_gradient[eager-bias0]",),
    ),
    Fault(
        "every sequence drops what the first one does",
        "reference/sequences.py",
        "dropout.starting_at(s.number)",
        "dropout.starting_at(0)",
        ("tests/test_sequences.py::test_random_calls_beside_one_dense_call",),
    ),
    # Masks
    Fault(
        "rows of an odd stride are read as words",
        "flash_dmattn/masks/prepared/packing.py",
        " or any(stride % 8 for stride in padded.stride()[:-1])",
        "",
        ("tests/test_prepared_mask.py::test_rows_that_start_between_words",),
    ),
    Fault(
        "top-k orders the two zeros",
        "flash_dmattn/masks/topk.py",
        "(wide + 0.0)",
        "wide",
        ("tests/test_mask_topk.py::test_any_call_equals_brute_force",),
    ),
    Fault(
        "gradients of keys without a place are not written",
        "flash_dmattn/backends/cuda/passes.py",
        "by_key.zero_().scatter_(",
        "by_key.scatter_(",
        ("tests/test_cuda_host.py::test_an_order_of_few_places",),
    ),
    Fault(
        "cu_seqlens that fall are used as they are",
        "flash_dmattn/sequences/layout.py",
        ".cummax(0).values",
        "",
        ("tests/test_sequences.py::test_bounds_never_leave_the_tensors",),
    ),
    # Layers and other libraries
    Fault(
        "padding competes for the kept keys",
        "flash_dmattn/nn/dynamic_mask_attention.py",
        "            mask=padding,\n",
        "",
        ("tests/test_nn.py::test_padding_changes_nothing_for_the_real_tokens",),
    ),
    Fault(
        "a prompt in a static cache is aligned at the end of the cache",
        "examples/dynamic_mask_model.py",
        "k[:, : self._used], v[:, : self._used]",
        "k, v",
        ("tests/test_transformers_dynamic_mask.py::test_generate",),
    ),
    Fault(
        "SDPA's causality of other lengths, aligned top-left, is served bottom-right",
        "flash_dmattn/integrations/sdpa.py",
        "is_causal and query.shape[-2] != key.shape[-2]",
        "False",
        ("tests/test_sdpa.py::test_what_is_passed_on",),
    ),
    # Ranks
    Fault(
        "the gradient of a bias is not written left of its slice",
        "flash_dmattn/distributed/operators.py",
        "    rows[..., : part.start] = 0\n",
        "",
        ("tests/test_distributed_slices.py::test_gradients_of_pairs_that_no_slice_has_are_zero",),
    ),
    Fault(
        "the distances of a slice are those of a call of its own",
        "flash_dmattn/distributed/operators.py",
        "zero = flags.zero + part.shift if",
        "zero = flags.zero if",
        (f"{_WORKERS}test_a_call_over_processes_equals_one_call[band-2]",),
    ),
    Fault(
        "entries of lists count from the first of all keys in a slice",
        "flash_dmattn/distributed/slices.py",
        "torch.where(seen, own - first, -1)",
        "torch.where(seen, own, -1)",
        ("tests/test_distributed_slices.py::test_lists_of_ranks_are_those_of_the_whole_call[blocks0-2]",),
    ),
    Fault(
        "only the rank that has a refusal raises, and the others wait",
        "flash_dmattn/distributed/group.py",
        "if one.kind]",
        "if one.kind and one.rank == rank]",
        (f"{_WORKERS}test_a_mistake_of_one_rank_raises_on_all[shape of mask-2]",),
    ),
    Fault(
        "the gradient of a bias that DTensors share is that of one rank",
        "flash_dmattn/distributed/dtensor.py",
        "Partial() if shared else at for",
        "at for",
        ("tests/test_distributed_dtensor.py::test_values_gradients_and_placements[batch, shared bias]",),
    ),
)

_TRITON = (
    Fault(
        "triton: a launch that failed is tried again through Triton",
        "triton_kernels/kernel_launch.py",
        "if status == INVALID_CONTEXT:",
        "if status != 0:",
        ("tests/test_triton_launch.py::test_an_error_of_the_driver_is_the_error_of_the_launch",),
    ),
    Fault(
        "triton: sm_100 has the small tiles of lists",
        "triton_kernels/list_tiles.py",
        "dtype == torch.float32 or arch not in LIKE_HOPPER",
        'dtype == torch.float32 or arch != "sm_90"',
        ("tests/test_triton_gpus.py::test_lists_have_the_tiles_of_hopper_on_gpus_like_it",),
    ),
    Fault(
        "triton: a row that reads a bias of NaN is empty in the backward pass",
        "triton_kernels/tile_ops.py",
        '(values < float("inf")) | (lse != lse)',
        'values < float("inf")',
        (f"{_INTERPRETED}test_calls_written_by_hand[odd]",),
    ),
    Fault(
        "triton: p of a great row is above 1",
        "triton_kernels/scores.py",
        "tl.minimum(exponent * LOG2E, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        "exponent * LOG2E",
        (f"{_INTERPRETED}test_calls_written_by_hand[great]",),
    ),
    Fault(
        "triton: a great lse loses the log of its sum",
        "triton_kernels/tile_ops.py",
        "small.to(tl.float64) * unit_of(great).to(tl.float64)",
        "small.to(tl.float64)",
        (f"{_INTERPRETED}test_calls_written_by_hand[great]",),
    ),
    Fault(
        "triton: shares of the keys leave out far blocks beside a bias by distance",
        "triton_kernels/forward.py",
        "near if phase == INSIDE else inside",
        "2 * near if phase == INSIDE else inside",
        (f"{_LINES}[parts]",),
    ),
    Fault(
        "triton: the gradient of a bias that sequences share reads the tiles of the first one",
        "triton_kernels/backward_bias.py",
        "(at.row_q // TILE).to(tl.int32) + b.to(tl.int32)",
        "(at.row_q // TILE).to(tl.int32) + slot",
        ("tests/test_triton_sequences.py::test_in_the_interpreter[made]",),
    ),
    Fault(
        "a block of keys is read from one page where pages are longer but no multiple of it",
        "triton_kernels/sequences.py",
        "PAGE % BLOCK == 0",
        "PAGE >= BLOCK",
        ("tests/test_triton_sequences.py::test_in_the_interpreter[made]",),
    ),
    Fault(
        "dq reads key-value head h % Hk, not h // G",
        "triton_kernels/backward_queries.py",
        "h_k = h // shape.group",
        "h_k = h % (shape.num_heads // shape.group)",
        (f"{_LINES}[scores]",),
    ),
    Fault(
        "the lse of an empty row stays -inf in the backward pass",
        "triton_kernels/backward_delta.py",
        'tl.where(empty, float("inf"), natural)',
        "natural",
        (f"{_LINES}[masks]",),
    ),
    Fault(
        "offsets of keys are 32 bits wide where a mask is packed",
        "triton_kernels/mask_pack.py",
        "(keys.to(tl.int64) * stride_k)",
        "(keys * stride_k)",
        ("tests/test_mask_pack_interpreter.py::test_interpreted[beyond_int32]",),
    ),
    Fault(
        "short sequences take one pass where Triton gets sums over its 16 queries wrong",
        "triton_kernels/plan_sequences.py",
        "not self.has_tiles and is_right",
        "not self.has_tiles",
        ("tests/test_triton_sequences.py::test_sums_of_short_sequences_are_as_long_as_the_row_of_a_fragment",),
    ),
    Fault(
        "TF32 products sum over 16 queries beside a bool mask and dropout",
        "triton_kernels/plan.py",
        "tile = tile._replace(block_m=LEAST_LONG_RUNS,",
        "tile._replace(block_m=LEAST_LONG_RUNS,",
        ("tests/test_triton_gpus.py::test_tf32_is_taken_where_its_tiles_fit",),
    ),
    # fp32
    Fault(
        "pieces of bfloat16: the second piece of the weights is dropped",
        "triton_kernels/pieces.py",
        "_chain(w[0], w[1], y[0]",
        "_chain(w[0], w[1] * 0.0, y[0]",
        (_PIECES.format("bf16x3 made"),),
    ),
    Fault(
        "pieces of float16: one size for all rows of a tile",
        "triton_kernels/pieces.py",
        "_size_and_factor(tl.maximum(bits - _ONE, 0))",
        "_size_and_factor(tl.maximum(tl.zeros_like(bits) + tl.max(bits, 0) - _ONE, 0))",
        (_PIECES.format("fp16x3 made"),),
    ),
    Fault(
        "pieces of float16: the second piece of the weights is dropped",
        "triton_kernels/pieces.py",
        "_chain(a, b, y[0]",
        "_chain(a, b * 0.0, y[0]",
        (_PIECES.format("fp16x3 made"),),
    ),
    Fault(
        "pieces of float16: sizes of rows are multiplied first",
        "triton_kernels/pieces.py",
        "s * (y[2] * _UNDO)[None, :] * x[2][:, None]",
        "s * ((y[2] * _UNDO)[None, :] * x[2][:, None])",
        (_PIECES.format("fp16x3 made"),),
    ),
    Fault(
        "pieces are stored for no kernel",
        "triton_kernels/plan_backward.py",
        "if call.packed and reads_rows else None",
        "if call.packed else None",
        ("tests/test_triton_gpus.py::test_pieces_are_stored_for_kernels_that_read_them",),
    ),
    Fault(
        "fp32: forward mode has the word of kernels that make pieces",
        "triton_kernels/plan_tangents.py",
        "whole_precision(x.q.dtype, call.arch, call.allows_tf32)",
        "call.precision",
        ("tests/test_triton_gpus.py::test_forward_mode_makes_no_pieces", _FORWARD_MODE),
    ),
    Fault(
        "sdpa: gaps between sequences take no blocks of a grid",
        "flash_dmattn/backends/sdpa/backend.py",
        "2 * p.sequences.number - 1",
        "p.sequences.number",
        ("tests/test_sdpa_backend.py::test_a_fault_or_a_lack_is_a_rule",),
    ),
    Fault(
        "fp32: kernels do not know that torch allows TF32",
        "triton_kernels/plan.py",
        "self.allows_tf32 = flags.allows_tf32",
        "self.allows_tf32 = False",
        ("tests/test_triton_plan.py::test_tf32_is_taken_where_torch_allows_it",),
    ),
    Fault(
        "fp32: calls under another setting of torch share a plan",
        "flash_dmattn/call.py",
        "            allows_tf32(q.dtype),\n",
        "",
        ("tests/test_fp32.py::test_both_passes_multiply_as_torch_says_at_the_call",),
    ),
    Fault(
        "fp32: triton goes before torch's kernel where it multiplies on CUDA cores",
        "flash_dmattn/dispatch/selection.py",
        "    elif leads_in_fp32(problem):",
        "    elif False:",
        (f"{_SDPA}test_auto_takes_the_faster_kernel_in_fp32",),
    ),
)

# These run on the emulated GPU.
_CSRC = (
    Fault(
        "heads of a group see as many keys as queries of their rows would",
        "csrc/sm90/forward/consumer.h",
        "(work.first_row + row_of_warp + 8 * r) >> p.group_shift",
        "work.first_row + row_of_warp + 8 * r",
        ("tests/test_cuda_decoding.py::test_several_queries[a tile-cuda]",),
    ),
    Fault(
        "the second row of a thread is of the next query, also where heads of a query fill a warp",
        "csrc/sm90/forward/consumer.h",
        "shift > 3 ? 8 * head_step : (8 >> shift) * row_step",
        "(8 >> shift) * row_step",
        ("tests/test_cuda_decoding.py::test_several_queries[more heads than rows of a consumer-cuda]",),
    ),
    Fault(
        "a mask for another number of queries is accepted",
        "csrc/api/call.h",
        "{entries, heads, sizes.seqlen_q, tiles_k * kTileWords}",
        "{entries, heads, allowed.size(2), tiles_k * kTileWords}",
        ("tests/test_cuda_arguments.py::test_each_tensor_changed_alone_is_refused[forward tiles-cuda]",),
    ),
    Fault(
        "a tile of queries sees the first key that only the rows before it see",
        "csrc/sm90/mask/key_mask.cu",
        "const int some_from = first_row + p.low,",
        "const int some_from = first_row + p.low - 1,",
        ("tests/test_cuda_pack.py::test_masks_of_keys[shape2-1000-0.5]",),
    ),
    Fault(
        "what padding forbids is decided before the capture of a graph",
        "flash_dmattn/integrations/transformers/mask_function.py",
        "torch.compiler.is_compiling() or is_captured(attention_mask)",
        "torch.compiler.is_compiling()",
        ("tests/test_transformers_masks.py::test_a_captured_graph_keeps_padding_that_forbids_nothing_now",),
    ),
    Fault(
        "every bias of cross attention counts as T5's zeros",
        "flash_dmattn/integrations/transformers/attention_function.py",
        ' and is_called_without(module, "position_bias")',
        "",
        ("tests/test_transformers_refusals.py::test_a_bias_that_cross_attention_receives_is_read",),
    ),
    Fault(
        "a number of a launch loses its upper bits",
        "triton_kernels/kernel_launch.py",
        '"i4x" if kind == "i32" else "q"',
        '"q"',
        ("tests/test_triton_launch.py::test_no_number_of_a_launch_loses_its_upper_bits[cuda]",),
    ),
    Fault(
        "a call uses the counters that it gets, also if they are too few",
        "csrc/api/forward.cpp",
        "call.counters.has_value() && call.counters->numel() >= count",
        "call.counters.has_value()",
        ("tests/test_cuda_arguments.py::test_counters_of_a_call[cuda]",),
    ),
    Fault(
        "every box of a block is read from its first page",
        "csrc/sm90/sequences/sequence.h",
        "min(column, p.table_columns - 1)",
        "min(first_column, p.table_columns - 1)",
        ("tests/test_cuda_sequences.py::test_every_size_of_a_page[16-cuda]",),
    ),
    Fault(
        "TMA reads beyond the end of a sequence",
        "csrc/sm90/sequences/sequence.h",
        "{kRaggedRows - number + row, kRaggedRows, first + number}",
        "{kRaggedRows - number + row - kTile, kRaggedRows, first + number + kTile}",
        (f"{_SEQUENCES}test_every_bias[none-cuda]",),
    ),
    Fault(
        "a gap after those that the warps begin with is left",
        "csrc/sm90/sequences/prepare.cu",
        "at += warps) {",
        "at += warps + 1) {",
        (f"{_SEQUENCES}test_rows_of_no_sequence_are_written[many-cuda]",),
    ),
    Fault(
        "gradients of packed keys are summed where those of the first sequence are",
        "csrc/sm90/sequences/sequence.h",
        "static_cast<int64_t>(work.head) * of.rows_k + work.sequence.first_k;",
        "static_cast<int64_t>(work.head) * of.rows_k;",
        (f"{_SEQUENCES}test_every_bias[packed keys-cuda]",),
    ),
    Fault(
        "dbias beyond the band is not cleared",
        "csrc/sm90/backward/clear_dbias.cu",
        "clear(to, kept_to, chunks);",
        "clear(to, kept_to, min(kept_to, chunks));",
        ("tests/test_cuda_backward.py::test_dbias_beyond_a_band[64-{'is_causal': True}-cuda]",),
    ),
    Fault(
        "each KV split adds the sink",
        "csrc/sm90/forward/consumer.h",
        "share, exp2_approx((sink - top[r]) * kLog2e)",
        "share, p.num_splits * exp2_approx((sink - top[r]) * kLog2e)",
        (f"{_RARE}test_a_sink[no bias-3-cuda]",),
    ),
    Fault(
        "a negative threshold is compared by its bits, which no negative score exceeds",
        "csrc/sm90/forward/consumer.h",
        "if (!kComparesNegative || !has_negative) {",
        "if (true) {",
        (f"{_RARE}test_keys_far_above_a_maximum_that_is_negative[cuda]",),
    ),
    Fault(
        "keys beyond the last one are attended",
        "csrc/sm90/forward/consumer.h",
        "const int to = min(row + of.high, of.seqlen_k - 1) -",
        "const int to = row + of.high -",
        (f"{_RARE}test_every_gradient[no bias-cuda]",),
    ),
    Fault(
        "a bias by distance counts from the first query and the first key",
        "csrc/api/call.h",
        "-kMaxInt, kMaxInt) - (sizes.seqlen_k - sizes.seqlen_q);",
        "-kMaxInt, kMaxInt);",
        (f"{_DISTANCES}test_lengths[193-257-64-cuda]",),
    ),
    Fault(
        "a tile's window of values by distance begins one place off",
        "csrc/sm90/bias_window.h",
        "of.origin + first_key - (first_query + kRows - 1);",
        "of.origin + first_key - (first_query + kRows - 1) + 1;",
        (f"{_DISTANCES}test_lengths[193-257-64-cuda]",),
    ),
    Fault(
        "the second copy of a window of values is like the first",
        "csrc/sm90/bias_window.h",
        "to[kSecondCopy + i - 1] = value",
        "to[kSecondCopy + i] = value",
        (f"{_DISTANCES}test_lengths[193-257-64-cuda]",),
    ),
    Fault(
        "a tile whose last distance alone has another value is taken for one of one value",
        "csrc/sm90/bias_window.h",
        "first + kValues - 1 <= of.lowest",
        "first + kValues - 2 <= of.lowest",
        (f"{_DISTANCES}test_one_score_has_another_value[cuda]",),
    ),
    Fault(
        "a row whose maximum grows loses the one value of a tile",
        "csrc/sm90/forward/consumer.h",
        "if constexpr (Traits::kHasBiasWindow) add_flat(scores, flat);",
        "flat = {};",
        (f"{_DISTANCES}test_lengths[193-257-64-cuda]",),
    ),
    Fault(
        "a stage of v is waited for in the wrong phase",
        "csrc/sm90/forward/producer.h",
        "barrier_wait(&shared.v_empty[pipe_v.stage], pipe_v.phase ^ 1);\n        tma_load_panels",
        "barrier_wait(&shared.v_empty[pipe_v.stage], pipe_v.phase);\n        tma_load_panels",
        (f"{_RARE}test_every_gradient[no bias-cuda]",),
    ),
    Fault(
        "dk aligns causal queries top-left",
        "csrc/sm90/backward/tile_scheduler.h",
        "max(first_key - of.high, 0);",
        "max(first_key - (of.high < of.seqlen_k ? 0 : of.high), 0);",
        (f"{_RARE}test_causal_queries_of_another_number_than_keys[(140, 328)-cuda]",),
    ),
    Fault(
        "a tile of bias is read before it has arrived",
        "csrc/sm90/backward/consumer.h",
        "barrier_wait(&shared.bias_full[pipe.stage], pipe.phase);\n    this->read_sixteen(bias, 0, tile);",
        "this->read_sixteen(bias, 0, tile);",
        (f"{_RARE}test_what_is_copied_is_waited_for[cuda]",),
    ),
    Fault(
        "tiles before and behind the values of distances have one sum",
        "csrc/sm90/backward/consumer.h",
        "(diagonal < p.first_diagonal ? totals.x : totals.y)",
        "totals.x",
        (f"{_DISTANCES}test_tiles_beyond_the_values_add_to_their_end",),
    ),
    Fault(
        "keys beyond the last add to their distance",
        "csrc/sm90/shared_dbias/tile_scheduler.h",
        "is_full && first_key + kTile <= of.seqlen_k;",
        "is_full;",
        (f"{_DISTANCES}test_gradients",),
    ),
    Fault(
        "sums along a diagonal are of the distance before",
        "csrc/sm90/shared_dbias/consumer.h",
        "float* const to = own + 7 - lane / 4",
        "float* const to = own + 8 - lane / 4",
        (f"{_DISTANCES}test_gradients",),
    ),
    Fault(
        "the values of a diagonal stay those of the work tile before",
        "csrc/sm90/shared_dbias/consumer.h",
        "if (item.is_first) consumer.load_window(item.work);",
        "if (item.is_first && item.work.chunk == 0) consumer.load_window(item.work);",
        (f"{_DISTANCES}test_blocks_share_a_diagonal",),
    ),
    Fault(
        "a diagonal has the sums of its first blocks alone",
        "csrc/sm90/shared_dbias/add_diagonals.cu",
        "chunk < p.chunks",
        "chunk < 1",
        (f"{_DISTANCES}test_blocks_share_a_diagonal",),
    ),
    Fault(
        "the first value has its own distance twice",
        "csrc/sm90/shared_dbias/add_diagonals.cu",
        "place < 0 :",
        "place <= 0 :",
        (f"{_DISTANCES}test_gradients",),
    ),
    Fault(
        "flat tiles of other heads are lost",
        "csrc/sm90/shared_dbias/add_diagonals.cu",
        "count = p.heads_per_dbias * p.sums_of_head;",
        "count = p.sums_of_head;",
        (f"{_DISTANCES}test_tiles_beyond_the_values_add_to_their_end",),
    ),
    Fault(
        "in a fixed order blocks of dead keys are visited",
        "csrc/sm90/backward/producer.h",
        "if (p.key_order != nullptr && item.walk.steps == 0)",
        "if (p.walk_tiles > 0 && item.walk.steps == 0)",
        (f"{_RARE}test_heads_end_where_their_live_keys_do[(100, 300)-True-cuda]",),
    ),
    Fault(
        "heads of a group add to dk and dv out of turn",
        "csrc/sm90/backward/consumer.h",
        "if (p.dkv_semaphore != nullptr) named_barrier_sync(kMayAddBarrier + group, 128 + 32);",
        "",
        (f"{_RARE}test_heads_of_a_group_are_summed_in_their_order[cuda]",),
    ),
    Fault(
        "both consumers add the first half of dq's third panel",
        "csrc/sm90/backward/consumer.h",
        "const int first = group * (kRestColumns / 8);",
        "const int first = 0;",
        (_WHOLE,),
    ),
    Fault(
        "the next scores are waited for, and the rest of dq is not",
        "csrc/sm90/backward/consumer.h",
        "wgmma_wait<kHasNext ? 1 : 0>();\n    wgmma_fence_operand(rest);",
        "wgmma_fence_operand(rest);",
        (_WHOLE,),
    ),
    Fault(
        "the thread that finds work tiles waits where nobody wants the next one",
        "csrc/sm90/backward/producer.h",
        "!item.is_last || p.tile_counter == nullptr) return;",
        "!item.is_last) return;",
        (_WHOLE,),
    ),
    Fault(
        "an empty row keeps its lse and its dlse",
        "csrc/sm90/backward/rows.cu",
        "if (natural.high != -INFINITY) {",
        "if (true) {",
        (f"{_RARE}test_the_lse_of_an_empty_row_takes_no_gradient[cuda]",),
    ),
    Fault(
        "delta of sequences of few keys has keys left of the window",
        "csrc/sm90/sequences/few_keys.cu",
        "key < row + sequence.low || ",
        "",
        (f"{_SEQUENCES}test_padded_entries",),
    ),
    Fault(
        "pages of v are taken to lie as those of k",
        "csrc/api/sequences.h",
        'rows_of_page(v, "v")',
        "params.page_rows_k",
        (f"{_SEQUENCES}test_pools_lie_anyhow",),
    ),
    Fault(
        "great maxima are scaled before they are subtracted",
        "csrc/sm90/forward/consumer.h",
        "constexpr float kGreatShift = 1",
        "constexpr float kGreatShift = 1e30f + 1",
        (f"{_RARE}test_great_scores_are_subtracted_before_they_are_scaled",),
    ),
)

FAULTS = _PYTHON + _TRITON + _CSRC
