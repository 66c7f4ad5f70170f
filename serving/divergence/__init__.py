"""How far a tier's outputs are from the reference's: comparators, verdicts, quantiles, budgets.

Numpy only: gateways compare, and they have no torch.
"""
