"""Conversion of models: from a recorded forward pass to norms in place, and back."""
