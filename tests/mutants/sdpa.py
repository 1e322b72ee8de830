"""Faults of `intercept_sdpa`: calls that are not seen, seen twice, or served though they mean something else."""

from __future__ import annotations

from .fault import Fault

FOLDER = "flash_dmattn/integrations/sdpa"
MODE, CALLS, TALLY = f"{FOLDER}/interception.py", f"{FOLDER}/served.py", f"{FOLDER}/tally.py"
TESTS = "tests/test_sdpa.py"
VALUES = (f"{TESTS}::test_values_and_gradients",)
PASSED_ON = (f"{TESTS}::test_what_is_passed_on",)
MODULES = (f"{TESTS}::test_modules_of_torch",)
COMPILED = (f"{TESTS}::test_compiled",)
NESTED = (f"{TESTS}::test_contexts_nest_and_end",)

FAULTS: tuple[Fault, ...] = (
    Fault("the scale is lost", CALLS, "softmax_scale=scale", "softmax_scale=None", VALUES),
    Fault("is_causal is lost", CALLS, "is_causal=is_causal", "is_causal=False", VALUES),
    Fault("dropout is lost", CALLS, "dropout_p=dropout_p", "dropout_p=0.0", (f"{TESTS}::test_dropout",)),
    Fault(
        "a float mask loses its gradient",
        CALLS,
        "None if is_bool else attn_mask,",
        "None if is_bool else attn_mask.detach(),",
        VALUES,
    ),
    Fault(
        "a float mask stays as it is under autocast",
        CALLS,
        "if not is_bool:",
        "if False:",
        (f"{TESTS}::test_autocast_casts_a_float_mask",),
    ),
    Fault("heads alone come back with a batch", CALLS, "query.dim() > 3 or len(batch) > 1", "True", VALUES),
    Fault(
        "keys are copied",
        CALLS,
        ".transpose(-3, -2) for x",
        ".transpose(-3, -2).contiguous() for x",
        (f"{TESTS}::test_nothing_is_copied",),
    ),
    Fault(
        "another alignment is served",
        CALLS,
        "if is_causal and query.shape[-2] != key.shape[-2]:",
        "if False:",
        PASSED_ON,
    ),
    Fault("grouped heads without enable_gqa", CALLS, "(enable_gqa and heads_k > 0", "(heads_k > 0", PASSED_ON),
    Fault("a mask may have the heads of keys", CALLS, "size in (1, whole)", "size in (1, 2, whole)", PASSED_ON),
    Fault("a mask may have more dims", CALLS, "if mask.dim() > len(scores):", "if False:", PASSED_ON),
    Fault(
        "a CausalBias is read as a tensor",
        CALLS,
        "not in (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)",
        "is None",
        PASSED_ON,
    ),
    Fault(
        "the mode does not see the builtin",
        MODE,
        "if func is SDPA or func is _patch:",
        "if func is _patch:",
        (f"{TESTS}::test_a_name_imported_earlier",),
    ),
    Fault(
        "functions of torch are not entered",
        MODE,
        "with _inside_of(self):\n            return func",
        "with _inside_of(None):\n            return func",
        MODULES,
    ),
    Fault(
        "compiled modules keep their node",
        MODE,
        "and torch.compiler.is_compiling():\n            return",
        "and False:\n            return",
        COMPILED,
    ),
    Fault(
        "the fast path stays on",
        MODE,
        "torch.backends.mha.set_fastpath_enabled(False)",
        "torch.backends.mha.set_fastpath_enabled(True)",
        COMPILED,
    ),
    Fault(
        "the first compilation inside is not seen",
        MODE,
        "get_overridable_functions()  # torch",
        "pass  # torch",
        (f"{TESTS}::test_an_import_changes_nothing",),
    ),
    Fault("the name stays patched", MODE, "F.scaled_dot_product_attention = _before[0]", "pass", NESTED),
    Fault("the inner of two contexts ends both", MODE, "if _open == 0:", "if _open >= 0:", NESTED),
    Fault(
        "outer contexts count what an inner one passed on",
        MODE,
        'if getattr(_inside, "passes_on", False):',
        "if False:",
        (f"{TESTS}::test_a_call_passed_on_is_counted_once_in_nested_contexts",),
    ),
    Fault("strict is not", MODE, "if self.strict and reason != NO_MASK:", "if False:", (f"{TESTS}::test_strict",)),
    Fault("what is served is not counted", TALLY, "self.served += 1", "pass", VALUES),
    Fault(
        "a module's calls are served in every thread",
        MODE,
        "_inside = threading.local()",
        "_inside = type('Shared', (), {})()",
        (f"{TESTS}::test_other_threads_are_left_alone",),
    ),
)
