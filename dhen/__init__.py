"""The model family: Deep and Hierarchical Ensemble Networks (arXiv 2203.11014), in PyTorch alone."""
