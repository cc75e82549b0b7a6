"""Parts that modules share."""
