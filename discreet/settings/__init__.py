"""What a person can set: frozen sections, nested as conf/ is, which check themselves."""
