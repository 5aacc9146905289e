"""jpaged in the forms that others use: batch files."""
