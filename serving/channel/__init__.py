"""The direct data channel: batches from a gateway to a tier's replica without a Serve call each.

Ray Serve stays the control plane: it places, restarts and removes the replicas. Each replica
listens on a socket of its own and says where; gateways connect, prove that they belong to the
same run, and send batches as frames of raw tensors. Knows neither torch nor ray.
"""
