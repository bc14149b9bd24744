// What the reader chose, kept in the link behind the "#": whoever opens the link sees the same.
const DEFAULTS = {
  x: "steps", // steps, tokens or time
  y: "linear", // or log
  smooth: "3", // percent of a curve's points
  hide: "", // positions of runs, with commas
  run: "", // of completions: filters, order, and the one that is shown
  answers: "",
  signal: "",
  source: "",
  from: "",
  to: "",
  search: "",
  sort: "newest",
  shown: "",
};
let state = { ...DEFAULTS };

function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  state = Object.fromEntries(Object.entries(DEFAULTS).map(([name, usual]) => [name, given.get(name) ?? usual]));
  if (!AXES[state.x]) state.x = DEFAULTS.x;
  if (!(state.smooth >= 0 && state.smooth <= 20)) state.smooth = DEFAULTS.smooth;
}

function setState(changes) {
  Object.assign(state, changes);
  const kept = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  const link = kept.map(([name, value]) => name + "=" + encodeURIComponent(value).replaceAll("%2C", ",")).join("&");
  history.replaceState(null, "", "#" + link);
}

const isHidden = (position) => MANY && state.hide.split(",").includes(String(position));

function toggleRun(position) {
  const hidden = RUNS.map((_, i) => i).filter((i) => isHidden(i) !== (i === position));
  setState({ hide: hidden.join(",") });
}
