"""Measuring this engine beside others that do the same job."""
