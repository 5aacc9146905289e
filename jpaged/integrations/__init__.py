"""jpaged in the forms that other programs use: batch files, Ray, lm-eval and tunix."""
