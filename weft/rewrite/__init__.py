"""Rules: two expressions in the language with typed holes, matched on DAGs, applied at a place, proved."""
