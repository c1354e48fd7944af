"""The DALL-E decoder and the VQGAN, in torch only: no network, no files. `dalle_config` needs no torch."""
