"""A second judge of rules: Z3, on a meaning of ops, ranks and collectives written here and shared with no other proof."""
