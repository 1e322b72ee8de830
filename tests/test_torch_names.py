"""Private names of torch that the library uses: each is listed here with the reason, and exists.

Tests of the features that need a name show that it does what it is used for.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

# Each with what it is for, and the public one that is missing.
NAMES = {
    # Whether something watches a call. torch has no public question for any of them.
    "torch._C._len_torch_dispatch_stack": "whether a dispatch mode is on",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "which modes are on: the counter of FLOP is one",
    "torch._C._get_dispatch_mode": "whether tensors are fakes in this thread, whose collectives send nothing",
    "torch._C._TorchDispatchModeKey.FAKE": "the argument of the one before",
    "torch._C._functorch.peek_interpreter_stack": "whether a transform of torch.func runs",
    "torch._C._functorch.TransformType.Jvp": "whether the innermost transform is jvp",
    "torch._C._functorch.TransformType.Grad": "whether it is grad or vjp",
    "torch._C._functorch.CInterpreter": "whether one runs, in words that Dynamo can trace",
    "torch._C._functorch.is_functorch_wrapped_tensor": "whether a tensor is the wrapper of a transform",
    "torch._C._functorch": "get_unwrapped, for a message that names the tensor inside of wrappers",
    "torch._C._DisableFuncTorch": "a value for a cache, computed outside of the transforms that run",
    "torch._C._functorch.unwrap_if_dead": "a tensor that outlived a transform, as Function.apply does",
    "torch._C._functorch._unwrap_for_grad": "the tensor that jvp wraps; a call inside computes below it",
    "torch._C._functorch._wrap_for_grad": "the way back",
    "torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter": "what runs around jvp",
    "torch._C._functorch.is_legacy_batchedtensor": "whether is_grads_batched=True hands over gradients as one",
    "torch._C._functorch.is_gradtrackingtensor": "whether a tensor is of a gradient around vmap, in a graph",
    "torch.autograd.forward_ad._current_level": "whether tangents are about; a dual tensor tells, once it is unpacked",
    "torch.autograd.profiler._is_profiler_enabled": "whether a profiler is to be shown operators",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "whether a subclass may be unwrapped by a compiler",
    "torch._C._disabled_torch_function_impl": "whether a subclass overrides functions",
    # Autograd functions, which torch takes long to call.
    "._version": "whether a tensor was changed in place; public of no tensor",
    "._base": "the tensor that a view is of, which outlives it",
    "torch._assert_async": "an assertion of values that does not wait for a GPU",
    "torch.nn.Module._call_impl.__code__": "the frame of the call of a module, to see whether it has a bias of a user",
    # torch.compile. The public decorators import dynamo, which takes seconds of every process that does not compile.
    "._dynamo_marked_constant": "what torch.compiler.assume_constant_result sets",
    "torch._disable_dynamo": "torch.compiler.disable, once dynamo is there",
    "._torchdynamo_disable": "what torch.compiler.disable sets",
    "._torchdynamo_disable_msg": "likewise, with its reason",
    "torch.compiler._is_exporting_flag": "whether a program is exported: see `attend`",
    "torch._functorch.config.patch": "donated_buffer, which refuses retain_graph=True: no option of torch.compile",
    "torch._dynamo.lookup_backend": "the graph compiler of a name, to be run under that switch",
    "._forward_cls": "the graph of a node, to say of it that no buffer is reused",
    # Nested tensors of the jagged layout.
    "._maybe_max_seqlen": "the longest sequence, if it is known without a wait",
    "._ragged_idx": "which dim is ragged",
    # Checkpoints: `flash_dmattn.dispatch.checkpoints` does without where one is missing.
    "torch._C._autograd": "the hooks on saved tensors that are in force",
    "._CheckpointFrame": "what those of torch.utils.checkpoint hold",
    "._top_saved_tensors_default_hooks": "of torch._C._autograd",
    "._saved_tensors_hooks_is_enabled": "of torch._C._autograd",
    "._push_saved_tensors_default_hooks": "of torch._C._autograd",
    "._pop_saved_tensors_default_hooks": "of torch._C._autograd",
    # Process groups.
    "torch.distributed.distributed_c10d._resolve_process_group": "the group of a name: operators take no group",
    "._device_types": "the devices that a group has a backend for",
    "._get_backend": "the backend of a device, for its timeout",
    "._timeout": "of that backend",
    # Operators.
    "torch._C.parse_schema": "the names of an operator's arguments, for functions that read them by name",
    # Kernels.
    "torch.ops.aten._softmax_backward_data.out": "the derivative of softmax in place; F.softmax has none of out=",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default": "a call of SDPA with lse",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default": "the gradients of the one before",
    "torch.ops.aten._flash_attention_forward.default": "FlashAttention-2 on GPUs, with lse, aligned at the last key",
    "torch.ops.aten._flash_attention_backward.default": "the gradients of the one before",
    "torch.ops.aten._efficient_attention_forward.default": "memory-efficient attention, with lse and a bias",
    "torch.ops.aten._efficient_attention_backward.default": "the gradients of the one before, dbias too",
    "torch._C._cuda_getDevice": "torch.cuda.current_device without a look whether CUDA is initialised",
}
# Names of other libraries, or of no object at all.
OTHERS = {"._can_set_attn_implementation", "._attn_implementation", "._cache"}

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for folder in ("flash_dmattn", "reference", "triton_kernels") for path in (ROOT / folder).rglob("*.py")
)
TUPLES = {"_replace", "_asdict", "_fields", "_make"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> Iterator[str]:
    """Name all that a module of the library defines, whose private attributes are not torch's."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            yield node.attr


