"""What reads NumPyro's messages and traces of models with GP sites."""

__all__: list[str] = []  # its modules are imported by name
