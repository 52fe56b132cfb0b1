"""Program to program: what is done to a placed training step before it is lowered."""
