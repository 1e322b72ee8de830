"""The CUDA extension for Hopper GPUs as a backend: its probe and its notes."""

from __future__ import annotations

from ...gradients import accepts_packed_layout
from ...problem import AttentionProblem, fits_tma
from ..mask_choice import interval_notes
from ..protocol import Availability, Backend, Probe
from . import extension, sequences
from .group_rows import has_group_rows
from .operands import copies_bias, copy_note, forward_copies_bias
from .parts import part_notes, refuses_entries
from .passes import plan_backward, plan_forward, takes_fresh
from .rules import AUTO_RULES, RULES


def _load() -> Availability:
    try:
        loaded = extension.load()
    except extension.ExtensionMismatchError as error:
        return Availability(False, str(error), "rebuild it, or install what it needs: docs/building.md", error)
    except Exception as error:  # a broken installation raises anything; a probe reports it
        if isinstance(error, ModuleNotFoundError) and error.name == extension.NAME:
            hint, failed = f"build it in a checkout: {extension.BUILD_COMMAND}; docs/building.md", extension.not_built()
            if failed is None:
                return Availability(False, str(error), hint, error)
            return Availability(False, f"{error}; its build said: {failed.reason}", hint, error, failed.output)
        return Availability(False, f"the CUDA extension cannot be loaded: {error}", "rebuild it", error)
    driver, runtime = loaded.cuda_versions()
    if driver // 1000 < runtime // 1000:
        return Availability(
            False,
            f"the driver supports CUDA {_dotted(driver)}; the extension holds the runtime of {_dotted(runtime)}",
            "update the driver, or build the extension with an older nvcc",
        )
    return Availability(True)


probe = Probe(_load)


def _dotted(version: int) -> str:
    """Format the number of a CUDA version: 13000 as 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _notes(problem: AttentionProblem) -> tuple[str, ...]:
    return (*_invariant_note(problem), *_notes_of_layout(problem))


def _invariant_note(p: AttentionProblem) -> tuple[str, ...]:
    if not p.flags.invariant:
        return ()
    return ("is invariant: a row's bits depend on the row alone, by blocks of 128 keys, the last one first",)


def _notes_of_layout(problem: AttentionProblem) -> tuple[str, ...]:
    if problem.sequences is not None:
        return sequences.notes(problem)
    p = problem
    rows = tuple(
        f"copies {name}, of strides {tuple(strides)}: TMA reads rows of unit stride that start on 16 bytes"
        for name, (shape, strides) in zip("qkv", p.rows, strict=True)
        if not fits_tma(shape, strides, p.dtype.itemsize)
    )
    is_copied = copies_bias(p) and (any(p.needs_grad) or forward_copies_bias(p))
    bias = (copy_note(p),) if is_copied else ()
    lists = ("walks the listed tiles: each pass makes lists of tiles of the mask",) if p.mask_form == "lists" else ()
    return interval_notes(problem, gathers=False) + lists + rows + bias + part_notes(p)


BACKEND = Backend(
    name="cuda",
    plan_forward=plan_forward,
    plan_backward=plan_backward,
    features=frozenset({"mask", "bias", "is_causal", "softcap", "window_size", "deterministic", "return_lse", "sink"})
    | {"sequences", "paged", "dropout_p", "lists", "relative_bias", "max_scores"},
    rules=RULES,
    auto_rules=AUTO_RULES,
    probe=probe,
    notes=_notes,
    mask_forms=frozenset({"tiles", "intervals"}),
    # With one query, the mask is packed later, because the heads of a group become rows of one tile.
    reads_dense=lambda problem, direction: direction == "forward" and has_group_rows(problem),
    # Passes take tokens without views, but not head-first tensors.
    takes_fresh=takes_fresh,
    reads_as_arrived=lambda problem, direction: (
        problem.arrival == "tokens" and accepts_packed_layout(problem, direction)
    ),
    refuses_entries=refuses_entries,
    wide_lse=True,
    is_invariant=True,
    stores_dbias=True,
)
