"""A site's guard: it runs code that nobody at the site has read, and each patient stays private."""
