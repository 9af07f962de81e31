"""torch: operators that torch.compile, torch.export and vmap know, and what is built on them."""
