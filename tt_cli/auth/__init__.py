"""Login and admission: the Hugging Face account in use here, and whether a run admits it."""
