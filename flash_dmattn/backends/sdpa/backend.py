"""Torch's fused kernels behind `F.scaled_dot_product_attention`, called as operators under this contract.

On CPUs they are torch's flash kernel; on GPUs FlashAttention-2, or memory-efficient attention for calls that it lacks.
The kernels of cuDNN are not used, because they have too many silent faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import torch

from ...problem import AttentionProblem, SequenceSpec, dtype_name, sm_number
from ...triton_kernels.precision import MOST_FEW_ROWS, problem_precision
from ..protocol import Availability, Backend, Rule
from . import cpu, cuda, efficient

# Up to this number of multiplications of q and k, the kernel of a CPU is faster than the small operations of eager in
# every class of calls. Its forward pass converts 16 bits row by row, which is slower.
_LITTLE_WORK = 2**20
_LITTLE_WORK_IN_HALF = 2**18
# With causality the kernel visits whole blocks of 512 keys. So in calls of up to this number of keys it visits most of
# the hidden ones. A mask of pairs also becomes a float for every pair.
_WHOLE_BLOCKS, _WHOLE_BLOCKS_OF_PAIRS = range(257, 769), range(257, 2049)
# From this number of multiplications on, eager gains by loading keys once for each group of heads.
_GROUPED_WORK = 2**26
_DECODED_WORK, _WORK_OF_A_QUERY = 2**21, 2**20
# On a GPU, auto tries this backend first for calls in fp32 with at least this number of scores. The full gradient of
# the bias may have this number of bytes.
_MANY_SCORES, _DBIAS_BYTES = 2**24, 2**28
_MOST_FLASH_DIM = 256
_INT32_MAX = 2**31 - 1
_MOST_BLOCKS = 65535  # the limit of the second and of the third dim of a grid: entries of the batch, and heads
_HALF = (torch.float16, torch.bfloat16)
# GPUs whose FlashAttention-2 has no gradients for head dims from 193 to 224.
_SMALL_SHARED_MEMORY = ("sm_86", "sm_89", "sm_120")
_BY_NAME = 'backend="sdpa" runs it all the same'
_EAGER_BACKWARD = 'backend=("sdpa", "eager") runs its forward pass and the backward pass of eager'
_TRITON_BACKWARD = 'backend=("sdpa", "triton") runs its forward pass and the backward pass of triton'
_TRITON = 'use backend="triton"'


def _is_rocm(p: AttentionProblem) -> bool:
    return p.arch.startswith("gfx")


def runs_flash(p: AttentionProblem) -> bool:
    """Return whether a call on a GPU runs FlashAttention-2, and not memory-efficient attention."""
    is_plain = p.mask is None and p.bias is None and (p.sequences is None or p.sequences.layout == "packed")
    if p.device != "cuda" or not is_plain or p.dtype not in _HALF:
        return False
    return p.head_dim == p.head_dim_v and p.head_dim % 8 == 0 and p.head_dim <= _MOST_FLASH_DIM


def leads_in_fp32(p: AttentionProblem) -> bool:
    """Return whether auto tries this backend before triton and flex: in fp32, where torch does not allow TF32.

    Memory-efficient attention multiplies by three products of TF32 on tensor cores. On Hopper this backend leads only
    in large calls that triton multiplies on CUDA cores: docs/notes/triton.md has the times. On other GPUs nobody has
    timed triton. The gradient of a shared bias is first computed for every score, and the memory for it is limited.
    """
    if _is_rocm(p) or p.device != "cuda" or p.dtype != torch.float32 or p.flags.allows_tf32:
        return False
    scores = p.batch * p.num_heads * p.seqlen_q * p.seqlen_k
    if p.dbias_class is not None and p.bias is not None and 4 * scores > max(_DBIAS_BYTES, 4 * math.prod(p.bias.shape)):
        return False
    if p.arch != "sm_90":
        return True
    return problem_precision(p) == "ieee" and p.seqlen_q > MOST_FEW_ROWS and scores >= _MANY_SCORES


def _why_it_leads(p: AttentionProblem) -> str:
    if not leads_in_fp32(p):
        return ""
    slower = (
        "triton multiplies on CUDA cores here" if problem_precision(p) == "ieee" else f"triton is not timed on {p.arch}"
    )
    return f"; auto asks it first in float32, because {slower}"


def _on_efficient(holds: Callable[[AttentionProblem], bool]) -> Callable[[AttentionProblem], bool]:
    """Make a rule's condition apply only to memory-efficient attention."""
    return lambda p: p.device != "cuda" or runs_flash(p) or holds(p)


