"""Ways into a program: functions traced in weft's language, and PyTorch models captured."""
