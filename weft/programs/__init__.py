"""Complete programs with their schedules: optimizers, transformer blocks, the pipeline boundary."""
