"""The `ModelSource` contract and the embedded models."""
