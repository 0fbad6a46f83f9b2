"""The tiny model that is shipped with the package, made by `python -m jaxrl_sat.tools.pretrain`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def model_path() -> Path:
    """Folder of the embedded model, in the format of any Hugging Face checkpoint."""
    return Path(str(resources.files(__name__) / "model"))
