"""A model's weights at their homes: in memory, and in files that later runs use again."""
