"""Faces for frameworks, imported by those who have them."""
