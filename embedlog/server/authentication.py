"""Who is at the other end of a connection: SASL with PLAIN, or SCRAM by RFC 5802."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any

from embedlog.server.answers import Caller, Fields
from embedlog.server.error_codes import ApiError, ErrorCode

PLAIN = "PLAIN"
_HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
_ITERATIONS = 4096
"""What Kafka takes by default, and the least that RFC 7677 allows."""
_Step = Callable[[bytes], tuple[bytes, Any]]
"""Returns the answer to what a client sends, and the next step; None after the last one."""


class Authentication:
    """The authentication of one connection; it answers the two requests of SASL.

    Args:
        users: The passwords by the names of the users; None if nobody must prove who they are.
        private: Whether nobody else can read the connection: only then a client may send its
            password as it is.
    """

    def __init__(self, users: Mapping[str, str] | None, private: bool) -> None:
        self._users = users
        self._mechanisms = [*([PLAIN] if private else []), *_HASHES]
        self._mechanism, self._refusal = "", ""
        self._step: _Step | None = None
        self.is_pending = users is not None
        """Whether the client has not proved yet who it is."""

    def sasl_handshake(self, request: Any, caller: Caller) -> Fields:
        """Answer: begins the authentication by a mechanism."""
        names = self._mechanisms if self._users is not None else []
        if not self.is_pending:
            code = ErrorCode.ILLEGAL_SASL_STATE
        elif request.mechanism not in names:
            code = ErrorCode.UNSUPPORTED_SASL_MECHANISM
        else:
            code, self._mechanism = ErrorCode.NONE, request.mechanism
            self._step = self._plain if self._mechanism == PLAIN else self._first
        return {"error_code": int(code), "mechanisms": names}

    def sasl_authenticate(self, request: Any, caller: Caller) -> Fields:
        """Answer: the next step of a mechanism.

        Raises:
            ApiError: The client has not proved who it is.
        """
        if self._step is None:
            raise ApiError(ErrorCode.ILLEGAL_SASL_STATE, "SaslHandshake must come first")
        try:
            answer, self._step = self._step(request.auth_bytes)
        except ValueError:  # Also of base64 and UTF-8.
            self._refusal = f"Authentication failed with the SASL mechanism {self._mechanism}"
            raise ApiError(ErrorCode.SASL_AUTHENTICATION_FAILED, self._refusal) from None
        self.is_pending = self._step is not None
        return {"auth_bytes": answer}

    def check(self) -> None:
        """Raise `ApiError` if the client has been told that it has not proved who it is."""
        if self._refusal:
            raise ApiError(ErrorCode.SASL_AUTHENTICATION_FAILED, self._refusal)

    def _plain(self, message: bytes) -> tuple[bytes, None]:
        other, name, password = message.decode().split("\0")
        _check(other in ("", name))
        _check(hmac.compare_digest(password.encode(), self._password(name).encode()))
        return b"", None

    def _password(self, name: str) -> str:
        """Return a password that nobody knows for a user that does not exist."""
        return (self._users or {}).get(name) or secrets.token_hex()

    def _first(self, message: bytes) -> tuple[bytes, _Step]:
        """Take ``n,,n=NAME,r=NONCE``, and answer with the salt."""
        binding, other, text = message.decode().split(",", 2)
        # Channel binding is not offered, and Kafka's extension for tokens is not known.
        _check(binding in ("n", "y"))
        fields = dict(each.split("=", 1) for each in text.split(","))
        _check({"n", "r"} <= fields.keys() and not fields.keys() & {"m", "tokenauth"})
        _check(other in ("", f"a={fields['n']}"))
        name = fields["n"].replace("=2C", ",").replace("=3D", "=")
        salt, nonce = secrets.token_bytes(24), fields["r"] + secrets.token_urlsafe(24)
        answer = f"r={nonce},s={b64encode(salt).decode()},i={_ITERATIONS}"
        head = b64encode(f"{binding},{other},".encode()).decode()

        def last(message: bytes) -> tuple[bytes, None]:
            """Take ``c=HEAD,r=NONCE,p=PROOF``, and prove that the server knows the user, too."""
            shown, _, proof = message.decode().rpartition(",p=")
            # librdkafka before 2.6.1 repeats its own part; Kafka, too, looks at the end only.
            _check(shown.startswith(f"c={head},r=") and shown.endswith(nonce))
            return self._proved(name, salt, f"{text},{answer},{shown}".encode(), b64decode(proof))

        return answer.encode(), last

    def _proved(self, name: str, salt: bytes, said: bytes, proof: bytes) -> tuple[bytes, None]:
        """Check a proof of all that both have said, and return that of the server."""
        kind = _HASHES[self._mechanism]
        salted = hashlib.pbkdf2_hmac(kind, self._password(name).encode(), salt, _ITERATIONS)
        client_key = hmac.digest(salted, b"Client Key", kind)
        signature = hmac.digest(hashlib.new(kind, client_key).digest(), said, kind)
        expected = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        _check(hmac.compare_digest(proof, expected))
        verifier = hmac.digest(hmac.digest(salted, b"Server Key", kind), said, kind)
        return b"v=" + b64encode(verifier), None


def _check(holds: bool) -> None:
    if not holds:
        raise ValueError
