"""Faults of the adapter for transformers: rules read wrongly, arguments that get lost, masks that are not reused."""

from __future__ import annotations

from .fault import Fault

FOLDER = "flash_dmattn/integrations/transformers"
RULES, MASKS = f"{FOLDER}/mask_rules.py", f"{FOLDER}/mask_function.py"
LAYER, CALLS = f"{FOLDER}/layer_mask.py", f"{FOLDER}/attention_function.py"
ALLOWED = ("tests/test_transformers_masks.py::test_the_same_keys_are_allowed",)
UNKNOWN = ("tests/test_transformers_masks.py::test_what_no_rule_describes_is_evaluated",)
REFUSED = ("tests/test_transformers_refusals.py::test_refused",)
REFUSALS, OVER_RANKS = "tests/test_transformers_refusals.py", "tests/test_distributed_transformers.py"
ZEROS = (f"{REFUSALS}::test_only_zeros_are_left_out",)
ALIGNED = ("tests/test_transformers_refusals.py::test_without_a_mask_queries_and_keys_are_aligned_at_their_beginning",)
COLLATED = ("tests/test_transformers_training.py::test_packed_documents_that_a_collator_describes",)
CONVERTED = ("tests/test_transformers_training.py::test_a_bias_is_converted_once",)
PREPARED = ("tests/test_transformers_masks.py::test_padding_is_prepared_once_where_kernels_read_it",)
MODEL = f"{FOLDER}/dynamic_mask"
FORMULA = tuple(
    f"tests/test_transformers_dynamic_mask.py::test_formula[{checkpointing}-{padded}]"
    for checkpointing in (None, True)
    for padded in ("no", "left")
)
GENERATED = ("tests/test_transformers_dynamic_mask.py::test_generate",)
COMPILED = ("tests/test_transformers_compile.py::test_training_in_one_graph",)

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a sliding window has a key too many",
        RULES,
        'Rule(window=(held["sliding_window"] - 1, -1))',
        'Rule(window=(held["sliding_window"], -1))',
        ALLOWED,
    ),
    Fault(
        "of a window to both sides one is open",
        RULES,
        'Rule(window=(held["sliding_window"], held["sliding_window"]))',
        'Rule(window=(held["sliding_window"], -1))',
        ALLOWED,
    ),
    Fault(
        "a union counts for an intersection",
        RULES,
        '"and_masks": {"mask_functions"},',
        '"and_masks": {"mask_functions"}, "or_masks": {"mask_functions"},',
        UNKNOWN,
    ),
    Fault("of two windows the first counts", RULES, "len(windows) > 1 or", "", UNKNOWN),
    Fault(
        "unknown parts of a mask function are left out",
        RULES,
        "if len(known) < len(parts) or",
        "if",
        UNKNOWN,
    ),
    Fault(
        "a function counts by its name, wherever it is from",
        RULES,
        "if not isinstance(function, FunctionType) or function.__module__ != masking_utils.__name__:",
        "if False:",
        ("tests/test_transformers_masks.py::test_a_function_of_a_known_name_elsewhere_is_not_taken_for_it",),
    ),
    Fault(
        "the window of a compiled forward has a key too many",
        RULES,
        "Rule(is_causal=True, window=(local_size - 1, -1))",
        "Rule(is_causal=True, window=(local_size, -1))",
        COMPILED,
    ),
    Fault(
        "a window that leaves out one key is dropped",
        MASKS,
        "max(window) >= kv_length - 1",
        "max(window) >= kv_length - 6",
        ALLOWED,
    ),
    Fault(
        "a static cache counts as full", MASKS, "used = q_offset + q_length - kv_offset", "used = kv_length", ALLOWED
    ),
    Fault(
        "padding behind the used keys counts",
        MASKS,
        "padding | (index >= used)",
        "padding",
        ("tests/test_transformers_masks.py::test_padding_behind_the_used_keys_is_none",),
    ),
    Fault(
        "padding keeps the keys that have left a cache",
        MASKS,
        "padding[:, kv_offset : kv_offset + kv_length]",
        "padding[:, :kv_length]",
        ALLOWED,
    ),
    Fault(
        "the last document of a row lacks its end",
        LAYER,
        "begins.new_full((1,), documents.shape[0])",
        "begins.new_full((1,), documents.shape[0] - 1)",
        ("tests/test_transformers_masks.py::test_documents_are_packed_in_one_row_alone",),
    ),
    Fault(
        "documents see the one before",
        LAYER,
        "torch.where(begins, index, 0).cummax(1)",
        "(index * 0).cummax(1)",
        ALLOWED,
    ),
    Fault(
        "a prepared mask forgets the window",
        LAYER,
        '{"is_causal": self.is_causal, "window_size": self.window}',
        '{"is_causal": self.is_causal}',
        PREPARED,
    ),
    Fault(
        "keys are aligned at the end",
        CALLS,
        "key[:, :, :seqlen_q], value[:, :, :seqlen_q]",
        "key[:, :, -seqlen_q:], value[:, :, -seqlen_q:]",
        ALIGNED,
    ),
    Fault(
        "a query alone is causal",
        CALLS,
        "_is_causal(module, is_causal) and (query.shape[2] > 1 or context is not None)",
        "_is_causal(module, is_causal)",
        ALIGNED,
    ),
    Fault(
        "a rank of one token is not causal",
        CALLS,
        "_is_causal(module, is_causal) and (query.shape[2] > 1 or context is not None)",
        "_is_causal(module, is_causal) and query.shape[2] > 1",
        (f"{OVER_RANKS}::test_a_rank_of_one_token_is_causal",),
    ),
    Fault(
        "a window that reaches the keys of one rank is dropped",
        MASKS,
        "max(window) >= kv_length - 1 and context_in_force() is None",
        "max(window) >= kv_length - 1",
        (f"{OVER_RANKS}::test_a_window_longer_than_a_part_of_the_sequence",),
    ),
    Fault(
        "sequences of a caller are dropped over ranks",
        f"{FOLDER}/over_ranks.py",
        "if isinstance(attention_mask, LayerMask) and not is_packed:",
        "if isinstance(attention_mask, LayerMask):",
        (f"{OVER_RANKS}::test_sequences_that_a_caller_describes_are_refused",),
    ),
    Fault(
        "deterministic is dropped",
        CALLS,
        '{"deterministic": deterministic or None}',
        '{"deterministic": None}',
        (f"{REFUSALS}::test_deterministic_is_passed_on",),
    ),
    Fault(
        "a layer does not pass deterministic on",
        "flash_dmattn/integrations/transformers/attention_function.py",
        "window, deterministic or None, dropout_p=dropout)",
        "window, None, dropout_p=dropout)",
        (f"{REFUSALS}::test_deterministic_is_passed_on",),
    ),
    Fault(
        "a window that no mask has is dropped",
        CALLS,
        "if 0 < width < longest - (not found.is_causal):",
        "if False:",
        REFUSED,
    ),
    Fault("a bias is left out by what its module is called", CALLS, "return known[1]", "return True", ZEROS),
    Fault("a bias that changes stays zeros", CALLS, "known[0] != bias._version", "False", ZEROS),
    Fault(
        "zeros that learn are left out",
        CALLS,
        "torch.compiler.is_compiling() or bias.requires_grad or",
        "torch.compiler.is_compiling() or",
        ZEROS,
    ),
    Fault(
        "what is known of limits keeps them alive",
        f"{FOLDER}/packed.py",
        "alias = limits_q.detach()",
        "alias = limits_q",
        (f"{REFUSALS}::test_what_is_known_of_limits_goes_with_them",),
    ),
    Fault(
        "limits that change stay as they were",
        f"{FOLDER}/packed.py",
        "last[1] == key and _are",
        "_are",
        (f"{REFUSALS}::test_what_is_known_of_limits_goes_with_them",),
    ),
    Fault(
        "arguments to ignore add up",
        f"{FOLDER}/registration.py",
        "attend_without(ignored) if ignored else attend)",
        "attend_without(ignored | {'yours'}))",
        (f"{REFUSALS}::test_ignored_arguments_are_those_of_the_last_registration",),
    ),
    Fault(
        "closures are read whatever they hold",
        RULES,
        "if held.keys() != _HELD.get(maker):",
        "if maker not in _HELD:",
        ("tests/test_transformers_masks.py::test_a_closure_of_other_names_is_evaluated",),
    ),
    Fault(
        "zeros of cross attention stay a bias",
        CALLS,
        "None if position_bias is None or _is_empty_bias(module, position_bias) else position_bias",
        "position_bias",
        CONVERTED,
    ),
    Fault("every layer converts the bias", CALLS, "if kept is None or kept[0] != key:", "if True:", CONVERTED),
    Fault(
        "padding beside packed sequences is dropped",
        CALLS,
        "padding = None if mask.padding is None else mask.padding[0]",
        "padding = None",
        ("tests/test_transformers_refusals.py::test_packed_sequences_with_padding",),
    ),
    Fault("dropout is dropped", CALLS, '"dropout_p": dropout}', '"dropout_p": 0.0}', REFUSED),
    Fault(
        "limits of sequences are looked at by each layer anew",
        f"{FOLDER}/packed.py",
        "    _last = ([weakref.ref(x, _forget) for x in tensors], key, found)\n",
        "",
        COLLATED,
    ),
    Fault(
        "an unknown argument is ignored",
        f"{FOLDER}/arguments.py",
        "if value is None or value is False or name in _HARMLESS:",
        "if value is None or value is False or name not in _REFUSED:",
        REFUSED,
    ),
    Fault(
        "a static cache has a real key too many",
        f"{MODEL}/keys.py",
        "real = (index < cache.get_seq_length() + seqlen_q)[None]",
        "real = (index <= cache.get_seq_length() + seqlen_q)[None]",
        GENERATED,
    ),
    Fault(
        "the last keys of a query are those at the end of a static cache",
        f"{MODEL}/layers.py",
        "keys.padding, keys.query_index)",
        "keys.padding)",
        GENERATED,
    ),
    Fault(
        "a prompt in a static cache is aligned at the end of the cache",
        f"{MODEL}/keys.py",
        "return k[:, : self._used], v[:, : self._used]",
        "return k, v",
        GENERATED,
    ),
    Fault(
        "tokens behind cached ones begin at position 0",
        f"{MODEL}/keys.py",
        "torch.arange(seqlen_q, device=device) + self.past",
        "torch.arange(seqlen_q, device=device)",
        ("tests/test_transformers_dynamic_mask.py::test_positions_follow_the_cache",),
    ),
    Fault(
        "scores are of the new values alone",
        f"{MODEL}/layers.py",
        "        k, v = keys.append(k, v, self.layer)\n        call = self.attention_call(q, k, v, self.key_scores(v),",
        "        scores = self.key_scores(v)\n        k, v = keys.append(k, v, self.layer)\n"
        "        call = self.attention_call(q, k, v, scores,",
        GENERATED,
    ),
    Fault(
        "padding is not masked",
        f"{MODEL}/keys.py",
        "        self.padding = padding\n",
        "        self.padding = None\n",
        FORMULA,
    ),
    Fault(
        "a layer is left out of the residual stream",
        f"{MODEL}/layers.py",
        "return x + self.mlp(",
        "return self.mlp(",
        FORMULA,
    ),
    Fault(
        "a score scale that a folder lacks stays as its memory was",
        f"{MODEL}/modeling.py",
        "initialization.ones_(module.score_scale)",
        "pass",
        ("tests/test_transformers_dynamic_mask.py::test_missing_weights_are_initialised",),
    ),
    Fault(
        "padding beside a bias is prepared as intervals",
        LAYER,
        "as_tiles=with_bias",
        "as_tiles=False",
        ("tests/test_transformers_masks.py::test_beside_a_bias_padding_is_prepared_as_bits",),
    ),
    Fault(
        "as_tiles leaves a mask of one row as intervals",
        "flash_dmattn/masks/prepared/prepare.py",
        'of_keys = KeyForm("tiles")',
        "pass",
        ("tests/test_prepared_mask.py::test_a_mask_of_one_row_as_tiles",),
    ),
)
