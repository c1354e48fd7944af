"""Prompts to pictures: candidates drawn from a checkpoint and ranked, PNG files, contact sheets, previews, a score.

clip_ranking.py is imported by whoever ranks: transformers is optional.
"""
