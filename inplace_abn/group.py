"""Process groups under the name that the PyPI package gives their file."""

from inplace_abn.modules.group import active_group, set_active_group

__all__ = ["active_group", "set_active_group"]
