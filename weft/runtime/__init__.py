"""What runs on the ranks: peer memory, barriers, faults, launching, and the loading of generated code."""
