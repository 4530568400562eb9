"""Documents in sequences of one length, by concatenation, by best fit, or one a sequence."""
