"""What runs a real federation: SuperLink, SuperNodes, the gate, certificates."""
