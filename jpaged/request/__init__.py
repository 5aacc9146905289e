"""A caller's side of a request: prompts, sampling parameters, text, outputs."""
