"""One all-reduce: the round's plan, the transfer, the average of each part, the commit, its result."""
