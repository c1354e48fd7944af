"""Limits of a household: hours, temperatures, an idle desktop."""
