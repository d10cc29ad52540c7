"""What eviction costs in quality, and what there is in attention to evict by."""
