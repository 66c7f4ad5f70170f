"""Networks of the embedded models. These modules import torch; only `ModelSource.build` imports them."""
