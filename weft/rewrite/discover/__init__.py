"""Rules found from op specs alone: enumerate expressions, group them by fingerprint, generalise, keep the fewest, prove."""