def _on_gpu(holds: Callable[[AttentionProblem], bool]) -> Callable[[AttentionProblem], bool]:
    return lambda p: p.device != "cuda" or holds(p)


def _on_cpu(holds: Callable[[AttentionProblem], bool]) -> Callable[[AttentionProblem], bool]:
    return lambda p: p.device != "cpu" or holds(p)


def _span(p: AttentionProblem) -> int:
    return 0 if p.mask is None else p.mask.span()


def _entries(p: AttentionProblem) -> int:
    """Count the entries of the batch as a kernel of a GPU does: sequences, and the gaps between them."""
    return p.batch if p.sequences is None else 2 * p.sequences.number - 1


def _work(p: AttentionProblem) -> int:
    """Count the multiplications of q and k; the kernel visits pairs outside of the band, too."""
    return p.batch * p.num_heads * p.seqlen_q * p.seqlen_k * p.head_dim


def _is_little(p: AttentionProblem) -> bool:
    return _work(p) <= (_LITTLE_WORK_IN_HALF if p.dtype in _HALF else _LITTLE_WORK)


def _skips_few_keys(p: AttentionProblem) -> bool:
    """Return whether eager skips more of a causal call than the kernel of a CPU."""
    if not cpu.kernel_is_causal(p):
        return False
    if p.mask is None and p.bias is None:
        is_grouped = p.num_heads > p.num_heads_k and _work(p) >= _GROUPED_WORK
        return is_grouped and p.seqlen_k < _WHOLE_BLOCKS.stop
    lengths = _WHOLE_BLOCKS_OF_PAIRS if p.mask is not None and p.mask.shape[2] > 1 else _WHOLE_BLOCKS
    return lengths.start <= p.seqlen_k < lengths.stop  # not `in`: Dynamo of torch 2.11 lacks it for symbols


def _decodes_groups(p: AttentionProblem) -> bool:
    """Return whether a call has few queries and groups of heads: the kernel of a CPU loads keys again for each head."""
    group, queries = p.num_heads // max(p.num_heads_k, 1), max(p.seqlen_q, 1)
    if group < 4 or not (8 if p.head_dim > 64 else 4) <= group * queries <= 64:
        return False
    return _work(p) >= _DECODED_WORK and _work(p) >= _WORK_OF_A_QUERY * queries


def _kernel(p: AttentionProblem) -> ModuleType:
    return cpu if p.device == "cpu" else cuda if runs_flash(p) else efficient


def _notes(p: AttentionProblem) -> tuple[str, ...]:
    """Note the kernel of a call on a GPU, and the mask that a call on a CPU makes."""
    if p.device == "cuda":
        if not runs_flash(p):
            products = " by three products of TF32 on tensor cores" if p.dtype == torch.float32 else ""
            return (f"runs torch's memory-efficient attention{products}{_why_it_leads(p)}",)
        current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
        return (f"runs {current or 'FlashAttention-2'} of torch",)
    if p.device != "cpu" or not (cpu.needs_band(p) or p.mask is not None):
        return ()
    dtype = cpu.added_dtype(p)
    values = p.seqlen_q * p.seqlen_k if cpu.needs_band(p) or p.mask is None else p.mask.span()
    return (f"adds the mask to the scores, as {values * dtype.itemsize / 2**20:.1f} MB of {dtype_name(dtype)}",)


