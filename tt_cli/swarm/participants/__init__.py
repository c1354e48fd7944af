"""Who takes part in the next round: selection, no-shows, stragglers."""
