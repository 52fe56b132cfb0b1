"""What a program costs: the work of its nodes, its price on a cluster, its memory, and its steps in time."""
