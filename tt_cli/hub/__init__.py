"""Reading from and writing to the Hugging Face Hub."""
