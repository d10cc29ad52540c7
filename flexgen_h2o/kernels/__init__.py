"""Products and attention: native, Triton's, and torch's operations, which the others are held against."""
