"""What a client does with a train request: policy, budgets, its own ledger, its update."""
