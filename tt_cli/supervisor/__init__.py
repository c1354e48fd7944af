"""Starts, watches and ends processes; carries typed events from them. No torch here."""
