// Curves as data: over steps, tokens or time, smoothed, stacked, and as a table to download.
const FEWEST = 30; // points that smoothing is for
const ENOUGH = 1e-9;

const duration = (seconds) => {
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.round(seconds % 60)];
  return h ? `${h} h ${m} min` : m ? `${m} min${s && m < 10 ? ` ${s} s` : ""}` : `${s} s`;
};
const AXES = {
  steps: { label: "steps", say: (x) => "step " + Math.round(x), tick: (x) => (Number.isInteger(x) ? compact.format(x) : "") },
  tokens: { label: "tokens", say: (x) => compact.format(x) + " tokens", tick: (x) => compact.format(x) },
  time: { label: "time", say: duration, tick: duration },
};
const hasAxis = (run, axis) => axis === "steps" || run.axes[axis] !== undefined;

// Where a step lies on the chosen axis: between the steps that are known, in proportion.
function onAxis(run, step, axis = state.x) {
  if (axis === "steps") return step;
  const [steps, values] = run.axes[axis], last = steps.length - 1;
  let low = 0, high = last;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  const part = Math.min(1, Math.max(0, (step - steps[low]) / (steps[high] - steps[low] || 1)));
  return values[low] + part * (values[high] - values[low]);
}

// Exponential mean without bias towards the first value: divided by 1 - decay^n. Its span (decay = 1 - 2 / (span + 1)) is
// a share of the curve's points: a long run is smoothed more than a short one. Gaps stay gaps; it goes on behind them.
function smoothed(values) {
  const known = values.filter((value) => value !== null).length;
  const span = known < FEWEST ? 1 : Math.max(1, (known * Number(state.smooth)) / 100);
  const decay = 1 - 2 / (span + 1);
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return value;
    sum = decay * sum + (1 - decay) * value;
    weight = decay * weight + (1 - decay);
    return sum / weight;
  });
}

const lineOf = (curves, line) => line.metrics.map((name) => curves[name]).find((curve) => curve !== undefined);

// One run: a color per line, those of correct and incorrect answers fixed. Several runs: a color per run, a dash per line.
function lookOf(panel, line, run) {
  const position = panel.lines.indexOf(line);
  if (MANY) return { color: runColor(run), dash: [[], [6, 4], [2, 3]][position % 3] };
  return { color: line.role ? "--" + line.role : "--l" + (position % 3), dash: [] };
}

// Of the runs that are shown: what a panel draws, `x` on the chosen axis.
function tracesOf(panel) {
  const traces = [];
  panel.lines.forEach((line) =>
    RUNS.forEach((run, position) => {
      if (isHidden(position) || !hasAxis(run, state.x)) return;
      const name = MANY ? plain(run.name) : "";
      const add = ([steps, values], rest) => traces.push({ run, line, steps, x: steps.map((step) => onAxis(run, step)), values, ...rest, ...lookOf(panel, line, position) });
      const curve = lineOf(run.curves, line), tested = lineOf(run.eval_curves, line);
      if (curve) add(curve, { name, what: line.label });
      if (tested) add(tested, { name, what: (line.label + " evaluation").trim(), points: true });
    }),
  );
  return traces;
}

// `raw`: a list of x and one of values per trace; `drawn`: the same with two lists per trace, as logged and smoothed.
function tableOf(traces, stacked) {
  if (!traces.length) return { raw: [[]], drawn: [[]] };
  const strong = traces.map(({ x, values, points }) => [x, points ? values : smoothed(values)]);
  const raw = uPlot.join(traces.map(({ x, values }) => [x, values])), smooth = uPlot.join(strong);
  if (!stacked) return { raw, drawn: [raw[0], ...traces.flatMap((_, i) => [raw[i + 1], smooth[i + 1]])] };
  const below = new Array(raw[0].length).fill(0), drawn = [raw[0]];
  for (const values of smooth.slice(1)) {
    let last = 0; // a part that was not logged at a step of the others keeps its height
    drawn.push(values.map((value, i) => (below[i] += last = value ?? last)));
  }
  return { raw, drawn };
}

// Whether all of a panel's values can stand on a logarithmic axis.
const canBeLog = (traces) => traces.length > 0 && traces.every(({ values }) => values.every((value) => value === null || value > 0));

function rangeOf(panel, stacked, low, high) {
  if (low === null || high === null) return [0, 1];
  if (panel.share || stacked) return [0, panel.share ? Math.min(1, Math.max(high * 1.08, 0.05)) : high * 1.08 || 1];
  const constant = high - low <= ENOUGH * Math.max(Math.abs(high), Math.abs(low)); // but for the rounding of the mean
  const room = constant ? Math.abs(high) * 0.1 || 1 : (high - low) * 0.08;
  return [!constant && low >= 0 && low < (high - low) ? 0 : low - room, high + room];
}

// One row per value as it was logged. A name that a spreadsheet would take for a formula gets an apostrophe.
function csvOf(panel) {
  const cell = (value) => {
    const text = typeof value === "string" ? value.replace(/^[=+@\-\t\r]/, "'$&") : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const at = (run, axis, step) => (hasAxis(run, axis) ? onAxis(run, step, axis) : "");
  const rows = tracesOf(panel).flatMap(({ run, line, steps, values, points }) =>
    steps.flatMap((step, i) => values[i] === null ? [] : [[plain(run.name), line.label || panel.title, points ? "evaluation" : "training", step, at(run, "tokens", step), at(run, "time", step), values[i]]]));
  return [["run", "line", "from", "step", "tokens", "seconds", "value"], ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}
