"""Makes torchvision's import work in this process and in others if its binary does not fit the torch that is there."""

import os
from pathlib import Path

import models


def environment_with_torchvision():
    """The environment of a process that imports torchvision. This process can import it, too."""
    environment = dict(os.environ)
    if models.import_torchvision() is not None:
        folders = [Path(__file__).parent / "torchvision_ops", Path(models.__file__).parent]
        paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment
