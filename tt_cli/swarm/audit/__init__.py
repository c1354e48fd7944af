"""Audits of averages: parts computed again, and evidence against whoever reduced wrongly."""
