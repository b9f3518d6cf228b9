"""Settings that a person writes: frozen sections, nested as conf/ is, which check themselves."""
