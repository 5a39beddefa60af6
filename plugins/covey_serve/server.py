"""Load a model and serve it until the process is interrupted."""

import ipaddress
import os
import secrets
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import uvicorn
from starlette.routing import Route

from covey.config.recipe import AnyRecipe
from covey.display import echo, show_log
from covey.errors import CoveyError
from covey.recipes.load_model import load_for
from covey_report.http import server_config
from covey_serve.app import make_app
from covey_serve.journal import Journal
from covey_serve.options import ServeOptions
from covey_serve.service import Limits, Service
from covey_serve.states import States
from covey_serve.tinker import Tinker
from covey_serve.training import Trainer

KEY_MODE = 0o600
MAX_KEY = 4096


def serve(source: str, options: ServeOptions) -> None:
    """Serve the model or run at `source`.

    Raises:
        CoveyError: the address is not this machine's alone and there is no key, the port is not free, or as for
            `load_for`.
    """
    if options.key_file is None and not is_loopback(options.host):
        raise CoveyError(
            f"{options.host} can be reached from other machines, and there is no key",
            want="--host 127.0.0.1, or a key that clients must know",
            fix="--key-file FILE, which is made with a new key if it is not there",
        )
    # uvicorn raises the signal that ended it once more, which would skip what follows.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    key = None if options.key_file is None else read_key(Path(options.key_file).expanduser())
    with listen(options.host, options.port) as listener:
        service = load_service(source, options)
        try:
            with suppress(KeyboardInterrupt), training_routes(service, options.state) as routes:
                config = server_config(make_app(service, routes, key, shows=True), options.max_connections)
                host, port = listener.getsockname()[:2]
                echo(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")
                uvicorn.Server(config).run(sockets=[listener])
        finally:
            service.close()


@contextmanager
def training_routes(service: Service, state: str | None) -> Iterator[list[Route]]:
    """Open the folder of states and journal, and return the routes of the training API."""
    with TemporaryDirectory(prefix="covey-serve-") as temporary, ExitStack() as opened:
        folder, journal, runs = Path(temporary), None, None
        if state is not None:
            folder = Path(state).expanduser()
            journal, runs = opened.enter_context(closing(Journal(folder / "journal"))), folder / "runs"
        trainer = Trainer(service.model)
        tinker = Tinker(service, trainer, States(folder / "states", trainer), journal, runs)
        opened.callback(tinker.close)
        if count := tinker.replay():
            echo(f"{folder}: {count} requests are done again")
        yield tinker.routes()


def load_service(source: str, options: ServeOptions) -> Service:
    """Load the model, and start its engine."""
    with show_log(info=echo, warning=echo):
        model, tokenizer, origin = load_for(AnyRecipe(), source=source)
    rollout, positions = options.rollout, model.config.max_positions
    longest = max(1, positions - rollout.max_new_tokens)
    rollout = replace(rollout, max_prompt_length=min(rollout.max_prompt_length, longest))
    name = options.name or Path(source).name
    limits = Limits(options.max_body_bytes, options.max_seconds, options.max_samples)
    return Service(name, model, tokenizer, rollout, limits, origin)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; port 0 is any free one.

    Raises:
        CoveyError: the port is in use, or not for this user, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise CoveyError(
            f"cannot listen on {host}, port {port}: {error.strerror}", fix="--port 0 takes a free one"
        ) from error


def read_key(path: Path) -> str:
    """Return the key in a file that its owner alone may read; make the file with a new key if there is none.

    Raises:
        CoveyError: others may read the file, or there is no key in it.
    """
    with (
        suppress(FileExistsError),
        os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, KEY_MODE), "w") as file,
    ):
        file.write(f"tml-{secrets.token_urlsafe(32)}\n")  # Tinker's client takes no key that begins otherwise
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        key = file.read(MAX_KEY).strip()
    if mode & ~KEY_MODE:
        raise CoveyError(
            f"others may use this key: its mode is {mode:o}", want="600", fix=f"chmod 600 {path}", where=str(path)
        )
    if len(key) < 16:
        raise CoveyError(
            "there is no key of 16 characters or more", fix="remove the file, and a new one is made", where=str(path)
        )
    return key
