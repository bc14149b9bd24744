// A page that follows runs asks its server for itself, and takes over what is new without losing its place.
const EVERY = 3000; // milliseconds between an answer and the next question, and as long as the answer took, ten times

function takePage(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  undisturbed(() => {
    document.title = fresh.title;
    document.querySelectorAll("[data-fresh]").forEach((part) => {
      const open = new Set([...part.querySelectorAll("details[open]")].map((details) => details.id));
      part.replaceChildren(...fresh.querySelector(`[data-fresh="${part.dataset.fresh}"]`).childNodes);
      part.querySelectorAll("details").forEach((details) => (details.open = open.has(details.id)));
    });
    takeData(fresh.getElementById("data").textContent);
    drawAll();
  });
}

function startFollowing() {
  const badge = $("live");
  if (!badge) return;
  let version = badge.dataset.version, said = badge.textContent;
  const ask = async () => {
    const start = performance.now();
    try {
      const answer = await fetch(location.pathname, { cache: "no-store", headers: { "If-None-Match": version } });
      if (answer.ok) {
        takePage(await answer.text());
        version = answer.headers.get("ETag");
        said = "Live, as of " + new Date().toLocaleTimeString("en-GB");
      }
      if (answer.ok || answer.status === 304) badge.textContent = said;
      else badge.textContent = (await answer.text()).slice(0, 300);
    } catch {
      badge.textContent = "The server does not answer. What stands here stays.";
    }
    setTimeout(ask, Math.max(EVERY, 10 * (performance.now() - start)));
  };
  setTimeout(ask, EVERY);
}
