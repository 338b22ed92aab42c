"""HTTP for programs that serve clients: API keys, limits of bodies, and errors in OpenAI's form.

The server and the middlewares of `dejakv.adopt` use it. Slow headers, idle connections, their
number and TLS are left to a reverse proxy.
"""
