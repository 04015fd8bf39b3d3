"""A local page to play with a bundle: samples, paths, uncertainty, bits/dim, restoration.

`actions` holds what the buttons do, as plain functions; `page` shows it, and alone knows gradio.
"""
