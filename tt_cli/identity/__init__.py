"""Identity: keys, peer ids, passes, multiaddrs. Neither torch nor hivemind."""
