"""The participants of the next round: selection, no-shows, stragglers."""
