"""Vision towers: each makes rows of embeddings [rows, E] of the patches of images, which stand in a
prompt in place of the embeddings of tokens.

A tower is described like a layer of the decoder: its config says which parameters it has, what
Hugging Face files call them, and builds the module. The parameters lie in the same tree as those of
the text model, under "vision", so that they are trained, split over a mesh and quantised likewise.
"""
