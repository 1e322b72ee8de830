"""Faults of the front end: call classes, selection, validation, autograd, operators, settings, explain."""

from __future__ import annotations

from .fault import Fault

SETTINGS_AROUND = ("tests/test_call_cache.py::test_a_remembered_call_follows_what_is_set_around_it",)
PAIRS = ("tests/test_selection.py::test_each_backend_of_a_pair_is_asked_for_its_own_pass",)
INVALID = "tests/test_validation.py::test_invalid_call_names_argument_found_and_needed"
VALID = "tests/test_validation.py::test_valid_call_passes_and_is_read_as_the_contract_says"
FAKES = ("tests/test_ops.py::test_fakes_agree_with_what_runs[mask full-bias full-contiguous]",)

LEADING = "tests/test_leading_dims.py::"
SHARINGS = (f"{LEADING}test_every_sharing_of_mask_and_bias[(2, 3)-(2, 1)-eager]",)
PER_SAMPLE = f"{LEADING}test_vmap_and_per_sample_gradients"

SINKS = "tests/test_sinks.py::"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "calls that differ in their sink alone are taken for alike",
        "flash_dmattn/dispatch/call_cache.py",
        "None if sink is None else _of(sink),",
        "None,",
        (f"{SINKS}test_a_call_is_remembered_with_its_sink",),
    ),
    Fault(
        "mapped calls that share a sink share its gradient",
        "flash_dmattn/autograd.py",
        "is not None or needs_grad.sink or passes.runs_one_by_one:",
        "is not None or passes.runs_one_by_one:",
        (f"{SINKS}test_mapped_calls",),
    ),
    Fault(
        "the repeat of a shared tensor counts the dims in front of its own",
        "flash_dmattn/problem/leading.py",
        "math.prod(batch[end:])\n",
        "math.prod(batch[:first])\n",
        SHARINGS,
    ),
    Fault(
        "a shared dim between two that are not is left as it is",
        "flash_dmattn/problem/leading.py",
        "(*dims[:first], *batch[first:end], *dims[end:])",
        "dims",
        (f"{LEADING}test_every_sharing_of_mask_and_bias[(2, 3, 2)-(2, 1, 2)-eager]",),
    ),
    Fault(
        "a dim of stride 0 is taken for shared although each element has a gradient of its own",
        "flash_dmattn/problem/leading.py",
        "keeps_shape=x.requires_grad and torch.is_grad_enabled())",
        "keeps_shape=False)",
        (f"{LEADING}test_an_expanded_bias_has_a_gradient_in_each_of_its_elements",),
    ),
    Fault(
        "the gradient of an expanded bias is summed in 16 bits",
        "flash_dmattn/problem/leading.py",
        "        x = x.float()  # the",
        "        pass  # the",
        (f"{LEADING}test_the_gradient_of_a_shared_bias_is_rounded_once",),
    ),
    Fault(
        "calls that differ in a repeat are remembered as one",
        "flash_dmattn/api.py",
        "return_lse, return_probs, repeats, spec, dropout_p)\n",
        "return_lse, return_probs, None, spec, dropout_p)\n",
        (f"{LEADING}test_calls_alike_are_described_once",),
    ),
    Fault(
        "a backend that reads no part of a batch is given one",
        "flash_dmattn/backends/protocol.py",
        "    if problem.partly_shared and not repeats_entries(backend):\n        return False\n",
        "",
        (f"{LEADING}test_a_backend_that_does_not_say_so_is_not_given_a_partly_shared_tensor",),
    ),
    Fault(
        "mapped calls share the gradient of a bias that they share",
        "flash_dmattn/problem/mapped.py",
        "        if expand:\n",
        "        if False:\n",
        (PER_SAMPLE,),
    ),
    Fault(
        "a mapped dim is folded behind the batch",
        "flash_dmattn/problem/mapped.py",
        "x.movedim(dim, 0)\n        return merge(x, 2)\n",
        "x.movedim(dim, 0)\n        return merge(x.transpose(0, 1), 2)\n",
        (PER_SAMPLE,),
    ),
    Fault(
        "a remembered call is known by its backend argument, not by the choice in force",
        "flash_dmattn/dispatch/call_cache.py",
        "            choice_in_force(backend),\n",
        "            backend,\n",
        SETTINGS_AROUND,
    ),
    Fault(
        "a remembered call does not know whether torch asks for determinism",
        "flash_dmattn/dispatch/call_cache.py",
        "            torch.are_deterministic_algorithms_enabled(),\n",
        "",
        SETTINGS_AROUND,
    ),
    Fault(
        "a remembered call runs on a backend that was disabled since",
        "flash_dmattn/dispatch/call_cache.py",
        "            process.disabled,\n",
        "",
        ("tests/test_call_cache.py::test_settings_outside_of_the_call_are_noticed",),
    ),
    Fault(
        "a remembered call does not know whether gradients are recorded",
        "flash_dmattn/dispatch/call_cache.py",
        "            torch.is_grad_enabled(),\n",
        "",
        ("tests/test_call_cache.py::test_grad_mode_makes_another_class",),
    ),
    Fault(
        "a remembered call does not tell True from 1",
        "flash_dmattn/dispatch/call_cache.py",
        "            kinds,\n",
        "",
        ("tests/test_call_cache.py::test_what_only_equals_a_valid_argument_is_refused",),
    ),
    Fault(
        "a remembered call does not know the strides of its tensors",
        "flash_dmattn/dispatch/call_cache.py",
        "x.shape, x.stride(), x.dtype",
        "x.shape, x.dtype",
        ("tests/test_call_cache.py::test_a_changed_argument_makes_another_class",),
    ),
    Fault(
        "a fallback to eager is remembered, and so warns no more",
        "flash_dmattn/dispatch/call_cache.py",
        " or falls_back(problem, choice_in_force(backend), selection):",
        ":",
        ("tests/test_call_cache.py::test_a_fallback_is_chosen_anew_by_every_call",),
    ),
    Fault(
        "a remembered call outlives the registration of a backend",
        "flash_dmattn/dispatch/registry.py",
        "        notify()\n",
        "        pass\n",
        ("tests/test_call_cache.py::test_what_is_remembered_runs_on_the_backend_of_its_time",),
    ),
    Fault(
        "the second backend of a pair is asked its forward rules",
        "flash_dmattn/dispatch/selection.py",
        'if not _serves(backward_name, problem, "backward"):',
        'if not _serves(backward_name, problem, "forward"):',
        PAIRS,
    ),
    Fault(
        "the first backend of a pair is asked its backward rules",
        "flash_dmattn/dispatch/selection.py",
        'if not _serves(forward_name, problem, "forward"):',
        'if not _serves(forward_name, problem, "backward"):',
        PAIRS,
    ),
    Fault(
        "auto takes a backend of a forward alone for both passes",
        "flash_dmattn/dispatch/selection.py",
        '                and _serves(other, problem, "backward")\n',
        "",
        ("tests/test_selection.py::test_backend_of_a_forward_alone_is_paired",),
    ),
    Fault(
        "a backend that is disabled serves who names it",
        "flash_dmattn/dispatch/selection.py",
        "if name in process.disabled or not accepts(",
        "if not accepts(",
        ("tests/test_settings.py::test_disabling_beats_an_explicit_name_until_the_block_ends",),
    ),
    Fault(
        "any divisor of the heads of q passes as the heads of a mask or a bias",
        "flash_dmattn/problem/checks.py",
        "h in (num_heads, num_heads_k))",
        "(h > 0 and num_heads % h == 0))",
        (f"{INVALID}[mask heads, a divisor-attention]", f"{INVALID}[bias heads, a divisor-attention]"),
    ),
    Fault(
        "the default scale is of the head dim of v",
        "flash_dmattn/validation.py",
        "head_dim**-0.5 if softmax_scale is None",
        "head_dim_v**-0.5 if softmax_scale is None",
        (f"{VALID}[nothing optional-eager]",),
    ),
    Fault(
        "a scale of 0 is taken for none",
        "flash_dmattn/validation.py",
        "head_dim**-0.5 if softmax_scale is None",
        "head_dim**-0.5 if not softmax_scale",
        ("tests/test_validation.py::test_scale_zero_is_a_value",),
    ),
    Fault(
        "autocast casts fp64",
        "flash_dmattn/validation.py",
        " and x.is_floating_point() and x.dtype != torch.float64\n",
        " and x.is_floating_point()\n",
        ("tests/test_validation.py::test_invalid_call_is_the_same_error_under_autocast[k dtype]",),
    ),
    Fault(
        "a bias without a gradient has one computed",
        "flash_dmattn/validation.py",
        "bias is not None and bias.requires_grad,",
        "bias is not None,",
        ("tests/test_explain.py::test_description_equals_that_of_such_tensors",),
    ),
    Fault(
        "an unused lse costs a dlse of zeros",
        "flash_dmattn/autograd.py",
        "ctx.set_materialize_grads(False)",
        "ctx.set_materialize_grads(True)",
        ("tests/test_autograd.py::test_an_output_that_is_not_used_costs_its_gradient_nothing",),
    ),
    Fault(
        "the second derivative forgets lse",
        "flash_dmattn/autograd.py",
        'return found["dout"], found.get("dlse"), *(found',
        'return found["dout"], None, *(found',
        ("tests/test_autograd.py::test_second_derivative_of_every_subset",),
    ),
    Fault(
        "the fake backward has dk and dv in each other's place",
        "flash_dmattn/operators.py",
        "empty_gradients((q, k, v, bias, sink), flags_and_need[-1])",
        "empty_gradients((q, v, k, bias, sink), flags_and_need[-1])",
        FAKES,
    ),
    Fault(
        "the fake lse is laid out as out is",
        "flash_dmattn/operators.py",
        "torch.empty(batch, num_heads, seqlen_q, dtype=lse_dtype",
        "torch.empty(batch, seqlen_q, num_heads, dtype=lse_dtype",
        FAKES,
    ),
    Fault(
        "a dispatch mode does not see the operators",
        "flash_dmattn/operators.py",
        " or torch._C._len_torch_dispatch_stack() > 0",
        "",
        ("tests/test_ops.py::test_a_dispatch_mode_sees_the_operators",),
    ),
    Fault(
        "an inner use_backend block ends the outer one too",
        "flash_dmattn/dispatch/settings.py",
        "thread.backend = self.previous",
        "thread.backend = None",
        ("tests/test_settings.py::test_blocks_nest_and_end_with_an_exception",),
    ),
    Fault(
        "an inner disable_backends block enables what the outer one disables",
        "flash_dmattn/dispatch/settings.py",
        "dict.fromkeys(process.disabled + names)",
        "dict.fromkeys(names)",
        ("tests/test_settings.py::test_disabling_without_a_block_lasts",),
    ),
    Fault(
        "explain says nothing of use_backend",
        "flash_dmattn/explanation.py",
        "requested = choice_in_force(backend)",
        "requested = backend",
        ("tests/test_explain.py::test_explanation_follows_settings_no_grad_and_autocast",),
    ),
    Fault(
        "a prepared mask of one row is described as one of tiles",
        "flash_dmattn/explanation.py",
        '"tiles" if of_query > 1 else prepared_key_form',
        '"tiles" if of_query > 0 else prepared_key_form',
        ("tests/test_mask_forms.py::test_prepared_mask_described_by_its_shape",),
    ),
    Fault(
        "cuda copies a bias as large as the scores",
        "flash_dmattn/backends/cuda/bias_rows.py",
        "_SMALL = 4  #",
        "_SMALL = 0  #",
        ("tests/test_cuda_rules.py",),
    ),
    Fault(
        "cuda copies a bias of a single batch entry",
        "flash_dmattn/backends/cuda/bias_rows.py",
        "if batch == 1 or not (shape[0] == 1 or strides[0] == 0):",
        "if not (shape[0] == 1 or strides[0] == 0):",
        ("tests/test_cuda_rules.py",),
    ),
    Fault(
        "cuda takes the gradient of an expanded bias whose rows it cannot write",
        "flash_dmattn/backends/cuda/bias_rows.py",
        "if p.bias is None or p.bias.shape[0] != 1:",
        "if p.bias is None:",
        ("tests/test_cuda_rules.py",),
    ),
)
