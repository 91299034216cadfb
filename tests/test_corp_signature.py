"""Signatures of releases by keys and certificates, and their checks of changed, foreign and broken files."""

import base64
import datetime
import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from corp_deploy.release import signer as signing
from corp_deploy.release.names import ATTESTATION, PROVENANCE, SIGNATURE
from corp_deploy.release.signature import Unverified, hashing_config
from corp_deploy.release.signer import KeySigner, SigstoreSigner, sign
from corp_deploy.release.verifier import Certified, PublicKey, Sigstore
from ground.errors import Missing
from tests.command import invoked

pytest.importorskip("model_signing", reason="model-signing is not installed: pip install 'corp-deploy[sign]'")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tests.refusals import rejects

Key = ec.EllipticCurvePrivateKey
NAME = "tiny"


def pem_of_key(key: Key | rsa.RSAPrivateKey, password: bytes | None = None) -> bytes:
    how = serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


def pem_of_public(key: Key) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )  # fmt: skip


def name_of(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def certificate(subject: str, key: Key, issuer: str, by: Key, *, root: bool) -> bytes:
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
         "decipher_only", "crl_sign"), False,
    )  # fmt: skip
    builder = x509.CertificateBuilder(name_of(issuer), name_of(subject), key.public_key(), root + 2)
    builder = builder.not_valid_before(start).not_valid_after(start + datetime.timedelta(days=36500))
    builder = builder.add_extension(x509.BasicConstraints(ca=root, path_length=None), critical=True)
    builder = builder.add_extension(
        x509.KeyUsage(digital_signature=not root, key_cert_sign=root, **usage), critical=True
    )
    if not root:
        names = x509.SubjectAlternativeName([x509.RFC822Name("release@example.org")])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the signer's keys, another's keys, and a certificate of the signer under a root."""
    place = tmp_path_factory.mktemp("keys")
    ours, others, root = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    for name, key in (("ours", ours), ("others", others)):
        (place / f"{name}.pem").write_bytes(pem_of_key(key))
        (place / f"{name}.pub.pem").write_bytes(pem_of_public(key))
    (place / "locked.pem").write_bytes(pem_of_key(ours, b"open sesame"))
    (place / "password").write_text("open sesame\n")
    (place / "ours.crt.pem").write_bytes(certificate("Release", ours, "Root", root, root=False))
    (place / "root.pem").write_bytes(certificate("Root", root, "Root", root, root=True))
    (place / "foreign-root.pem").write_bytes(certificate("Root", others, "Root", others, root=True))
    return place


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def list_files(folder: Path, version: str) -> None:
    """Write a release's lists of its files, as anyone with access to the folder can."""
    own = ("manifest.json", "provenance.json", "SHA256SUMS", SIGNATURE, ATTESTATION)
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {name: digest(folder / name) for name in names if name not in own and not name.startswith(".stages")}
    entries = {name: {"sha256": each, "made_by": ""} for name, each in files.items()}
    manifest: dict[str, Any] = {"kind": "corp-deploy/manifest", "version": 1, "versions": {}, "files": entries}
    manifest["release"] = {"name": NAME, "version": version}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / PROVENANCE).write_text(json.dumps({"_type": "https://in-toto.io/Statement/v1", "version": version}))
    files |= {name: digest(folder / name) for name in ("manifest.json", PROVENANCE)}
    (folder / "SHA256SUMS").write_text("".join(f"{files[name]}  {name}\n" for name in sorted(files)))


def files_of(folder: Path) -> frozenset[str]:
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    return frozenset((*(line.split("  ", 1)[1] for line in lines), "SHA256SUMS"))


