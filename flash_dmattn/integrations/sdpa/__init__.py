"""F.scaled_dot_product_attention with a mask computed by flash_dmattn, inside of a `with`; docs/sdpa.md."""

from .interception import intercept_sdpa
from .tally import Tally

__all__ = ["Tally", "intercept_sdpa"]
