"""Attention over the processes of a torch process group, each with a part of every sequence."""
