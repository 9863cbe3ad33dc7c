"""The pages of the control plane: templates, static files and the views that fill them."""
