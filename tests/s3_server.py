"""An S3 server on this machine, in this process (moto): real requests, whole and in parts.

python -m tests.s3_server COMMAND ...    runs a command that finds it
"""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from urllib import request

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "bucket"
ADDRESS = f"s3://{BUCKET}/run"


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Enter a context with a server that has one empty bucket; the environment variables by which clients find it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }
        request.urlopen(f"{variables['AWS_ENDPOINT_URL']}/moto-api/reset", data=b"")  # buckets outlive their server
        with reached_by(variables):
            boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield variables
    finally:
        server.stop()


@contextlib.contextmanager
def reached_by(variables: Mapping[str, str]) -> Iterator[None]:
    """Enter a context in which this process finds s3:// addresses on the server."""
    import s3fs

    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    s3fs.S3FileSystem.clear_instance_cache()  # an instance remembers its server
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        s3fs.S3FileSystem.clear_instance_cache()


if __name__ == "__main__":
    with s3_server() as variables:
        sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, **variables}).returncode)
