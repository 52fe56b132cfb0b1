"""Whether a rule holds: refuted over finite fields, proved for all values at small sizes, proved for all sizes."""
