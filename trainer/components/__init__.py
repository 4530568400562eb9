"""Components of the training loop: loss, optimizer, metrics, profiles, and the text that a model writes."""
