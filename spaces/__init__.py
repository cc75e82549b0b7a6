"""What may vary: axes, spaces, their sizes."""
