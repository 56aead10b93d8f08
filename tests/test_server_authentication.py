"""Clients of the server that must prove who they are, and connections that are encrypted."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import struct
import subprocess
import sys
from typing import Any

import aiokafka
import confluent_kafka
import pytest
import trustme
from support.forks import until
from support.patience import patient
from support.tiers import choose
from support.wire_client import WireClient, request_bytes

import embedlog
from embedlog.cli.serve import read_users
from embedlog.errors import InvalidConfigError
from embedlog.kafka.kafka_python import kafka
from embedlog.server.authentication import Authentication
from embedlog.server.error_codes import ErrorCode

USERS = {"alice": "wonder:land=", "b=b,": "s"}
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def authority_file(authority, tmp_path_factory):
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return str(path)


@pytest.fixture(scope="module")
def encrypted(authority):
    """What encrypts the connections of a server."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


def settings(server: Any, ca: str | None, mechanism: str, user: str, password: str) -> Any:
    """Return the settings of confluent-kafka's clients."""
    return {
        "bootstrap.servers": server.bootstrap_servers,
        "security.protocol": "SASL_SSL" if ca else "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password,
        **({"ssl.ca.location": ca} if ca else {}),
    }


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plaintext", "tls"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_confluent_kafka_proves_who_it_is(
    embedlog_log, encrypted, authority_file, mechanism, is_encrypted
):
    """By each mechanism, encrypted or not."""
    embedlog_log.create_topic("orders")
    context, ca = (encrypted, authority_file) if is_encrypted else (None, None)
    with embedlog.serve(embedlog_log, users=USERS, ssl_context=context) as server:
        for user, password in USERS.items():
            producer = confluent_kafka.Producer(settings(server, ca, mechanism, user, password))
            producer.produce("orders", user.encode())
            assert producer.flush(patient(30)) == 0
    assert sorted(record.value for record in embedlog_log.topic("orders")) == [b"alice", b"b=b,"]


@pytest.mark.parametrize("user", ["alice", "mallory"])
@pytest.mark.parametrize("mechanism", choose(test=["PLAIN", "SCRAM-SHA-512"], all=MECHANISMS))
def test_who_does_not_know_the_password_is_refused(embedlog_log, caplog, mechanism, user):
    """With Kafka's error, and a line in the log that does not say whether there is such a user."""
    errors: list[Any] = []
    with embedlog.serve(embedlog_log, users=USERS) as server:
        config = settings(server, None, mechanism, user, "guess")
        producer = confluent_kafka.Producer({**config, "error_cb": errors.append})
        deadline = patient(30)
        while not errors and deadline > 0:
            producer.poll(0.1)
            deadline -= 0.1
        until(lambda: caplog.messages, 10)
    assert errors[0].code() == confluent_kafka.KafkaError._AUTHENTICATION
    assert f"Authentication failed with the SASL mechanism {mechanism}" in errors[0].str()
    assert any(mechanism in line and user not in line for line in caplog.messages)


def test_kafka_python_and_aiokafka_prove_who_they_are(embedlog_log, encrypted, authority_file):
    """By SCRAM on connections that are encrypted."""
    embedlog_log.create_topic("orders")
    with embedlog.serve(embedlog_log, users=USERS, ssl_context=encrypted) as server:
        options: dict[str, Any] = {
            "bootstrap_servers": server.bootstrap_servers,
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "SCRAM-SHA-256",
            "sasl_plain_username": "alice",
            "sasl_plain_password": USERS["alice"],
        }
        producer = kafka.KafkaProducer(ssl_cafile=authority_file, **options)
        producer.send("orders", b"kafka-python").get(patient(30))
        producer.close()

        async def send() -> None:
            context = ssl.create_default_context(cafile=authority_file)
            async with aiokafka.AIOKafkaProducer(ssl_context=context, **options) as other:
                await other.send_and_wait("orders", b"aiokafka")

        asyncio.run(send())
    assert [record.value for record in embedlog_log.topic("orders")] == [
        b"kafka-python",
        b"aiokafka",
    ]


