//! Being told of a grant instead of looking: one connection that listens, while somebody of this process is near the head of a
//! line, on a database that can tell.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::backend::Listener;
use crate::backoff::Backoff;
use crate::client::Client;
use crate::token::FencingToken;

/// How long the connection is kept when nobody waits any more: whoever has waited often waits again soon.
const LINGER: Duration = Duration::from_secs(10);

/// The bell of a client.
#[derive(Default)]
pub(crate) struct Bell {
    listening: Arc<AtomicBool>,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Bell {
    /// The channel on which to tell us, or nothing while nobody listens.
    pub(crate) fn channel(&self, client: &str) -> Arc<str> {
        if self.listening.load(Ordering::Acquire) { channel(client) } else { "".into() }
    }

    /// Listens, when somebody stands near the head of a line.
    pub(crate) fn tend(&self, client: &Arc<Client>) {
        if !client.backend.rings() {
            return;
        }
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            self.listening.store(false, Ordering::Release);
            let listen = listen(Arc::downgrade(client), Arc::clone(&self.listening), channel(&client.id));
            *task = Some(tokio::spawn(listen));
        }
    }

    /// Ceases to listen.
    pub(crate) fn silence(&self) {
        self.listening.store(false, Ordering::Release);
        if let Some(task) = self.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }
}

fn channel(client: &str) -> Arc<str> {
    format!("sqlock_{client}").into()
}

/// Listens for as long as anybody stands in line. Where that is not possible, behind a pooler for one, it tries again now and
/// then; meanwhile the places look for themselves.
async fn listen(client: Weak<Client>, listening: Arc<AtomicBool>, channel: Arc<str>) {
    let mut pause = Backoff::between(Duration::from_secs(1), Duration::from_secs(60));
    while let Some(backend) = standing(&client).map(|client| Arc::clone(&client.backend)) {
        if let Ok(Ok(Some(mut listener))) = timeout(Duration::from_secs(4), backend.listen(&channel)).await {
            let tell = |told| {
                listening.store(told, Ordering::Release);
                if let Some(client) = client.upgrade() {
                    client.is_told(told);
                }
            };
            tell(true);
            while let Some(said) = hear(&client, &mut *listener).await {
                // The mark of a hold, then the token that it was granted. No token: it may take the name itself.
                let (Some(client), Some(end)) = (client.upgrade(), said.find(';')) else {
                    continue;
                };
                let (mark, token) = said.split_at(end + 1);
                match token.parse().ok().and_then(FencingToken::new) {
                    Some(token) => client.told(mark, token),
                    None => client.gatherings.call(mark),
                }
            }
            tell(false);
        }
        sleep(pause.step()).await;
    }
}

/// What is said next. `None`: nobody has stood in line for a while, or the connection was lost.
async fn hear(client: &Weak<Client>, listener: &mut dyn Listener) -> Option<String> {
    let mut hearing = listener.hear();
    loop {
        match timeout(LINGER, &mut hearing).await {
            Ok(said) => return said.ok(),
            Err(_) if standing(client).is_none() => return None,
            Err(_) => {}
        }
    }
}

/// The client, while somebody of it stands in line.
fn standing(client: &Weak<Client>) -> Option<Arc<Client>> {
    client.upgrade().filter(|client| client.stands())
}
