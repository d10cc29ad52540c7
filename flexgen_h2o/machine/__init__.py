"""What this machine has: its limits, its devices, and what a measurement depends on."""
