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
_WORKERS = "tests/test_distributed_workers.py::"
_RARE = "tests/test_cuda_rare.py::"
_SDPA = "tests/test_sdpa_backend.py::"
_SEQUENCES = "tests/test_cuda_sequences.py::"

_LISTS = "tests/test_lists.py::"

_PYTHON = (
    # Forward mode
    Fault(
        "a new mean of the tangents does not move the sum so far",
        "reference/tangents.py",
        ".addcmul_(acc_o, mean - new_mean)",
        "",
        ("tests/test_tangents.py::test_random_calls_in_chunks[0]",),
    ),
    Fault(
        "the gradients of tangents count the mean once",
        "reference/tangents.py",
        "inner - 2 * means * dots",
        "inner - means * dots",
        ("tests/test_tangents.py::test_gradients_of_tangents_in_chunks",),
    ),
    Fault(
        "the slope of the softcap bends the other way",
        "reference/tangents.py",
        "mul_(-2.0 / call.softcap)",
        "mul_(2.0 / call.softcap)",
        ("tests/test_tangents.py::test_gradients_of_tangents_in_chunks",),
    ),
    Fault(
        "the gradients of dual tensors lose their tangents",
        "flash_dmattn/autograd.py",
        "if is_jvp_innermost() and not is_recorded:",
        "if is_jvp_innermost():",
        ("tests/test_derived.py::test_forward_mode_is_that_of_the_reference[numbers-gradients of dual tensors]",),
    ),
    Fault(
        "keys follow the order of a mask that k and v do not follow",
        "flash_dmattn/backends/triton/passes.py",
        "in_order=False",
        "in_order=True",
        (f"{_TANGENTS}0]",),
    ),
    Fault(
        "triton: a new mean of the tangents does not move the sum so far",
        "triton_kernels/tangents.py",
        "acc_t += acc_o * ((mean - new_mean) * LN2)[:, None]",
        "acc_t += 0.0",
        (f"{_TANGENTS}0]",),
    ),
    Fault(
        "triton: the tangent of a sink has the share of the keys",
        "triton_kernels/tangents.py",
        "(1.0 - share) * tl.load(tsink",
        "share * tl.load(tsink",
        (f"{_TANGENTS}0]",),
    ),
    Fault(
        "triton: the tangent of a bias is read by the strides of the bias",
        "triton_kernels/plan_tangents.py",
        "tbias_strides=own.bias_strides(tbias_tma)",
        "tbias_strides=call.bias_strides(bias_tma)",
        (f"{_TANGENTS}0]",),
    ),
    Fault(
        "triton: tangents of scores miss the slope of the softcap",
        "triton_kernels/tangents.py",
        "ts *= slope",
        "ts *= 1.0",
        (f"{_TANGENTS}0]",),
    ),
    # Lists of keys
    Fault(
        "keys that the band hides stay in lists",
        "flash_dmattn/masks/prepared/lists.py",
        "low, high = (first + band.low).clamp(min=0), (last + band.high).clamp(max=seqlen_k - 1)",
        "pass",
        (f"{_LISTS}test_topk_lists_are_the_top_k_mask",),
    ),
    Fault(
        "the last of equal entries counts",
        "flash_dmattn/masks/prepared/lists.py",
        "again[..., 1:] = key[..., 1:] == key[..., :-1]",
        "again[..., :-1] = key[..., 1:] == key[..., :-1]",
        (f"{_LISTS}test_of_equal_entries_the_first_counts_and_others_have_no_gradient",),
    ),
    Fault(
        "equal entries count twice",
        "flash_dmattn/masks/prepared/lists.py",
        "left = ~again & (key < blocks)",
        "left = key < blocks",
        (f"{_LISTS}test_a_mask_of_lists_is_the_mask_that_it_stands_for",),
    ),
    Fault(
        "an entry of -1 is block 0",
        "flash_dmattn/masks/prepared/lists.py",
        "part = index[:, :, rows].long()",
        "part = index[:, :, rows].long().clamp(min=0)",
        (f"{_LISTS}test_lists_of_nothing",),
    ),
    Fault(
        "values lie where keys lie after the sort",
        "reference/lists.py",
        "values = slots if slots.shape[-1] else torch.arange",
        "values = torch.arange",
        (f"{_LISTS}test_of_equal_entries_the_first_counts_and_others_have_no_gradient",),
    ),
    Fault(
        "the last block of a run has no slot",
        "reference/lists.py",
        "(place >= 0) & (place < number)",
        "(place >= 0) & (place < number - 1)",
        (f"{_LISTS}test_lists_are_the_mask_and_the_bias_that_they_stand_for",),
    ),
    Fault(
        "a run begins with the first key of its block",
        "reference/lists.py",
        "return x.narrow(dim, start % block, stop - start)",
        "return x.narrow(dim, 0, stop - start)",
        (f"{_LISTS}test_chunks_that_begin_within_a_block",),
    ),
    Fault(
        "the gradient of a block is that of its first key",
        "reference/tiles.py",
        ".unflatten(4, (-1, step)).sum(5)",
        ".unflatten(4, (-1, step))[..., 0]",
        (f"{_LISTS}test_lists_are_the_mask_and_the_bias_that_they_stand_for",),
    ),
    Fault(
        "keys that no query lists are read where few are missing",
        "reference/masks.py",
        "    reads_only_seen = True\n",
        "    reads_only_seen = False\n",
        (f"{_LISTS}test_a_key_that_nobody_lists_reaches_nothing",),
    ),
    Fault(
        "a cached plan ignores whether values are of lists",
        "flash_dmattn/call.py",
        "            call.is_chosen,\n",
        "",
        (f"{_LISTS}test_calls_of_other_lists_do_not_share_a_plan",),
    ),
    Fault(
        "of the last local blocks one is missing",
        "flash_dmattn/masks/prepared/lists.py",
        "(columns > high - local)",
        "(columns > high - local + 1)",
        (f"{_LISTS}test_topk_lists_are_the_top_k_mask",),
    ),
    Fault(
        "the gradient of scores at lists reaches the key of the entry before",
        "flash_dmattn/masks/prepared/lists.py",
        "place = index[:, :, rows].long()\n            place = torch.where(place < 0, number, place)",
        "place = index[:, :, rows].long().roll(1, 3)\n            place = torch.where(place < 0, number, place)",
        (f"{_LISTS}test_a_bias_beside_chosen_values",),
    ),
    Fault(
        "triton takes slots for places",
        "flash_dmattn/backends/triton/lists.py",
        "slots if slots.shape[3] else None",
        "None",
        (f"{_LISTS}test_triton_serves_calls_with_lists",),
    ),
    Fault(
        "triton reads the entry of another call from values that a part of the batch shares",
        "flash_dmattn/backends/triton/lists.py",
        "f.mask_repeat, f.bias_repeat",
        "f.mask_repeat, f.mask_repeat",
        (f"{_LISTS}test_triton_serves_calls_with_lists",),
    ),
    # Biases by distance
    Fault(
        "distance 0 of a chunk lies one place off",
        "reference/distances.py",
        "zero = self.zero + key - row - ",
        "zero = self.zero + key - row + 1 - ",
        ("tests/test_relative.py::test_masks_that_eager_reads_in_place_gather_keys",),
    ),
    Fault(
        "distances are counted from the first key and the first query",
        "reference/distances.py",
        " - (lengths[1] - lengths[0]) + ",
        " + ",
        ("tests/test_relative.py::test_masks_that_eager_reads_in_place_gather_keys",),
    ),
    Fault(
        "the gradient of the last value lacks what lies beyond it",
        "reference/distances.py",
        " + F.pad(high, (n - 1, 0))",
        "",
        ("tests/test_relative.py::test_dense_is_the_matrix_of_the_values",),
    ),
    Fault(
        "a cached plan ignores where distance 0 lies",
        "flash_dmattn/call.py",
        "            call.by_distance,\n",
        "",
        ("tests/test_relative.py::test_calls_of_other_numbers_do_not_share_a_plan",),
    ),
    Fault(
        "triton takes a tile that reaches the second value for one of the first value alone",
        "triton_kernels/scores.py",
        "low += 1",
        "low += 2",
        (f"{_INTERPRETED}test_calls_written_by_hand[relative-48]",),
    ),
    Fault(
        "triton reads a bias by distance mirrored",
        "triton_kernels/scores.py",
        "tl.reshape(steps + (BLOCK_M - 1), ",
        "tl.reshape((BLOCK_N - 1) - steps, ",
        (f"{_INTERPRETED}test_calls_written_by_hand[relative-48]",),
    ),
    Fault(
        "triton reads a tile's values of a bias by distance one place off",
        "triton_kernels/scores.py",
        "corner - (BLOCK_M - 1) + ",
        "corner - BLOCK_M + ",
        (f"{_INTERPRETED}test_calls_written_by_hand[relative-48]",),
    ),
    Fault(
        "dk takes the first value of a bias by distance for the last",
        "triton_kernels/backward_keys.py",
        "beyond_values, before_values)",
        "before_values, beyond_values)",
        (f"{_INTERPRETED}test_calls_written_by_hand[relative-48]",),
    ),
    Fault(
        "the gradient of a bias by distance reads the values of another head",
        "triton_kernels/backward_diagonals.py",
        "owner.to(tl.int64) * bias_strides.head",
        "owner_b.to(tl.int64) * bias_strides.head",
        (f"{_INTERPRETED}test_calls_written_by_hand[relative-48]",),
    ),
    Fault(
        "triton leaves out the last distance of a band of values",
        "triton_kernels/scores.py",
        "(places < distances.number)",
        "(places < distances.number - 1)",
        (f"{_INTERPRETED}test_calls_written_by_hand[relative-48]",),
    ),
    Fault(
        "triton sums no score at the last value or beyond",
        "triton_kernels/backward_keys.py",
        "tl.num_programs(0).to(tl.int64) * BLOCK_N, acc_last)",
        "tl.num_programs(0).to(tl.int64) * BLOCK_N, acc_bias * 0.0)",
        (f"{_INTERPRETED}test_calls_written_by_hand[relative-48]",),
    ),
    Fault(
        "the driver gets numbers where a kernel has tensors",
        "triton_kernels/driver_call.py",
        'pointers if kind[0] == "*" else others',
        'others if kind[0] == "*" else pointers',
        ("tests/test_triton_launch.py::test_the_driver_gets_a_stream_addresses_and_numbers",),
    ),
    Fault(
        "a launch that the driver refuses is lost",
        "triton_kernels/kernel_launch.py",
        "if status != 0:",
        "if status < 0:",
        ("tests/test_triton_launch.py::test_triton_launches_what_the_driver_refuses",),
    ),
    Fault(
        "the halves of a diagonal of tiles are added one tile off",
        "triton_kernels/plan_backward.py",
        "F.pad(halves[0], (0, block)) + F.pad(halves[1], (block, 0))",
        "F.pad(halves[0], (block, 0)) + F.pad(halves[1], (0, block))",
        (f"{_INTERPRETED}test_calls_written_by_hand[relative-48]",),
    ),
    Fault(
        "a program of a diagonal skips the last tile of its share",
        "triton_kernels/backward_diagonals.py",
        "steps * (part + 1) // parts",
        "steps * (part + 1) // parts - 1",
        (f"{_INTERPRETED}test_calls_written_by_hand[relative-48]",),
    ),
    Fault(
        "flex counts distances from the second query",
        "flash_dmattn/backends/flex/call.py",
        "problem.seqlen_q - 1, dtype=torch.int32",
        "problem.seqlen_q - 2, dtype=torch.int32",
        ("tests/test_relative.py::test_flex_reads_a_value_for_each_distance",),
    ),
    Fault(
        "T5's values of distances do not count the keys of a cache",
        "flash_dmattn/integrations/transformers/tables.py",
        " - self.seen, ",
        ", ",
        ("tests/test_transformers_tables.py::test_generation_is_that_of_eager",),
    ),
    # Keys of plans
    Fault(
        "a cached plan ignores the device of its tensors",
        "flash_dmattn/call.py",
        "x.dtype, x.device, ",
        "x.dtype, ",
        (f"{_PLANS}test_each_input_alone_changes_the_key",),
    ),
    Fault(
        "a cached plan ignores the strides of its tensors",
        "flash_dmattn/call.py",
        "x.shape, x.stride(), ",
        "x.shape, ",
        (f"{_PLANS}test_a_changed_argument_makes_another_class",),
    ),
    Fault(
        "a cached plan ignores whether gradients are recorded",
        "flash_dmattn/call.py",
        "            torch.is_grad_enabled(),\n",
        "",
        (f"{_PLANS}test_grad_mode_makes_another_class",),
    ),
    Fault(
        "a cached plan runs on a backend that was disabled since",
        "flash_dmattn/call.py",
        "            around.disabled,\n",
        "",
        (f"{_PLANS}test_settings_outside_of_the_call_are_noticed",),
    ),
    Fault(
        "a cached plan ignores the sink",
        "flash_dmattn/call.py",
        "None if sink is None else tensor_key(sink)",
        "None",
        (f"{_PLANS}test_each_input_alone_changes_the_key",),
    ),
    # The call and its gradients
    Fault(
        "a bias that needs no gradient has one computed",
        "flash_dmattn/validation.py",
        "bias is not None and bias.requires_grad",
        "bias is not None",
        ("tests/test_explain.py::test_shapes_and_tensors_on_meta_are_explained_as_tensors_are",),
    ),
    Fault(
        "the gradient of an expanded bias is summed in 16 bits",
        "flash_dmattn/problem/leading.py",
        "        x = x.float()",
        "        pass",
        ("tests/test_leading_dims.py::test_the_gradient_of_a_shared_bias_is_rounded_once",),
    ),
    Fault(
        "a shared tensor repeats by the dims before its own, not by those after",
        "flash_dmattn/problem/leading.py",
        "math.prod(batch[end:])\n",
        "math.prod(batch[:first])\n",
        ("tests/test_leading_dims.py::test_every_sharing_of_mask_and_bias[(2, 3)-(2, 1)-eager]",),
    ),
    Fault(
        "a batched gradient of lse is taken for a single one",
        "flash_dmattn/autograd.py",
        "is_batched(dout, dlse):",
        "is_batched(dout):",
        ("tests/test_autograd.py::test_batched_gradients_are_those_of_each[sink-eager]",),
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
        "causality of torch's kernel on a CPU counts from the first key in any call",
        "flash_dmattn/backends/sdpa/cpu.py",
        "(left, right) == (-1, 0) and p.seqlen_q == p.seqlen_k and",
        "(left, right) == (-1, 0) and",
        (f"{_SDPA}test_gradients_without_lse[more keys, causal]",),
    ),
    Fault(
        "rows of another stride than 1 reach torch's kernel on a CPU",
        "flash_dmattn/backends/sdpa/cpu.py",
        "return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()",
        "return x",
        (f"{_SDPA}test_a_fault_of_torch_is_none_of_a_call[rows of another stride]",),
    ),
    Fault(
        "a hidden key with NaN shows in torch's kernel on a CPU",
        "flash_dmattn/backends/sdpa/cpu.py",
        "if lse.isnan().any():",
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
    Fault(
        "unused tokens between packed sequences belong to the sequence before",
        "flash_dmattn/backends/sdpa/cuda.py",
        "torch.stack((first, first + number), 1)",
        "torch.stack((first, first), 1)",
        (f"{_SDPA}test_packed_sequences_around_the_operators_of_gpus",),
    ),
    Fault(
        "rows of no packed sequence keep what the kernel leaves there",
        "flash_dmattn/backends/sdpa/cuda.py",
        "out.masked_fill_(is_unused[:, None, None], 0.0)",
        "out",
        (f"{_SDPA}test_packed_sequences_around_the_operators_of_gpus",),
    ),
    Fault(
        "memory-efficient attention gets a bias in rows that it cannot read",
        "flash_dmattn/backends/sdpa/efficient.py",
        " or not is_aligned:",
        ":",
        (f"{_SDPA}test_what_is_around_the_operators_of_gpus[bias]",),
    ),
    Fault(
        "auto asks triton before sdpa for plain calls on GPUs that nobody measured",
        "flash_dmattn/dispatch/profiles.py",
        'else ("sdpa", "flex", "triton")',
        'else ("triton", "flex", "sdpa")',
        (f"{_SDPA}test_the_order_of_auto_on_gpus_that_nobody_measured[plain-sm_80]",),
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
        "intervals of a block of queries count from the first query of the call",
        "reference/query_blocks.py",
        "(x.gather(3, keys) - first)",
        "x.gather(3, keys)",
        ("tests/test_eager_skips.py::test_blocks_of_few_keys_are_one_call",),
    ),
    Fault(
        "dv is overwritten by each block of queries",
        "reference/tiles.py",
        "multiply(a, b, self._sums[:, keys], scale, keep=True)",
        "multiply(a, b, self._sums[:, keys], scale)",
        ("tests/test_eager_chunks.py::test_any_chunk_size[True-1]",),
    ),
    Fault(
        "the oracle's window lacks its leftmost key",
        "reference/formula.py",
        "offset >= -left",
        "offset > -left",
        ("tests/test_formula.py::test_formula_is_the_contract_by_loops",),
    ),
    Fault(
        "dropout keeps one word too few",
        "reference/dropout.py",
        "[word >= threshold for",
        "[word > threshold for",
        ("tests/test_dropout.py::test_threshold_and_scale",),
    ),
    Fault(
        "every sequence drops what the first one does",
        "reference/sequences.py",
        "dropout.starting_at(s.number)",
        "dropout.starting_at(0)",
        ("tests/test_dropout.py::test_sequences_with_dropout",),
    ),
    Fault(
        "a negative page is counted from the end",
        "reference/sequences.py",
        ".clamp(0, max(x.shape[0] - 1, 0))",
        ".clamp(max=max(x.shape[0] - 1, 0))",
        ("tests/test_sequences.py::test_the_loop_clamps_pages_that_are_not_there",),
    ),
    # Masks
    Fault(
        "the highest diagonal of a band has no bits",
        "flash_dmattn/masks/prepared/packing.py",
        "(rows + (band.high + 1))",
        "(rows + band.high)",
        ("tests/test_prepared_mask.py::test_tile_mask_against_loops",),
    ),
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
        "keys of all heads are sorted together",
        "flash_dmattn/masks/prepared/intervals.py",
        "+ head * (2 * _DEAD)",
        "+ 0 * head",
        ("tests/test_interval_mask.py::test_order_is_a_stable_sort_of_each_head",),
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
    Fault(
        "flex aligns causality of sequences top-left",
        "flash_dmattn/backends/flex/sequences.py",
        "queries.place + (seqlen_k - seqlen_q)[own]",
        "queries.place",
        ("tests/test_flex_sequences.py::test_random_calls_with_nan_in_all_rows_of_no_sequence",),
    ),
    Fault(
        "gradients of padding rows are not zero under flex",
        "flash_dmattn/backends/flex/sequences.py",
        "gradient, ctx.dim, back, 0.0)",
        "gradient, ctx.dim, back, 1.0)",
        ("tests/test_flex_sequences.py::test_random_calls_with_nan_in_all_rows_of_no_sequence",),
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
        "a sliding window of transformers has one key too many",
        "flash_dmattn/integrations/transformers/mask_function.py",
        '(held["sliding_window"] - 1, -1)',
        '(held["sliding_window"], -1)',
        ("tests/test_transformers_masks.py::test_the_same_keys_are_allowed",),
    ),
    Fault(
        "a union of masks is taken for an intersection",
        "flash_dmattn/integrations/transformers/mask_function.py",
        'if maker == "or_masks":',
        'if maker == "":',
        ("tests/test_transformers_masks.py::test_what_no_rule_describes_is_evaluated",),
    ),
    Fault(
        "a prompt in a static cache is aligned at the end of the cache",
        "flash_dmattn/integrations/transformers/dynamic_mask.py",
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
        "a window does not shift with the end of its slice",
        "flash_dmattn/distributed/slices.py",
        "left + shift if left",
        "left if left",
        ("tests/test_distributed_layout.py::test_slices_allow_what_the_whole_call_allows",),
    ),
    Fault(
        "the gradient of a bias is not written left of its slice",
        "flash_dmattn/distributed/operators.py",
        "    rows[..., : part.start] = 0\n",
        "",
        ("tests/test_distributed_slices.py::test_gradients_of_pairs_that_no_slice_has_are_zero",),
    ),
    Fault(
        "gradients of other ranks are not added",
        "flash_dmattn/distributed/exchange.py",
        "total += x\n",
        "total += 0 * x\n",
        (f"{_WORKERS}test_a_call_over_processes_equals_one_call[bias full-2]",),
    ),
    Fault(
        "only the rank that has a refusal raises, and the others wait",
        "flash_dmattn/distributed/group.py",
        "if one.kind]",
        "if one.kind and one.rank == rank]",
        (f"{_WORKERS}test_a_mistake_of_one_rank_raises_on_all[shape of mask-2]",),
    ),
    Fault(
        "each rank reads the first of the key-value heads that ranks share",
        "flash_dmattn/distributed/slices.py",
        "slice(first, first + 1)",
        "slice(0, 1)",
        (f"{_WORKERS}test_a_call_over_processes_equals_one_call[ulysses, shared heads-4]",),
    ),
    Fault(
        "the gradient of a bias that DTensors share is that of one rank",
        "flash_dmattn/distributed/dtensor.py",
        "Partial() if shared else at for",
        "at for",
        ("tests/test_distributed_dtensor.py::test_values_gradients_and_placements[batch, shared bias]",),
    ),
    # The build
    Fault(
        "a kernel whose matrix products are serialized is built without a warning",
        "setup.py",
        "[kernel.name for kernel in kernels if kernel.is_serialized]",
        "list[str]()",
        ("tests/test_cuda_extension.py::test_serialized_products_warn_and_stop_force",),
    ),
    Fault(
        "an extension of another version is loaded",
        "flash_dmattn/backends/cuda/extension.py",
        'info["version"] != __version__',
        "False",
        ("tests/test_cuda_extension.py::test_mismatch_is_a_sentence",),
    ),
)

_TRITON = (
    Fault(
        "a block of keys is read from one page where pages are longer but no multiple of it",
        "triton_kernels/tile_ops.py",
        "PAGE % BLOCK == 0",
        "PAGE >= BLOCK",
        ("tests/test_triton_sequences.py::test_in_the_interpreter[made]",),
    ),
    Fault(
        "the entry of a mask that a part of the batch shares does not begin anew",
        "triton_kernels/tile_ops.py",
        "return b // strides.repeat % strides.entries",
        "return b // strides.repeat",
        (f"{_INTERPRETED}test_entries_that_a_part_of_the_batch_shares[three dims]",),
    ),
    Fault(
        "every sequence reads the tree of the first",
        "triton_kernels/tile_ops.py",
        "return data + entry_of(b, strides) * strides.batch, 0\n",
        "return data, 0\n",
        ("tests/test_trees.py::test_random_calls_of_the_kernels",),
    ),
    Fault(
        "causality of sequences is aligned top-left",
        "triton_kernels/tile_ops.py",
        "tl.load(at + 1), tl.load(at + 3))",
        "tl.load(at + 1), tl.load(at + 1))",
        (f"{_INTERPRETED}test_sequences[0]",),
    ),
    Fault(
        "lines of a chunk of pairs beyond its first are taken for the first",
        "triton_kernels/pair_products.py",
        "        low = (first_line - first_line_row)",
        "        low = (0 - first_line_row)",
        (f"{_INTERPRETED}test_wide_heads",),
    ),
    Fault(
        "a chunk of pairs replaces the sums of dk and dv of the chunk before",
        "triton_kernels/pair_products.py",
        "tl.load(at, mask=stored, other=0.0) + acc * factor",
        "acc * factor",
        (f"{_INTERPRETED}test_wide_heads",),
    ),
    Fault(
        "stored ds of wide heads lacks the slope of the softcap",
        "triton_kernels/pairs.py",
        "                    ds = ds * slope\n",
        "                    ds = ds * 1.0\n",
        (f"{_INTERPRETED}test_wide_heads",),
    ),
    Fault(
        "dq reads key-value head h % Hk, not h // G",
        "triton_kernels/backward_queries.py",
        "h_k = h // shape.group",
        "h_k = h % (shape.num_heads // shape.group)",
        (f"{_LINES}[scores-4]",),
    ),
    Fault(
        "the lse of an empty row stays -inf in the backward pass",
        "triton_kernels/backward_delta.py",
        'tl.where(empty, float("inf"), natural * LOG2E)',
        "natural * LOG2E",
        (f"{_LINES}[masks-2]",),
    ),
    Fault(
        "a row without a key in any split is NaN",
        "triton_kernels/forward_combine.py",
        'tl.where(top == float("-inf"), 0.0, top)',
        "top",
        (f"{_LINES}[parts-11]",),
    ),
    Fault(
        "offsets of keys are 32 bits wide where a mask is packed",
        "triton_kernels/mask_pack.py",
        "(keys.to(tl.int64) * stride_k)",
        "(keys * stride_k)",
        ("tests/test_mask_pack_interpreter.py::test_interpreted[beyond_int32]",),
    ),
    Fault(
        "the last program of a head counts the live keys of its own chunk alone",
        "triton_kernels/interval_pack.py",
        "(before + live)",
        "(before * 0 + live)",
        ("tests/test_mask_pack_interpreter.py::test_interpreted[counts]",),
    ),
    Fault(
        "padding rows are not written",
        "triton_kernels/plan_sequences.py",
        "        fill(out, lse, sequences.bounds)\n",
        "",
        (f"{_INTERPRETED}test_sequences[0]", f"{_INTERPRETED}test_sequences[1000]"),
    ),
    Fault(
        "dk and dv stay in the order of places",
        "flash_dmattn/backends/triton/key_order.py",
        "self._rows.flatten(), rows)",
        "self._rows.flatten().sort().values, rows)",
        (f"{_INTERPRETED}test_interval_masks",),
    ),
)

# These run on the emulated GPU.
_CSRC = (
    Fault(
        "a mask for another number of queries is accepted",
        "csrc/api/call.h",
        "{entries, heads, sizes.seqlen_q, tiles_k * kTileWords}",
        "{entries, heads, allowed.size(2), tiles_k * kTileWords}",
        ("tests/test_cuda_arguments.py::test_each_tensor_changed_alone_is_refused[forward tiles-cuda]",),
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
        "keys + exp2_approx((sink - top) * kLog2e)",
        "keys + p.num_splits * exp2_approx((sink - top) * kLog2e)",
        (f"{_RARE}test_a_sink[no bias-3-cuda]",),
    ),
    Fault(
        "a negative threshold is compared by its bits, which no negative score exceeds",
        "csrc/sm90/forward/consumer.h",
        "bound >= 0.0f && fabsf(shift[r])",
        "fabsf(shift[r])",
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
        "barrier_wait(&shared.bias_full[pipe.stage], pipe.phase);",
        "",
        (f"{_RARE}test_what_is_copied_is_waited_for[cuda]",),
    ),
    Fault(
        "heads of a group add to dk and dv out of turn",
        "csrc/sm90/backward/consumer.h",
        "if (p.dkv_semaphore != nullptr) named_barrier_sync(kMayAddBarrier + group, 128 + 32);",
        "",
        (f"{_RARE}test_heads_of_a_group_are_summed_in_their_order[cuda]",),
    ),
    Fault(
        "an empty row keeps its lse and its dlse",
        "csrc/sm90/backward/rows.cu",
        "if (natural != -INFINITY) {",
        "if (true) {",
        (f"{_RARE}test_the_lse_of_an_empty_row_takes_no_gradient[cuda]",),
    ),
)

FAULTS = _PYTHON + _TRITON + _CSRC
