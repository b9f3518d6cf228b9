"""Settings that users write: frozen sections, nested as in conf/, that check themselves."""