def test_a_client_is_told_the_host_name_that_the_certificate_has(
    embedlog_log, authority, authority_file
):
    """Not the IP address, for which the certificate would be refused."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    embedlog_log.create_topic("orders")
    with embedlog.serve(embedlog_log, ssl_context=context) as server:
        address = f"localhost:{server.port}"
        options = {"security.protocol": "SSL", "ssl.ca.location": authority_file}
        producer = confluent_kafka.Producer({"bootstrap.servers": address, **options})
        brokers = producer.list_topics(timeout=patient(30)).brokers
        assert [f"{each.host}:{each.port}" for each in brokers.values()] == [address]
        producer.produce("orders", b"confluent-kafka")
        assert producer.flush(patient(30)) == 0
        with kafka.KafkaProducer(
            bootstrap_servers=address, security_protocol="SSL", ssl_cafile=authority_file
        ) as other:
            other.send("orders", b"kafka-python").get(patient(30))
    assert {record.value for record in embedlog_log.topic("orders")} == {
        b"confluent-kafka",
        b"kafka-python",
    }


def test_certificates_of_clients_prove_who_they_are(
    embedlog_log, authority, authority_file, tmp_path
):
    """Without them no connection begins; with them, other addresses than loopback can be served."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority_file)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.issue_cert("127.0.0.1").configure_cert(context)
    mine = tmp_path / "client.pem"
    authority.issue_cert("client.example").private_key_and_cert_chain_pem.write_to_path(mine)
    with embedlog.serve(embedlog_log, "0.0.0.0", ssl_context=context) as server:
        config = {
            "bootstrap.servers": f"127.0.0.1:{server.port}",
            "security.protocol": "SSL",
            "ssl.ca.location": authority_file,
        }
        keys = {"ssl.certificate.location": str(mine), "ssl.key.location": str(mine)}
        with_keys = confluent_kafka.Producer({**config, **keys})
        assert with_keys.list_topics(timeout=patient(30)).brokers
        with pytest.raises(confluent_kafka.KafkaException):
            confluent_kafka.Producer(config).list_topics(timeout=2)


# On the wire


def ask_sasl(client: WireClient, mechanism: str, *messages: bytes) -> list[Any]:
    """Send the messages of a mechanism, and return the answers."""
    assert client.ask("SaslHandshake", 1, mechanism=mechanism).error_code == 0
    return [client.ask("SaslAuthenticate", 2, auth_bytes=each) for each in messages]


@pytest.fixture
def client(embedlog_log):
    with (
        embedlog.serve(embedlog_log, users=USERS) as server,
        WireClient(server.bootstrap_servers) as client,
    ):
        yield client


def test_nothing_is_answered_before(client):
    """Only what leads to SASL; anything else closes the connection.

    librdkafka before 2.11 asks for no handshake if that of version 0 is not named.
    """
    versions = {each.api_key: each.min_version for each in client.ask("ApiVersions", 2).api_keys}
    assert versions[17] == 0
    answer = client.ask("SaslHandshake", 1, mechanism="GSSAPI")
    assert answer.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM
    assert answer.mechanisms == list(MECHANISMS)
    client.send(request_bytes("Metadata", 12, topics=[]))
    assert client.answer() is None


def test_a_large_request_before_is_not_read(client):
    """Nor is there memory for it."""
    client.send(struct.pack(">ihh", 1 << 20, 36, 2))
    assert client.answer() is None


def test_authentication_is_once(client):
    assert not ask_sasl(client, "PLAIN", b"\0alice\0wonder:land=")[0].error_code
    assert client.ask("Metadata", 12, topics=[]).brokers
    answer = client.ask("SaslHandshake", 1, mechanism="PLAIN")
    assert answer.error_code == ErrorCode.ILLEGAL_SASL_STATE


FIRST = b"n,,n=alice,r=nonce"
MALFORMED = {
    "PLAIN": [b"", b"alice", b"\xff\0a\0b", b"bob\0alice\0wonder:land=", b"\0alice\0", b"\0\0"],
    "SCRAM-SHA-256": [
        *(b"", b"\xff", b"n,,", b"n,,n=alice", b"p=tls-unique,,n=alice,r=nonce"),
        *(b"n,a=bob,n=alice,r=nonce", b"n,,n=alice,r=nonce,tokenauth=true", b"n,,m=x,n=alice,r=1"),
    ],
}


@pytest.mark.parametrize(
    ("mechanism", "message"), [(name, each) for name, some in MALFORMED.items() for each in some]
)
def test_what_proves_nothing_closes_the_connection(client, mechanism, message):
    answer = ask_sasl(client, mechanism, message)[0]
    assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert client.answer() is None


@pytest.mark.parametrize("last", [b"", b"c=biws,r=other,p=AAAA", b"c=biws,r={},p=", b"c=,r={},p="])
def test_a_wrong_last_message_of_scram_closes_the_connection(client, last):
    nonce = ask_sasl(client, "SCRAM-SHA-256", FIRST)[0].auth_bytes.split(b",")[0][2:]
    answer = client.ask("SaslAuthenticate", 2, auth_bytes=last.replace(b"{}", nonce))
    assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert client.answer() is None


