"""The building of data sets: pictures with captions into shards of codes."""
