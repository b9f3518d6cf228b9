"""A node's side: admission, policy, its data, its ledger, its release, and the ClientApp."""