def make(folder: Path, version: str) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / ".stages").mkdir()
    (folder / ".stages" / "moments.json").write_text("state")
    np.save(folder / "samples" / "images.npy", np.zeros((1, 3, 2, 2), np.float32))
    record = {"kind": "corp-deploy/samples", "version": 1, "images": "samples/images.npy", "count": 1, "graphs": {}}
    (folder / "samples" / "samples.json").write_text(json.dumps(record))
    (folder / "model.onnx").write_bytes(b"\0" * 64 + version.encode())
    list_files(folder, version)
    return folder


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Path:
    folder = make(tmp_path_factory.mktemp("signed") / "out", "2.0.0")
    assert sign(folder, KeySigner(key=keys / "ours.pem"), files_of(folder))
    return folder


@pytest.fixture
def out(signed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(signed, tmp_path / "out")


def check(folder: Path, *words: object, expect: int) -> Result:
    return invoked("check", folder, *words, code=expect)


def said(result: Result) -> str:
    return " ".join(result.output.split())


def verified(folder: Path, keys: Path, *words: object, expect: int = 0) -> str:
    return said(check(folder, "--verify", keys / "ours.pub.pem", *words, expect=expect))


def test_signed_release_verifies_under_its_name_and_version(out: Path, keys: Path) -> None:
    words = ("--verify", keys / "ours.pub.pem", "--expect-name", NAME, "--expect-version", "2.0.0", "--json")
    record = json.loads(check(out, *words, expect=0).stdout)
    fingerprint = hashlib.sha256((keys / "ours.pub.pem").read_bytes()).hexdigest()[:16]
    assert (record["name"], record["version"], record["signed_by"]) == (NAME, "2.0.0", f"the key {fingerprint}")
    assert record["differs"] == []
    assert "give --expect-version" in verified(out, keys)
    assert json.loads(check(out, "--json", expect=0).stdout)["signed_by"] is None


def test_model_signing_verifies_the_bundle(out: Path, keys: Path) -> None:
    """The library verifies with its defaults, and the bundle lists the digest of every file."""
    from model_signing import verifying

    bundle = json.loads((out / SIGNATURE).read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    assert statement["predicateType"] == "https://model_signing/signature/v1.0"
    listed = {each["name"]: each["digest"] for each in statement["predicate"]["resources"]}
    paths = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    names = {name for name in paths if not name.startswith((SIGNATURE, ".stages"))}
    assert listed == {name: digest(paths[name]) for name in names}
    verifying.Config().use_elliptic_key_verifier(public_key=keys / "ours.pub.pem").verify(out, out / SIGNATURE)


def test_provenance_envelope_verifies_by_itself(out: Path, keys: Path) -> None:
    envelope = json.loads((out / ATTESTATION).read_text())
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"]
    assert payload == (out / PROVENANCE).read_bytes()
    data = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    public = serialization.load_pem_public_key((keys / "ours.pub.pem").read_bytes())
    assert isinstance(public, ec.EllipticCurvePublicKey)
    public.verify(base64.b64decode(envelope["signatures"][0]["sig"]), data, ec.ECDSA(hashes.SHA256()))


def add(out: Path) -> None:
    (out / "model.py").write_text("print('mine')")


def link(out: Path) -> None:
    (out / "model.onnx").rename(out / ".stages" / "model.onnx")
    (out / "model.onnx").symlink_to(out / ".stages" / "model.onnx")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "add": (add, "model.py: not signed, it was added"),
    "remove": (lambda out: (out / "model.onnx").unlink(), "model.onnx: missing, the signature lists it"),
    "swap": (lambda out: (out / "model.onnx").write_bytes(b"\1" * 64), "model.onnx: sha256 "),
    "link": (link, "model.onnx: a link or device, not a file"),
    "hide": (lambda out: (out / ".gitignore").write_text("x"), ".gitignore: not signed, it was added"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_file_is_found_although_every_list_agrees(name: str, out: Path, keys: Path) -> None:
    change, said_of_it = CHANGES[name]
    change(out)
    list_files(out, "2.0.0")
    check(out, expect=1 if change is link else 0)  # the lists alone reveal only the link
    message = verified(out, keys, "--expect-version", "2.0.0", expect=1)
    assert said_of_it in message
    assert message.endswith("not verified")


def test_unsigned_lists_reveal_added_files(out: Path) -> None:
    add(out)
    assert "model.py: in no list of this release" in said(check(out, expect=1))


def test_older_release_by_the_same_key_is_not_accepted_as_the_newer(out: Path, keys: Path, tmp_path: Path) -> None:
    """The library compares no names: the old release verifies, and only the expected version reveals it."""
    old = make(tmp_path / "old" / "out", "1.9.0")
    sign(old, KeySigner(key=keys / "ours.pem"), files_of(old))
    assert "1.9.0" in verified(old, keys, "--expect-version", "1.9.0")
    message = verified(old, keys, "--expect-version", "2.0.0", expect=1)
    assert "the signed version is '1.9.0', expected '2.0.0'" in message
    assert "the signed name is 'tiny', expected 'vit'" in verified(old, keys, "--expect-name", "vit", expect=1)
    shutil.copy(out / SIGNATURE, old / SIGNATURE)
    assert "the signature says" in verified(old, keys, expect=1)
    list_files(old, "2.0.0")
    assert "the signature says" in verified(old, keys, "--expect-version", "2.0.0", expect=1)


def test_wrong_key_altered_statement_and_missing_signature_fail(out: Path, keys: Path) -> None:
    message = said(check(out, "--verify", keys / "others.pub.pem", expect=1))
    assert "model.sig: made with another key" in message
    bundle = json.loads((out / SIGNATURE).read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    statement["predicate"]["resources"].pop()
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    (out / SIGNATURE).write_text(json.dumps(bundle))
    assert "model.sig: does not hold" in verified(out, keys, expect=1)
    (out / SIGNATURE).unlink()
    assert "this directory is not signed" in verified(out, keys, expect=1)


@pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000, '{"verificationMaterial": {"publicKey": {}}}', "\0\xff"])
def test_broken_signature_fails(text: str, out: Path, keys: Path) -> None:
    (out / SIGNATURE).write_text(text)
    for who in ((keys / "ours.pub.pem",), ("release@example.org", "--root", keys / "root.pem")):
        assert "model.sig: does not hold" in said(check(out, "--verify", *who, expect=1))


def test_nothing_is_parsed_before_the_signature_verifies(
    out: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("parsed")

    (out / "manifest.json").write_text("{")
    for place in ("load_manifest", "sums_from_file", "replay"):
        monkeypatch.setattr(f"corp_deploy.release.check.{place}", never)
    assert "manifest.json: sha256 " in verified(out, keys, expect=1)


def test_statement_with_skipped_files_is_refused(out: Path, keys: Path) -> None:
    """The signer's key signs with options of the library that skip files or hash shards of them."""
    from model_signing import signing as library

    sharded = hashing_config().use_shard_serialization(hashing_algorithm="sha256")
    for config in (
        hashing_config().set_ignored_paths(paths=[SIGNATURE, ".stages", "model.onnx"]),
        sharded.set_ignored_paths(paths=[SIGNATURE, ".stages"]),
    ):
        (out / SIGNATURE).unlink()
        signer = library.Config().use_elliptic_key_signer(private_key=keys / "ours.pem")
        signer.set_hashing_config(config).sign(out, out / SIGNATURE)
        verified(out, keys, expect=1)


def test_certificate_needs_an_identity(out: Path, keys: Path) -> None:
    signer = KeySigner(key=keys / "ours.pem", certificate=keys / "ours.crt.pem", chain=(keys / "root.pem",))
    signer.require()
    assert sign(out, signer, files_of(out))
    who = Certified(identity="release@example.org", roots=(keys / "root.pem",))
    assert who.verify(out).by == "release@example.org"
    assert not sign(out, signer, files_of(out)), "the signature holds already"
    roots = ("--root", keys / "root.pem")
    assert "signed by release@example.org" in said(check(out, "--verify", "release@example.org", *roots, expect=0))
    message = said(check(out, "--verify", "mallory@example.org", *roots, expect=1))
    assert "the certificate names release@example.org, Release, expected mallory@example.org" in message
    foreign = Certified(identity="release@example.org", roots=(keys / "foreign-root.pem",))
    for verifier in (foreign, PublicKey(path=keys / "ours.pub.pem")):
        with pytest.raises(Unverified, match="does not hold"):
            verifier.verify(out)


def test_signing_again_changes_nothing(out: Path, keys: Path) -> None:
    before = digest(out / SIGNATURE)
    assert not sign(out, KeySigner(key=keys / "ours.pem"), files_of(out))
    assert digest(out / SIGNATURE) == before
    assert sign(out, KeySigner(key=keys / "others.pem"), files_of(out))
    assert digest(out / SIGNATURE) != before


def test_foreign_file_is_not_signed(out: Path, keys: Path) -> None:
    before = digest(out / SIGNATURE)
    add(out)
    signer = KeySigner(key=keys / "others.pem")
    rejects(r"model\.py: not among the files to sign; move it away", sign, out, signer, files_of(out))
    assert digest(out / SIGNATURE) == before


def test_encrypted_key_signs(out: Path, keys: Path) -> None:
    locked = keys / "locked.pem"
    rejects("the key is encrypted; give --sign-password", KeySigner(key=locked).require)
    rejects("another password", KeySigner(key=locked, password="shut").require)
    rejects("the key has no password; leave it out", KeySigner(key=keys / "ours.pem", password="open sesame").require)
    word = signing.password_from_file(keys / "password")
    assert not sign(out, KeySigner(key=locked, password=word), files_of(out)), "it is the same key"
    (out / SIGNATURE).unlink()
    assert sign(out, KeySigner(key=locked, password=word), files_of(out))
    assert PublicKey(path=keys / "ours.pub.pem").verify(out).files


def test_invalid_keys_are_refused(keys: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "rsa.pem").write_bytes(pem_of_key(rsa.generate_private_key(65537, 1024)))
    (tmp_path / "odd.pem").write_bytes(pem_of_key(ec.generate_private_key(ec.SECP256K1())))
    (tmp_path / "broken.pem").write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    for name, words in (
        ("none.pem", "no such file, expected a private key"),
        ("text", "not PEM"),
        ("rsa.pem", "no key of secp256r1"),
        ("odd.pem", "no key of secp256r1"),
        ("broken.pem", "not a private key in PEM"),
    ):
        rejects(words, KeySigner(key=tmp_path / name).require)
    other = KeySigner(key=keys / "others.pem", certificate=keys / "ours.crt.pem")
    rejects("the certificate belongs to another key", other.require)


def test_invalid_calls_of_check_are_refused(out: Path, keys: Path) -> None:
    for words, message in (
        (("--verify", keys / "ours.pem"), "it holds a private key"),
        (("--verify", out / "model.onnx"), "not"),
        (("--verify", "key.pub.pem"), "no such file, expected a public key; an identity goes with --root"),
        (("--expect-version", "2.0.0"), "go with --verify"),
        (("--verify", "a@b.org", "--root", keys / "ours.pem"), "not certificates in PEM"),
        (("--verify", "a@b.org", "--root", keys / "root.pem", "--issuer", "https://c.org"), "give one of the two"),
    ):
        assert message in said(check(out, *words, expect=2)), words


def test_sigstore_is_contacted_only_on_request(out: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' guard against networks ends every look-up, as on a machine without a network."""
    monkeypatch.setattr("sigstore.oidc.detect_credential", lambda: None)
    with pytest.raises(Missing, match="no identity for Sigstore"):
        SigstoreSigner().require()

    def refuses(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("model_signing.verifying.Config.use_sigstore_verifier", refuses)
    with pytest.raises(Missing, match="roots of trust can't be had here"):
        Sigstore(identity="a@b.org", issuer="https://c.org").verify(out)


def test_missing_signing_library_is_named(out: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model_signing.signing", None)
    message = said(check(out, "--verify", keys / "ours.pub.pem", expect=4))
    assert "pip install 'corp-deploy[sign]'" in message
    check(out, expect=0)
