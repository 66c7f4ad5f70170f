"""`make bench`: Halftone beside other servers, the same models, inputs, threads and cores for all."""
