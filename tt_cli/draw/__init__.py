"""Prompts to pictures: candidates drawn from a checkpoint, PNG files, contact sheets, a score for demos."""

from tt_cli.draw.drawing import Drawing, cut_prompts, draw
from tt_cli.draw.files import output_folder, save_drawings
from tt_cli.draw.neighbours import NeighbourScore, nearest_neighbour_score
from tt_cli.draw.recall import recall
from tt_cli.draw.sheet import contact_sheet
from tt_cli.draw.source import Source, find_checkpoint, load_models, load_parameters

__all__ = [
    "Drawing",
    "NeighbourScore",
    "Source",
    "contact_sheet",
    "cut_prompts",
    "draw",
    "find_checkpoint",
    "load_models",
    "load_parameters",
    "nearest_neighbour_score",
    "output_folder",
    "recall",
    "save_drawings",
]
