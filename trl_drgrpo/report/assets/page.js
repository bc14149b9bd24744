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
