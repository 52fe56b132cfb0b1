"""The fuzzers behind `weft fuzz`: random programs x layouts x schedules against the interpreter, random torch modules against torch."""
