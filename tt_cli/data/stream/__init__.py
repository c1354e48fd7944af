"""Examples for training: shards found, fetched, cached, read and shuffled."""
