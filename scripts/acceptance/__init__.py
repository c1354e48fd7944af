"""What a real GPU must do before it is trusted: `scripts/gpu_acceptance`."""
