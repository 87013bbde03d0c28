"""What an optimizer's state and step take."""
