// A page that follows runs asks its server for itself, and takes over what is new without losing its place.
const EVERY = 3000; // milliseconds from an answer to the next question; ten times as long as the answer took, if more
let version = "", lastNews = "";

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

async function askServer() {
  const badge = $("live");
  try {
    const answer = await fetch(location.pathname, { cache: "no-store", headers: { "If-None-Match": version } });
    if (answer.ok) {
      takePage(await answer.text());
      version = answer.headers.get("ETag");
      lastNews = "Live, as of " + new Date().toLocaleTimeString("en-GB");
    }
    badge.textContent = answer.ok || answer.status === 304 ? lastNews : (await answer.text()).slice(0, 300);
  } catch {
    badge.textContent = "The server does not answer. What stands here stays.";
  }
}

function startFollowing() {
  if (!$("live")) return;
  [version, lastNews] = [$("live").dataset.version, $("live").textContent];
  const again = async () => {
    const start = performance.now();
    await askServer();
    setTimeout(again, Math.max(EVERY, 10 * (performance.now() - start)));
  };
  setTimeout(again, EVERY);
}
