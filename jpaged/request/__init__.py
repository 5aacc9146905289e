"""A caller's side of a request: prompts, the requests made of them, text, outputs."""
