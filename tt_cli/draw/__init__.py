"""Prompts to pictures: candidates drawn from a checkpoint and ranked, PNG files, contact sheets, previews, a score.

clip_ranking.py is imported by whoever ranks: transformers is optional.
"""

from tt_cli.draw.contact_sheet import contact_sheet
from tt_cli.draw.drawing import Drawing, DrawingModels, DrawingSettings, cut_prompts, draw
from tt_cli.draw.picture_files import output_folder, save_drawings, text_chunks
from tt_cli.draw.preview import preview, way_to_show
from tt_cli.draw.recall import NeighbourScore, nearest_neighbour_score, recall
from tt_cli.draw.weights_source import WeightsSource, fetch_from_swarm, find_checkpoint, load_models

__all__ = [
    "Drawing",
    "DrawingModels",
    "DrawingSettings",
    "NeighbourScore",
    "WeightsSource",
    "contact_sheet",
    "cut_prompts",
    "draw",
    "fetch_from_swarm",
    "find_checkpoint",
    "load_models",
    "nearest_neighbour_score",
    "output_folder",
    "preview",
    "recall",
    "save_drawings",
    "text_chunks",
    "way_to_show",
]
