"""A real federation: SuperLink, SuperNodes, the gate, certificates."""
