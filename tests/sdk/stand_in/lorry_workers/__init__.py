"""A stand-in for the workers' package, for the tests of the stack alone. It trains nothing."""
