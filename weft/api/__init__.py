"""What a torch user calls."""
