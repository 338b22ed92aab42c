"""HTTP for whoever serves clients: API keys, bodies within limits, and errors in OpenAI's form. The server and the adopting proxy use it.

Slow headers, idle connections, their number and TLS are left to a reverse proxy.
"""
