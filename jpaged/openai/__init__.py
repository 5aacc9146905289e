"""OpenAI's API: the bodies of its requests and answers, shared by batch files and a server.

protocol.py: what a request may say, strictly typed. json_text.py: how it is read. responses.py:
what an answer holds, and how it is made of an output. server/: all that over HTTP.
"""
