"""Many engines behind one face: which of them gets a request, and what becomes of it where one dies.
Nothing here knows of Ray: see integrations/ray_serve.py.
"""
