"""What is read from and written to the Hugging Face Hub."""
