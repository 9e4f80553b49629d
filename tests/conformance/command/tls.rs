//! Connections over TLS, as managed databases require.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use sqlock::Error;
use sqlock::database::AccessError;

use super::access::answer;
use crate::DATABASE;
use crate::support::command::{path, run};
use crate::support::server::{Kind, NOBODY, Options, Server};
use crate::support::{TestDatabase, empty};

/// Creates a self-signed certificate for 127.0.0.1 and its key, where a server can read them.
fn certificate(directory: &Path, name: &str) -> (String, String) {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    let (cert, key) = (path(directory, &format!("{name}.crt")), path(directory, &format!("{name}.key")));
    fs::write(&cert, made.cert.pem()).expect("the certificate is written");
    fs::write(&key, made.signing_key.serialize_pem()).expect("the key is written");
    fs::set_permissions(&key, Permissions::from_mode(0o600)).expect("the key is private");
    if rustix::process::geteuid().is_root() {
        chown(&key, Some(NOBODY), None).expect("the key is the server's");
    }
    (cert, key)
}

/// Returns the URL with the requirement of a certificate that `ca` has signed.
fn verified(kind: Kind, url: &str, ca: &str) -> String {
    let mark = if url.contains('?') { '&' } else { '?' };
    match kind {
        Kind::Postgres => format!("{url}{mark}sslmode=verify-full&sslrootcert={ca}"),
        Kind::MySql | Kind::MariaDb => format!("{url}{mark}ssl-mode=VERIFY_IDENTITY&ssl-ca={ca}"),
    }
}

#[tokio::test]
async fn server_certificate_is_verified() {
    let Some(kind) = DATABASE.server() else {
        // SQLite has no server to reach.
        run(&empty().await, &["ls"]).await.expect(0);
        return;
    };
    let directory = tempfile::tempdir().expect("a temporary directory");
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).expect("the server may look into it");
    let (cert, key) = certificate(directory.path(), "server");
    let (other, _) = certificate(directory.path(), "other");
    let settings = match kind {
        Kind::Postgres => vec!["ssl=on".into(), format!("ssl_cert_file={cert}"), format!("ssl_key_file={key}")],
        Kind::MySql | Kind::MariaDb => {
            vec![format!("--ssl-cert={cert}"), format!("--ssl-key={key}"), "--require-secure-transport=ON".into()]
        }
    };
    let server = Server::start_with(kind, Options { settings, ..Options::default() });
    let vouched = TestDatabase::at(verified(kind, &server.url(), &cert));
    let ended = run(&vouched, &["run", "job", "--", "echo", "ran"]).await.expect(0);
    assert_eq!(ended.stdout, "ran\n");

    let stranger = TestDatabase::at(verified(kind, &server.url(), &other));
    let ended = run(&stranger, &["run", "job", "--", "echo", "ran"]).await.expect(78);
    assert!(ended.stderr.contains("certificate"), "{}", ended.stderr);
    assert_eq!(ended.stdout, "");
    assert_refused(&stranger.url).await;

    // The certificate is for 127.0.0.1, and only its name is wrong here.
    let other_name = vouched.url.replacen("127.0.0.1", "localhost", 1);
    assert_refused(&other_name).await;
    let any_name = other_name.replace("verify-full", "verify-ca").replace("VERIFY_IDENTITY", "VERIFY_CA");
    run(&TestDatabase::at(any_name), &["run", "job", "--", "true"]).await.expect(0);
}

/// The library refuses the server for good, and the command says what to do.
async fn assert_refused(url: &str) {
    let error = answer(url).await;
    assert!(matches!(error, Error::Access { cause: AccessError::Tls, .. }), "{error:?}");
    assert!(!error.is_retryable(), "{error}");
    let migrated = sqlock::LocksBuilder::from_urls(url).expect("a URL").build().migrate().await;
    assert!(matches!(migrated, Err(Error::Access { cause: AccessError::Tls, .. })), "{migrated:?}");
    let ended = run(&TestDatabase::at(url.to_owned()), &["acquire", "job"]).await.expect(78);
    assert!(ended.stderr.contains("Check the host in the URL, the certificate"), "{}", ended.stderr);
}

#[tokio::test]
async fn demanded_tls_is_missing_for_good() {
    let Some(kind) = DATABASE.server() else {
        run(&empty().await, &["ls"]).await.expect(0);
        return;
    };
    let off = match kind {
        Kind::Postgres => "ssl=off",
        Kind::MySql => "--tls-version=",
        Kind::MariaDb => "--skip-ssl",
    };
    let server = Server::start_with(kind, Options { settings: vec![off.into()], ..Options::default() });
    let url = server.url();
    let mark = if url.contains('?') { '&' } else { '?' };
    let demand = if kind == Kind::Postgres { "sslmode=require" } else { "ssl-mode=REQUIRED" };
    assert_refused(&format!("{url}{mark}{demand}")).await;
}
