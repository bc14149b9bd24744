// The group that is shown, under other objectives: put into the sliders when it changes.
let widget = null, widgetGroup = null, widgetHas = null;

function fillWidget(group) {
  widgetGroup = group;
  if (!$("widget-fold").open) return;
  const rows = group ? group.rows.filter((row) => row.reward !== null) : [];
  const known = rows.length > 1;
  const has = known ? JSON.stringify([group.mode, group.step, group.index, group.prompt]) : "";
  if (has === widgetHas) return; // what the reader set stays
  widgetHas = has;
  const given = known ? { rewards: rows.map((row) => row.reward), lengths: rows.map(rowSize) } : {};
  $("widget-of").textContent = known ? `Set to step ${group.step}, group ${group.index + 1}. Move the sliders to see what would change.` : "An example. Move the sliders.";
  if (widget) widget.set(given);
  else widget = mountGroupWidget($("widget-body"), given);
}

const startWidget = () => $("widget-fold").addEventListener("toggle", () => fillWidget(widgetGroup));

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

// Light and dark, the keys, the links, and the start.
function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "Light" : "Dark";
  $("theme").setAttribute("aria-pressed", String(dark));
  drawCurves();
  widget?.redraw();
}

const isDark = () => document.documentElement.dataset.theme === "dark";

const KEYS = {
  j: () => select(selected + 1),
  k: () => select(selected - 1),
  n: () => selectGroup(1),
  p: () => selectGroup(-1),
  f: () => document.querySelectorAll("#detail button[aria-expanded]").forEach((button) => button.click()),
  "/": () => fields.search.focus(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches("input, select, textarea");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "t") return setTheme(!isDark());
  const inList = event.target.id === "list";
  const action = KEYS[event.key] || (inList && { ArrowDown: KEYS.j, ArrowUp: KEYS.k }[event.key]);
  if (!action || !entries.length) return;
  event.preventDefault();
  const browser = $("completions").getBoundingClientRect();
  if (browser.top > innerHeight / 2 || browser.bottom < innerHeight / 4) $("completions").scrollIntoView();
  action();
  document.querySelector(".tree [aria-current=true]")?.scrollIntoView({ block: "nearest" });
});

function drawAll() {
  showTools();
  drawCurves();
  drawDifficulty();
  drawCompletions();
}

// A section that the reader goes to unfolds, and the link keeps what it has.
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]');
  if (!link) return;
  event.preventDefault();
  const section = document.querySelector(link.getAttribute("href"));
  section.querySelector(":scope > details")?.setAttribute("open", "");
  section.scrollIntoView();
  section.querySelector("h1")?.focus({ preventScroll: true });
});
addEventListener("hashchange", () => {
  readState();
  Object.entries(fields).forEach(([name, field]) => (field.value = state[name]));
  drawAll();
});
document.addEventListener("change", ({ target }) => {
  if (target.id === "only-differences") $("settings-table").classList.toggle("only-differences", target.checked);
});

readState();
startTools();
["hero", "panels", "other-panels"].forEach((id) => resized.observe($(id)));
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(prefersDark.matches);
prefersDark.addEventListener("change", (event) => setTheme(event.matches));
$("theme").addEventListener("click", () => setTheme(!isDark()));
startWidget();
drawDifficulty();
drawCompletions();
startFollowing();
document.documentElement.dataset.ready = "yes";
