"""Which entries of the KV cache stay: what is asked for, and a file for every policy."""
