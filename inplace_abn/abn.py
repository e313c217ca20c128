"""The modules under the name that the PyPI package gives their file."""

from inplace_abn.modules.abn import ABN, InPlaceABN, InPlaceABNSync

__all__ = ["ABN", "InPlaceABN", "InPlaceABNSync"]
