"""Test that callers are admitted by API key, join token or admin token, and refused with the reason."""

import pytest

from coordinator.api.authentication import Authenticator, Caller
from coordinator.config import CoordinatorConfig
from outrider.core.errors import BadRequest, PermissionDenied
from outrider.wire.v1 import coordinator_pb2 as pb

ACME, GLOBEX = "acme-key-0123456789", "globex-key-0123456789"
JOIN, ADMIN = "join-token-0123456789", "admin-token-0123456789"


def bearing(secret):
    return (("authorization", f"Bearer {secret}"),)


@pytest.fixture
def tenants_file(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(f'[tenants]\nacme = "{ACME}"\nglobex = "{GLOBEX}"\n')
    return path


async def test_a_tenant_cannot_take_over_anothers_session(start, tenants_file, refused):
    coordinator = await start(tenants_file=tenants_file)
    await coordinator.join("v1")
    opened = await coordinator.sessions.OpenSession(pb.OpenSessionRequest(), metadata=bearing(ACME))
    order = pb.ResumeSessionRequest(session_id=opened.session_id, ticket=opened.primary.ticket)
    stolen = coordinator.sessions.ResumeSession(order, metadata=bearing(GLOBEX))
    error = await refused(stolen)
    assert isinstance(error, PermissionDenied)
    assert "acme" not in str(error)
    await coordinator.sessions.ResumeSession(order, metadata=bearing(ACME))


async def test_beyond_loopback_admin_is_off_until_it_has_a_token():
    settings = {"listen": "0.0.0.0:7700", "tenant_keys": {"acme": ACME}, "join_token": JOIN}
    with pytest.raises(PermissionDenied, match="ADMIN_TOKEN"):
        Authenticator(CoordinatorConfig(**settings)).check_operator(())
    Authenticator(CoordinatorConfig(**settings, admin_token=ADMIN)).check_operator(bearing(ADMIN))
    Authenticator(CoordinatorConfig(**settings, insecure=True)).check_operator(())


async def test_on_loopback_everybody_is_the_default_tenant():
    access = Authenticator(CoordinatorConfig())
    assert await access.tenant(()) == Caller("default")
    access.check_verifier(())
    access.check_operator(())


@pytest.mark.parametrize(
    ("given", "missing"),
    [({}, "API keys"), ({"tenant_keys": {"acme": ACME}}, "join token"), ({"join_token": JOIN}, "API keys")],
)
def test_beyond_loopback_secrets_are_needed_unless_insecure(given, missing):
    with pytest.raises(BadRequest, match=rf"{missing}.*--insecure"):
        Authenticator(CoordinatorConfig(listen="0.0.0.0:7700", **given))
    Authenticator(CoordinatorConfig(listen="0.0.0.0:7700", insecure=True, **given))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "no TOML"),
        ("x = 1", r"\[tenants\]"),
        ("[tenants]\nacme = 5", r"\[tenants\]"),
        ('[tenants]\nacme = "short"', "length of acme's key is 5"),
        (f'[tenants]\n"a b" = "{ACME}"', "letters, digits"),
        (f'[tenants]\na = "{ACME}"\nb = "{ACME}"', "same key"),
    ],
)
def test_a_senseless_tenants_file_is_refused_with_the_reason(tmp_path, text, complaint):
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(BadRequest, match=complaint) as caught:
        Authenticator(CoordinatorConfig(tenants_file=path))
    assert ACME not in str(caught.value)


async def test_keys_from_file_and_environment_add_up(tenants_file, monkeypatch):
    monkeypatch.setenv("OUTRIDER_COORDINATOR_TENANT_KEYS", '{"initech": "initech-key-0123456789"}')
    access = Authenticator(CoordinatorConfig(tenants_file=tenants_file))
    assert (await access.tenant(bearing("initech-key-0123456789"))).name == "initech"
    assert (await access.tenant(bearing(GLOBEX))).name == "globex"
