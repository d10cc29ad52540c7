"""Measures what this machine can do, one module per subject; profile.py puts it together."""
