"""What every room needs: errors that people can mend, sizes of memory, folders, JSON files."""
