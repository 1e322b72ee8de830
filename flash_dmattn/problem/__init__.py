"""One attention call described without tensors: sizes, layouts, band, flags, architecture, and checks of arguments."""

from .arch import device_capability
from .band import Band, keys_of_query, make_band
from .checks import as_scores, check_broadcast, check_flag, check_scale, check_softcap, check_window
from .description import (
    FLOAT_DTYPES,
    AttentionProblem,
    Gradients,
    MaskForm,
    MaskTensors,
    Need,
    Shape4,
    TensorSpec,
    dtype_name,
    unpacked_spec,
)
from .tma import fits_tma

__all__ = [
    "FLOAT_DTYPES",
    "AttentionProblem",
    "Band",
    "Gradients",
    "MaskForm",
    "MaskTensors",
    "Need",
    "Shape4",
    "TensorSpec",
    "as_scores",
    "check_broadcast",
    "check_flag",
    "check_scale",
    "check_softcap",
    "check_window",
    "device_capability",
    "dtype_name",
    "fits_tma",
    "keys_of_query",
    "make_band",
    "unpacked_spec",
]
