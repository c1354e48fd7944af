"""Text for language models: documents, examples of tokens in a row, and a baseline to compare with."""
