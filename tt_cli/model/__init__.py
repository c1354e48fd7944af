"""The DALL-E decoder and the VQGAN, in torch only: no network, no files.

torch is loaded with the first name that needs it: the shape of a decoder, `DalleConfig`, does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tt_cli.model.dalle import Dalle
    from tt_cli.model.dalle_config import DalleConfig
    from tt_cli.model.losses import Losses
    from tt_cli.model.vqgan import Vqgan, VqganConfig

__all__ = ["Dalle", "DalleConfig", "Losses", "Vqgan", "VqganConfig"]

_FROM = {"DalleConfig": "dalle_config", "Dalle": "dalle", "Losses": "losses", "Vqgan": "vqgan", "VqganConfig": "vqgan"}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
