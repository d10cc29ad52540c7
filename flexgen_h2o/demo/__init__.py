"""The small trained OPT model that ships with the package, and its held-out text."""
