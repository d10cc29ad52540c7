"""What the commands share: flags, signals, exit codes, progress."""
