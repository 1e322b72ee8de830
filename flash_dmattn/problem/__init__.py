"""One attention call described without tensors: sizes, layouts, band, flags, architecture, and checks of arguments."""

from .arch import device_arch, parse_arch, sm_number
from .band import Band, allowed_pairs, causal_window, keys_of_query, make_band
from .bias import BiasClass, bias_class
from .checks import (
    as_scores,
    batch_names,
    check_broadcast,
    check_dropout,
    check_flag,
    check_scale,
    check_softcap,
    check_window,
)
from .description import (
    FEATURES,
    FLOAT_DTYPES,
    PACKED_QUERIES,
    AttentionProblem,
    Flags,
    Gradients,
    Layout,
    MaskForm,
    MaskView,
    NeedsGrad,
    Packing,
    SequenceSpec,
    SequenceView,
    Shape4,
    TensorSpec,
    dtype_name,
    spec_of,
    unpacked_spec,
)
from .group_rows import heads_as_rows
from .hints import hint, hinted
from .leading import Repeats, fold_call, merge, unfold
from .mapped import MappedCall
from .sequences import RANKS, check_scores, check_sequence_tiles, check_tree, packing_of
from .tma import fits_tma

__all__ = [
    "FEATURES",
    "FLOAT_DTYPES",
    "PACKED_QUERIES",
    "AttentionProblem",
    "Band",
    "BiasClass",
    "Flags",
    "MappedCall",
    "Gradients",
    "Layout",
    "MaskForm",
    "MaskView",
    "NeedsGrad",
    "Packing",
    "RANKS",
    "Repeats",
    "SequenceSpec",
    "SequenceView",
    "Shape4",
    "TensorSpec",
    "allowed_pairs",
    "as_scores",
    "batch_names",
    "bias_class",
    "causal_window",
    "check_broadcast",
    "check_dropout",
    "check_flag",
    "check_scale",
    "check_scores",
    "check_sequence_tiles",
    "check_softcap",
    "check_tree",
    "check_window",
    "device_arch",
    "dtype_name",
    "fits_tma",
    "fold_call",
    "heads_as_rows",
    "hint",
    "hinted",
    "keys_of_query",
    "make_band",
    "merge",
    "packing_of",
    "parse_arch",
    "sm_number",
    "spec_of",
    "unfold",
    "unpacked_spec",
]
