"""Images of prompts: read from wherever they are (sources.py), made into patches as the model's
processor does it (prepare.py), into embeddings by the model's vision tower (encode.py), and put in
the places of placeholders (placeholders.py). Embeddings are kept by content (cache.py).
"""
