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
TASKS = f"{TESTS}::test_tasks_have_contexts_of_their_own"
RECOMPUTED = f"{TESTS}::test_checkpoints_recompute_with_it"

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
        "functions of torch are not entered",
        MODE,
        "return self.enter(func, *args, **kwargs)",
        "return func(*args, **kwargs)",
        (*MODULES, RECOMPUTED),
    ),
    Fault(
        "backward passes are not entered",
        MODE,
        "{F.multi_head_attention_forward, Tensor.backward, torch.autograd.backward, torch.autograd.grad}",
        "{F.multi_head_attention_forward}",
        (RECOMPUTED,),
    ),
    Fault(
        "compiled modules keep their node",
        MODE,
        "if func is F.multi_head_attention_forward and self.entries:",
        "if False:",
        COMPILED,
    ),
    Fault(
        "the fast path stays on",
        MODE,
        "torch.backends.mha.set_fastpath_enabled(False)",
        "torch.backends.mha.set_fastpath_enabled(True)",
        COMPILED,
    ),
    Fault("the inner of two contexts ends the fast path's pause", MODE, "if self._contexts == 0:", "if True:", NESTED),
    Fault("the inner of two contexts ends both", MODE, "if not mode.entries and _thread", "if _thread", NESTED),
    Fault(
        "of the contexts of a thread the last one decides in every task",
        MODE,
        "if torch.compiler.is_compiling() or threading.get_ident() != self.thread:",
        "if True:",
        (TASKS,),
    ),
    Fault(
        "threads of autograd are left alone",
        MODE,
        "if torch.compiler.is_compiling() or threading.get_ident() != self.thread:",
        "if torch.compiler.is_compiling():",
        (f"{TESTS}::test_threads_of_autograd_follow_the_caller",),
    ),
    Fault(
        "a context that was left decides in tasks that began in it",
        MODE,
        "in reversed(_of_task.get()) if entry in self.entries)",
        "in reversed(_of_task.get()))",
        (TASKS,),
    ),
    Fault(
        "an object leaves what it entered last, in whatever task",
        MODE,
        "entry = own[-1] if own else self._entries[-1]",
        "entry = self._entries[-1]",
        (TASKS,),
    ),
    Fault(
        "modes above count what is on its way to torch",
        MODE,
        "entry = None if _thread.passes_on else self.entry()",
        "entry = self.entry()",
        (f"{TESTS}::test_a_graph_counts_nothing",),
    ),
    Fault("strict is not", MODE, "if entry.strict and reason != NO_MASK:", "if False:", (f"{TESTS}::test_strict",)),
    Fault("what is served is not counted", TALLY, "self.served += 1", "pass", VALUES),
    Fault(
        "a context of one thread is that of all",
        MODE,
        "class _Thread(threading.local):",
        "class _Thread:",
        (f"{TESTS}::test_other_threads_are_left_alone",),
    ),
)