RULES: tuple[Rule, ...] = (
    Rule(
        "device",
        lambda p: p.device == "cpu" or (p.device == "cuda" and ((sm_number(p.arch) or 0) >= 80 or _is_rocm(p))),
        lambda p: (
            f"device is {p.device} {p.arch}; it runs on CPUs, and on GPUs from sm_80 on, or of AMD"
            if p.device == "cuda"
            else f"device is {p.device}; it runs on CPUs and GPUs"
        ),
        'use backend="auto"',
        example={"device": "sm_75"},
    ),
    Rule(
        "sequences",
        lambda p: p.sequences is None or (runs_flash(p) and not _is_rocm(p)),
        lambda p: (
            f"sequences are {'' if p.sequences is None else p.sequences.layout}, in {dtype_name(p.dtype)} on {p.arch}; "
            "FlashAttention-2 alone takes any, on NVIDIA GPUs: packed ones, in 16 bits, without mask and bias"
        ),
        'use backend="auto"',
        example={"device": "sm_80", "sequences": SequenceSpec("padded", 2, 4096, 4096, 4096, 4096)},
    ),
    Rule(
        "gpu_mask",
        _on_gpu(lambda p: p.mask is None),
        lambda p: f"a mask of {_span(p)} elements is set; the kernels of GPUs take no mask, but causality and windows",
        _TRITON,
        example={"device": "sm_80", "mask": (1, 1, 4096, 4096)},
    ),
    Rule(
        "gpu_scale",
        _on_gpu(lambda p: p.softmax_scale > 0),
        lambda p: (
            f"softmax_scale is {p.softmax_scale}; it needs to be above 0: FlashAttention-2 returns NaN for others"
        ),
        _TRITON,
        example={"device": "sm_80", "softmax_scale": 0.0},
    ),
    Rule(
        "rocm",
        lambda p: (
            not _is_rocm(p)
            or (runs_flash(p) and (p.window == (-1, -1) or (p.window == (-1, 0) and p.seqlen_q == p.seqlen_k)))
        ),
        lambda p: (
            f"the GPU is {p.arch}, where only calls in 16 bits without bias, and causality with as many keys as "
            "queries, are known to be right"
        ),
        'use backend="flex"',
        example={"device": "gfx942", "window_size": (9, 9)},
    ),
    Rule(
        "gpu_dtype",
        _on_efficient(
            lambda p: (
                p.dtype in (*_HALF, torch.float32)
                and (p.bias is None or p.bias.dtype == p.dtype)
                and p.head_dim * p.dtype.itemsize % 16 == p.head_dim_v * p.dtype.itemsize % 16 == 0
            )
        ),
        lambda p: (
            f"dtype is {dtype_name(p.dtype)}"
            + ("" if p.bias is None else f", bias has {dtype_name(p.bias.dtype)}")
            + f", and head dims are {p.head_dim} and {p.head_dim_v} (v); memory-efficient attention takes at most "
            "float32, a bias of the same dtype, and rows of 16 bytes each"
        ),
        _TRITON,
        example={"device": "sm_80", "bias": (1, 16, 4096, 4096), "bias_dtype": "fp32"},
    ),
    Rule(
        "gpu_groups",
        _on_efficient(lambda p: p.num_heads == p.num_heads_k),
        lambda p: (
            f"{p.num_heads} query heads share {p.num_heads_k} key-value heads; memory-efficient attention has no groups"
        ),
        _TRITON,
        example={"device": "sm_80", "kv_heads": 4, "bias": (1, 16, 4096, 4096)},
    ),
    Rule(
        "gpu_window",
        lambda p: p.device != "cuda" or not runs_flash(p) or cuda.is_right_for(p),
        lambda p: (
            f"the window is {p.window}, with {p.seqlen_q} queries and {p.seqlen_k} keys; FlashAttention-2 is wrong for "
            "windows with more queries than keys, which sequences may have"
        ),
        _TRITON,
        example={"device": "sm_80", "seqlen_k": 512, "window_size": (64, -1)},
    ),
    Rule(
        "gpu_band",
        _on_efficient(lambda p: p.window == (-1, -1) or (p.window == (-1, 0) and p.seqlen_q <= p.seqlen_k)),
        lambda p: (
            f"the window is {p.window}, with {p.seqlen_q} queries and {p.seqlen_k} keys; memory-efficient attention "
            "has wrong results for windows, and for causality with more queries than keys"
        ),
        _TRITON,
        example={"device": "sm_80", "window_size": (9, 9), "bias": (1, 16, 4096, 4096)},
    ),
    Rule(
        "gpu_causal_dbias",
        _on_efficient(lambda p: p.window[1] != 0 or not p.needs_grad.bias),
        lambda p: "the gradient of bias is needed with causality; memory-efficient attention leaves NaN in it",
        _TRITON_BACKWARD,
        ("backward",),
        example={"device": "sm_80", "is_causal": True, "bias": (1, 16, 4096, 4096), "bias_grad": True},
    ),
    Rule(
        "gpu_bias_span",
        _on_efficient(lambda p: p.bias is None or p.seqlen_q * efficient.padded_keys(p) <= _INT32_MAX),
        lambda p: (
            f"bias has {p.seqlen_q} rows of {p.seqlen_k}; memory-efficient attention indexes those of a head with 32 "
            f"bits, so at most {_INT32_MAX} values"
        ),
        _TRITON,
        example={"q": (1, 46344, 1, 64), "device": "sm_80", "bias": (1, 1, 46344, 46344)},
    ),
    Rule(
        "gpu_grid",
        _on_gpu(lambda p: _entries(p) <= _MOST_BLOCKS and p.num_heads <= _MOST_BLOCKS),
        lambda p: (
            f"the call has {_entries(p)} {'entries' if p.sequences is None else 'sequences and gaps'}, and "
            f"{p.num_heads} query heads; the grids of these kernels hold at most {_MOST_BLOCKS} of each"
        ),
        _TRITON,
        example={"q": (65536, 64, 4, 64), "device": "sm_80"},
    ),
    Rule(
        "gpu_head_dim",
        lambda p: not (runs_flash(p) and p.arch in _SMALL_SHARED_MEMORY and 192 < p.head_dim <= 224),
        lambda p: f"head dim is {p.head_dim}; FlashAttention-2 has no gradients for 193 to 224 on {p.arch}",
        _TRITON_BACKWARD,
        ("backward",),
        example={"q": (2, 1024, 4, 200), "device": "sm_89"},
    ),
    Rule(
        "gpu_lse",
        _on_gpu(lambda p: not p.return_lse),
        lambda p: "return_lse is set, and the kernels of GPUs take no gradient of lse",
        _TRITON_BACKWARD,
        ("backward",),
        example={"device": "sm_80", "return_lse": True},
    ),
    Rule(
        "gpu_order",
        _on_gpu(lambda p: not p.deterministic),
        lambda p: "deterministic is True; the kernels of GPUs add gradients up in any order",
        _TRITON_BACKWARD,
        ("backward",),
        example={"device": "sm_80", "deterministic": True},
    ),
    Rule(
        "head_dim",
        _on_cpu(lambda p: p.head_dim == p.head_dim_v),
        lambda p: f"head dims are {p.head_dim} and {p.head_dim_v} (v); the kernel of CPUs takes equal ones",
        'use backend="eager"',
        example={"device": "cpu", "head_dim_v": 32},
    ),
    Rule(
        "dbias",
        _on_cpu(lambda p: not p.needs_grad.bias),
        lambda p: "the gradient of bias is needed; the kernel of CPUs has none",
        _EAGER_BACKWARD,
        ("backward",),
        example={"device": "cpu", "dtype": "fp32", "bias": (1, 16, 1, 4096), "bias_grad": True},
    ),
)

