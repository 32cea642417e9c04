"""How the dashboard looks: templates without a script, made on the server."""
