"""OpenAI's API: the bodies of its requests and answers, which batch files and a server share.

protocol.py says what a request may hold, with strict types; json_text.py parses it. responses.py
says what an answer holds, and makes answers from outputs. server/ offers both over HTTP.
"""
