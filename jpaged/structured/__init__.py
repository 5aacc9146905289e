"""Answers of a given form: what a request asks for, and where each completion stands in it."""