AUTO_RULES: tuple[Rule, ...] = (
    Rule(
        "unpacked_mask",
        lambda p: p.mask_form in ("none", "dense"),
        lambda p: f"the mask has the form {p.mask_form!r}, and would be unpacked",
        _BY_NAME,
        ("forward",),
        example={"device": "cpu", "dtype": "fp32", "mask": (1, 1, 4096, 4096), "mask_prepared": True},
    ),
    Rule(
        "band_mask",
        _on_cpu(lambda p: _is_little(p) or not cpu.needs_band(p)),
        lambda p: f"the window {p.window} would be added as a mask, and eager visits only the keys inside it",
        _BY_NAME,
        ("forward",),
        example={"device": "cpu", "dtype": "fp32", "window_size": (9, 0)},
    ),
    Rule(
        "causal_blocks",
        _on_cpu(lambda p: not _skips_few_keys(p)),
        lambda p: f"the kernel visits many keys of {p.seqlen_k} that causality hides, and eager skips them",
        _BY_NAME,
        ("forward",),
        example={"device": "cpu", "dtype": "fp32", "q": (1, 512, 8, 64), "kv_heads": 2, "is_causal": True},
    ),
    Rule(
        "grouped_queries",
        _on_cpu(lambda p: not _decodes_groups(p)),
        lambda p: (
            f"{p.num_heads} query heads share {p.num_heads_k} key-value heads; the kernel reads {p.seqlen_k} keys for "
            f"each of them, and eager once for their {p.seqlen_q} queries"
        ),
        _BY_NAME,
        ("forward",),
        example={"device": "cpu", "dtype": "fp32", "q": (1, 16, 32, 64), "kv_heads": 8, "seqlen_k": 2048},
    ),
    Rule(
        "slow_dtype",
        _on_cpu(lambda p: p.dtype == torch.float32 or _is_little(p)),
        lambda p: f"dtype is {dtype_name(p.dtype)}, in which the kernel is not faster than eager",
        _BY_NAME,
        example={"device": "cpu"},
    ),
    Rule(
        "causal_backward",
        _on_cpu(lambda p: p.window == (-1, -1) or _is_little(p)),
        lambda p: f"the backward kernel visits every pair, also those outside of the window {p.window}",
        _BY_NAME,
        ("backward",),
        example={"device": "cpu", "dtype": "fp32", "is_causal": True},
    ),
)

BACKEND = Backend(
    name="sdpa",
    plan_forward=lambda p: _kernel(p).plan_forward(p),
    plan_backward=lambda p: _kernel(p).plan_backward(p),
    features=frozenset({"mask", "bias", "is_causal", "window_size", "deterministic", "return_lse", "sequences"}),
    rules=RULES,
    auto_rules=AUTO_RULES,
    probe=lambda: Availability(True),
    notes=_notes,
    reads_as_arrived=cpu.reads_as_arrived,
)
