"""Many engines behind one face: which of them gets a request, and what becomes of it where
one dies.

Only cluster.py, on_ray.py and serve_router.py know of Ray.
"""
