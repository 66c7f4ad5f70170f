"""Two configurations of one model under the same bursts."""
