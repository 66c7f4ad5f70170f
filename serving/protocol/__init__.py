"""The wire: HTTP messages, the Open Inference Protocol, and the server that carries them."""
