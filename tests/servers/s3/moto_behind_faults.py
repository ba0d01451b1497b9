"""An S3 server: moto behind the fault layer."""

from __future__ import annotations

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

from servers.s3.http import serve

if __name__ == "__main__":
    serve(DomainDispatcherApplication(create_backend_app))
