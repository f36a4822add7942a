"""What reads NumPyro's messages and traces of models with GP sites."""
