"""The DALL-E decoder and the VQGAN, in torch only: no network, no files."""

from tt_cli.model.config import DalleConfig
from tt_cli.model.dalle import Dalle
from tt_cli.model.losses import Losses
from tt_cli.model.vqgan import Vqgan, VqganConfig

__all__ = ["Dalle", "DalleConfig", "Losses", "Vqgan", "VqganConfig"]