def dotted(node: ast.AST) -> list[str] | None:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else None


def private_names(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Dotted names that begin with torch, and `.name` of attributes that nothing of the library defines."""
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "torch":
                    imported[name.asname or "torch"] = name.name if name.asname else "torch"
                    if any(map(is_private, name.name.split("."))):
                        yield name.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            for name in node.names:
                imported[name.asname or name.name] = f"{node.module}.{name.name}"
                if any(map(is_private, f"{node.module}.{name.name}".split("."))):
                    yield f"{node.module}.{name.name}"
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path = dotted(node)
            if path is not None and path[0] in imported:
                if any(map(is_private, path[1:])) and id(node) not in inner:
                    yield ".".join([imported[path[0]], *path[1:]])
            elif node.attr == "__signature__" or (is_private(node.attr) and node.attr not in own):
                yield f".{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            if node.value == "__signature__" or (is_private(node.value) and node.value not in own):
                yield f".{node.value}"


def test_no_other_private_name_of_torch_is_used() -> None:
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    assert len(trees) > 100
    own = {name for tree in trees for name in own_names(tree)} | TUPLES
    used = {name for tree in trees for name in private_names(tree, own)} - OTHERS
    assert used - NAMES.keys() == set(), "use a public name, or add it here with the reason"
    assert NAMES.keys() - used == set(), "nothing uses it any more: take it out"


def resolved(name: str) -> Any:
    """Look a dotted name of torch up."""
    module, names = torch, name.split(".")[1:]
    thing: Any = module
    for index, part in enumerate(names, 1):
        if not hasattr(thing, part):
            importlib.import_module(".".join(["torch", *names[:index]]))
        thing = getattr(thing, part)
    return thing


def is_there(name: str) -> bool:
    if not name.startswith("."):
        return (name == "torch._C._cuda_getDevice" and not torch.cuda.is_available()) or resolved(name) is not None
    places: tuple[Any, ...] = (torch._C._autograd, torch.utils.checkpoint, dist.ProcessGroup, torch.Tensor)
    return any(hasattr(place, name[1:]) for place in places)


# Attributes of objects that a test would have to make, or that the library sets.
ON_INSTANCES = {"._forward_cls", "._dynamo_marked_constant", "._torchdynamo_disable", "._torchdynamo_disable_msg"}
ON_INSTANCES |= {"._maybe_max_seqlen", "._ragged_idx", "._timeout"}


@pytest.mark.parametrize("name", sorted(NAMES.keys() - ON_INSTANCES))
def test_it_exists(name: str) -> None:
    assert is_there(name)


# Functions whose tensors are where torch's default device is, and those of them whose dtype may be torch's default.
MAKERS = {function.__name__ for function in _device_constructors()} - {"range"}  # not the range of Python
TYPED = MAKERS - {"arange", "as_tensor", "asarray", "randint", "randperm", "tril_indices", "triu_indices"}


def defaults_taken(tree: ast.AST) -> Iterator[str]:
    """Calls of such a function, by whatever name of its own, that leave the device or the dtype to the caller."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.alias))}
    for node in ast.walk(tree):
        path = dotted(node.func) if isinstance(node, ast.Call) else None
        if path is None or path[-1] not in MAKERS or path[0] not in {"torch"} | ({path[-1]} - own):
            continue
        assert isinstance(node, ast.Call)
        named = {keyword.arg for keyword in node.keywords}
        needed = {"device", "dtype"} if path[-1] in TYPED else {"device"}
        if None not in named and not needed <= named:
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_tensor_takes_the_default_device_or_dtype_of_the_caller() -> None:
    trees = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in SOURCES}
    taken = {f"{path}:{call}" for path, tree in trees.items() for call in defaults_taken(tree)}
    assert taken == set(), "a plan or a mask that keeps it fails under another default: name device= and dtype="


def test_values_are_listed_in_one_way() -> None:
    """Torch before 2.11 lists no values inside of a transform of `torch.func`, and `definition.listed` does."""
    calls = [(path, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    places = {path.name for path, node in calls if isinstance(node, ast.Attribute) and node.attr == "tolist"}
    assert places == {"definition.py"}


@pytest.mark.parametrize(
    ("line", "is_taken"),
    [
        ("import torch\ntorch.zeros(3, dtype=x.dtype)", True),
        ("torch.zeros(3, device=x.device)", True),
        ("torch.arange(3)", True),
        ("torch.arange(3, device=x.device)", False),
        ("make = torch.empty\nempty(3)", True),
        ("torch.full((1,), 0, **like)", False),
        ("x.new_zeros(3)", False),
    ],
)
def test_such_a_call_is_seen(line: str, is_taken: bool) -> None:
    assert bool(list(defaults_taken(ast.parse(line)))) == is_taken
