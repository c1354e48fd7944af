"""The network: the DHT's node, addresses, reachability, connectivity, bandwidth, limits on streams."""
