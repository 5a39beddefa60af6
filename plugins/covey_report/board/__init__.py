"""Show all runs of a folder as a local web page that follows them."""
