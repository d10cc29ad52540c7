"""What a machine can do, and what follows from it: plain data, without torch."""