def test_a_password_is_not_asked_for_where_others_can_read_it():
    """A connection from another host that is not encrypted has SCRAM only."""
    request = type("Request", (), {"mechanism": "PLAIN"})
    answer = Authentication(USERS, private=False).sasl_handshake(request, None)
    assert answer["error_code"] == ErrorCode.UNSUPPORTED_SASL_MECHANISM
    assert answer["mechanisms"] == list(MECHANISMS[1:])


# Who may connect


def test_users_may_be_on_other_hosts(embedlog_log):
    """The server listens at an address that they reach; `insecure` would contradict."""
    with embedlog.serve(embedlog_log, "0.0.0.0", users=USERS) as server:
        address = f"127.0.0.1:{server.port}"
        with WireClient(address) as client:
            assert not ask_sasl(client, "PLAIN", b"\0alice\0wonder:land=")[0].error_code
    with pytest.raises(InvalidConfigError, match="must prove"):
        embedlog.serve(embedlog_log, users=USERS, insecure=True)


def test_who_is_gone_before_it_is_accepted_does_no_harm(embedlog_log):
    """Nor who speaks no TLS to a server that does."""
    reset = struct.pack("ii", 1, 0)
    with embedlog.serve(embedlog_log, insecure=True) as server:
        for _ in range(50):
            gone = socket.create_connection((server.host, server.port))
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            gone.close()
        with WireClient(server.bootstrap_servers) as client:
            assert client.ask("Metadata", 12, topics=[]).brokers


def test_who_speaks_no_tls_is_refused(embedlog_log, encrypted, caplog):
    with embedlog.serve(embedlog_log, ssl_context=encrypted) as server:
        with WireClient(server.bootstrap_servers) as client:
            client.send(request_bytes("Metadata", 12, topics=[]))
            until(lambda: caplog.messages)
    assert any("Closed the connection" in line for line in caplog.messages)


def test_closing_ends_connections_that_have_not_begun(embedlog_log, encrypted):
    """A client that sends nothing does not hold up the end of the server."""
    with embedlog.serve(embedlog_log, ssl_context=encrypted) as server:
        client = WireClient(server.bootstrap_servers)
    assert client.answer() is None
    client.close()


# The command


def users_file(path: Any, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_users_are_read_from_a_file(tmp_path):
    text = "# names\n\nalice:wonder:land=\nb=b,:s\r\n"
    assert read_users(users_file(tmp_path / "users", text)) == USERS


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("alice:secret\n", 0o640, "chmod 600"),
        ("alice\n", 0o600, "Line 1"),
        ("a:b\n:secret\n", 0o600, "Line 2"),
        ("alice:\n", 0o600, "Line 1"),
        ("# nobody\n", 0o600, "no user"),
    ],
)
def test_a_file_of_users_that_cannot_be_used_is_refused(tmp_path, text, mode, words):
    with pytest.raises(InvalidConfigError, match=words):
        read_users(users_file(tmp_path / "users", text, mode))


def test_the_command_serves_users_on_encrypted_connections(tmp_path, authority, authority_file):
    certificate = tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    users = users_file(tmp_path / "users", "alice:wonder\n")
    command = [sys.executable, "-m", "embedlog", "serve", str(tmp_path / "log"), "--json"]
    options = ["--listen", "0.0.0.0:0", "--users", users, "--cert", str(certificate)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE)
    port = json.loads(process.stdout.readline())["bootstrap_servers"].rpartition(":")[2]
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": f"127.0.0.1:{port}",
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "alice",
            "sasl.password": "wonder",
            "ssl.ca.location": authority_file,
        }
    )
    assert producer.list_topics(timeout=patient(30)).brokers
    process.send_signal(signal.SIGTERM)
    assert process.wait(patient(60)) == 0
    process.stdout.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--key", "k"], "without --cert"),
        (["--cert", __file__], "no certificate"),
        (["--cert", "/nowhere"], "No such file"),
        (["--users", "/nowhere"], "No such file"),
        (["--listen", "0.0.0.0:0"], "--users"),
    ],
)
def test_the_command_refuses_what_cannot_be(tmp_path, capsys, options, words):
    from embedlog.cli import main

    assert main(["serve", str(tmp_path / "log"), *options]) != 0
    assert words in capsys.readouterr().err
