"""The state of training on its way to a newcomer: bridge, server, client, trusted digests."""
