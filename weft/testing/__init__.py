"""What tests and the fuzzer stand on: layouts by enumeration, random programs, meanings compared."""
