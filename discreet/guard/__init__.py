"""A site's guard: runs code that nobody at the site has reviewed, while every patient stays
private."""
