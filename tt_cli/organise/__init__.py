"""Preparing a run: set it up (`tt init`), check it (`tt check`), publish it on the Hub."""
