"""Membership: passes at every door, the organiser's notices and orders."""
