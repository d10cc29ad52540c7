"""A model: its architecture, its mathematics, its checkpoint's files, its tokenizer."""
