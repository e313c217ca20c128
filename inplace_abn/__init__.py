"""In-place activated batch normalisation: batch norm and activation in one, in half the memory."""

from inplace_abn.conversion.convert import convert, load_public_state_dict, revert
from inplace_abn.conversion.formulas import register_norm
from inplace_abn.conversion.report import Report, analyze, report
from inplace_abn.conversion.verification import Verification, verify
from inplace_abn.functions import inplace_abn as inplace_abn
from inplace_abn.functions import inplace_abn_sync
from inplace_abn.guard import set_guard
from inplace_abn.modules.abn import ABN, InPlaceABN, InPlaceABNSync
from inplace_abn.modules.group import active_group, set_active_group
from inplace_abn.modules.group_norm import InPlaceGroupNorm, inplace_group_norm
from inplace_abn.modules.instance_norm import InPlaceInstanceNorm, inplace_instance_norm

__version__ = "2.0.0"

# The function inplace_abn is left out: a star import would give the package's name to it.
__all__ = [
    "ABN",
    "InPlaceABN",
    "InPlaceABNSync",
    "InPlaceGroupNorm",
    "InPlaceInstanceNorm",
    "Report",
    "Verification",
    "active_group",
    "analyze",
    "convert",
    "inplace_abn_sync",
    "inplace_group_norm",
    "inplace_instance_norm",
    "load_public_state_dict",
    "register_norm",
    "report",
    "revert",
    "set_active_group",
    "set_guard",
    "verify",
]
