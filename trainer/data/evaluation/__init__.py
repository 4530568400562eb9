"""Sequences that a trained model is measured on."""
