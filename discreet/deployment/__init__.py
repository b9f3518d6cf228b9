"""A real federation: SuperLink, SuperNodes, the node proxy, certificates."""
