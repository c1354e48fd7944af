"""Checks of what would keep a peer from working on this machine, each with its fix: `tt doctor`."""
