"""In-place activated batch normalisation: batch norm and activation in one, in half the memory."""

from inplace_abn.abn import ABN, InPlaceABN, InPlaceABNSync
from inplace_abn.conditioning import check_conditioning
from inplace_abn.functions import inplace_abn, inplace_abn_sync
from inplace_abn.group import active_group, set_active_group

__version__ = "1.0.0"

__all__ = [
    "ABN",
    "InPlaceABN",
    "InPlaceABNSync",
    "active_group",
    "check_conditioning",
    "inplace_abn",
    "inplace_abn_sync",
    "set_active_group",
]
