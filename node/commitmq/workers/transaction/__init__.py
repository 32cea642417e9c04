"""The transaction process: ends transactions, and checks those without an end."""
