"""How fast Halftone is, and beside what: load generators, benchmarks, the servers it is measured against."""
