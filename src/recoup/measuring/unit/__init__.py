"""One unit by itself: bytes and seconds under each recipe."""
