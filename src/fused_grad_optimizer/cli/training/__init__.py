"""What `forge train` does, one concept a file."""
