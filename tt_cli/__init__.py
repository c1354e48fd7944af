"""`tt`: train a transformer together over the internet."""

__version__ = "0.1.0"
