//! Connections over TLS, as managed databases require.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use crate::DATABASE;
use crate::support::command::{path, run};
use crate::support::server::{Kind, NOBODY, Options, Server};
use crate::support::{Fresh, empty};

/// A certificate for 127.0.0.1 that vouches for itself, and its key, where a server can read them.
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

/// The URL with a demand for a certificate that this one vouches for.
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
    let vouched = Fresh::at(verified(kind, &server.url(), &cert));
    let ended = run(&vouched, &["run", "job", "--", "echo", "ran"]).await.expect(0);
    assert_eq!(ended.stdout, "ran\n");

    let stranger = Fresh::at(verified(kind, &server.url(), &other));
    let ended = run(&stranger, &["run", "job", "--", "echo", "ran"]).await.expect(78);
    assert!(ended.stderr.contains("certificate"), "{}", ended.stderr);
    assert_eq!(ended.stdout, "");
}
