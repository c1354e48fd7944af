"""The authority of a closed run: it asks the Hub who somebody is, and signs passes, bans and orders."""
