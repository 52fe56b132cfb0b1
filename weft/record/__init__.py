"""What a run was predicted to do and did: its record, and its progress as it is printed."""
