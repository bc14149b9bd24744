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

// One uPlot per panel: values as logged faint, their exponential mean strong; cursors and zoom in step.
let charts = [];
let zoom = null; // [from, to] on the axis of x

function seriesOf(traces, stacked) {
  const series = [{}];
  for (const { color, dash, points } of traces) {
    if (stacked) {
      series.push({ width: 0, points: { show: false } }); // fills only: see bandsOf
      continue;
    }
    series.push({ stroke: () => alpha(color, 0.28), width: 1, dash, points: { show: false }, show: !points });
    series.push({
      stroke: () => css(color),
      width: points ? 0 : 2,
      dash,
      points: points ? { show: true, size: 8, width: 2, fill: () => css("--card"), stroke: () => css(color) } : { fill: () => css(color) },
    });
  }
  if (stacked && traces.length) series[1].fill = () => alpha(traces[0].color, 0.75); // the lowest reaches down to zero
  return series;
}

// Between neighbors of a stack.
const bandsOf = (traces) => traces.slice(1).map(({ color }, i) => ({ series: [i + 2, i + 1], fill: () => alpha(color, 0.75) }));

function upright(chart, x, color, dash, flag) {
  const at = chart.valToPos(x, "x", true);
  const { left, top, width, height } = chart.bbox;
  if (!(at >= left && at <= left + width)) return;
  const context = chart.ctx, unit = devicePixelRatio;
  context.save();
  context.strokeStyle = context.fillStyle = css(color);
  context.lineWidth = unit;
  context.setLineDash(dash.map((part) => part * unit));
  context.beginPath();
  context.moveTo(at, top);
  context.lineTo(at, top + height);
  context.stroke();
  if (flag) {
    context.beginPath();
    context.moveTo(at - 4 * unit, top);
    context.lineTo(at + 4 * unit, top);
    context.lineTo(at, top + 7 * unit);
    context.fill();
  }
  context.restore();
}

function drawMarks(chart) {
  RUNS.forEach((run, position) => {
    if (isHidden(position) || !hasAxis(run, state.x)) return;
    const color = MANY ? runColor(position) : "--warn";
    run.resumed_at.forEach((step) => upright(chart, onAxis(run, step), MANY ? color : "--gray", [1, 3], false));
    run.warnings.forEach((warning) => upright(chart, onAxis(run, warning.step), color, [4, 3], true));
  });
}

// The values at the cursor as they were logged, without one the last ones.
function readout(panel, traces, raw, index) {
  const hovering = index !== null && index !== undefined;
  const parts = traces.map(({ name, what, color, dash, points }, i) => {
    const values = raw[i + 1];
    let at = hovering ? index : values.length - 1;
    while (at >= 0 && (values[at] === undefined || (!hovering && values[at] === null))) at -= 1;
    return el("span", { "--k": css(color) }, el("i", { class: "key" + (points ? " points" : dash.length ? " dash" : "") }), name ? el("bdi", { title: name }, name) : null, name ? " " : "", what ? what + " " : "",
      el("b", {}, number(at < 0 ? null : values[at], panel.share)));
  });
  const ends = new Set(traces.map(({ x }) => x.at(-1)));
  const where = hovering ? "at " + AXES[state.x].say(raw[0][index]) : ends.size === 1 ? "last, " + AXES[state.x].say([...ends][0]) : "the last of each";
  return [...parts, el("span", {}, traces.length ? where : "no run is shown")];
}

function optionsOf(panel, traces, stacked, plot, height, moved) {
  const log = state.y === "log" && !stacked && canBeLog(traces);
  const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, font: "11.5px system-ui, sans-serif" };
  const say = (tick) => (tick === null ? "" : panel.share ? Number((100 * tick).toPrecision(3)) + "%" : number(tick));
  return {
    width: Math.max(200, plot.clientWidth), height,
    scales: { x: { time: false }, y: log ? { distr: 3, log: 10 } : { range: (_, low, high) => rangeOf(panel, stacked, low, high) } },
    axes: [{ ...axis, size: 26, space: 70, values: (_, ticks) => ticks.map(AXES[state.x].tick) }, { ...axis, size: 50, values: (_, ticks) => ticks.map(say) }],
    series: seriesOf(traces, stacked),
    bands: stacked ? bandsOf(traces) : [],
    legend: { show: false },
    cursor: { y: false, sync: { key: "curves" }, points: { show: false } },
    hooks: {
      draw: [drawMarks],
      setCursor: [moved],
      setSelect: [({ select, posToVal }) => select.width > 0 && (zoom = [posToVal(select.left, "x"), posToVal(select.left + select.width, "x")])],
    },
  };
}

// Arrow keys, Home and End move the cursor of a chart that has the focus.
function moveCursor(event, chart, raw) {
  const last = raw[0].length - 1, at = chart.cursor.idx ?? (event.key === "ArrowRight" ? -1 : last + 1);
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
  if (to === undefined || last < 0) return;
  event.preventDefault();
  const index = Math.min(last, Math.max(0, to));
  chart.setCursor({ left: chart.valToPos(raw[0][index], "x"), top: 10 });
}

function drawPanel(panel, grid, height = 190) {
  const stacked = panel.stacked && !MANY, traces = tracesOf(panel);
  const now = el("div", { class: "now" });
  const plot = el("div", { class: "plot", tabindex: 0, "data-key": "plot-" + panel.title });
  plot.style.minHeight = height + "px";
  const save = (kind, make) => el("button", { type: "button", class: "save", "aria-label": `Download ${panel.title} as ${kind}`, onclick: make }, kind);
  grid.append(el("figure", { class: "panel" },
    el("figcaption", {}, el("h3", {}, plain(panel.title)), el("span", { class: "unit" }, panel.unit), save("CSV", () => saveCsv(panel)), save("PNG", () => savePng(panel, traces, chart))),
    now, plot, panel.hint ? el("p", { class: "hint" }, panel.hint) : null));
  const { raw, drawn } = tableOf(traces, stacked);
  const describe = () => now.replaceChildren(...readout(panel, traces, raw, chart.cursor.idx));
  const chart = new uPlot(optionsOf(panel, traces, stacked, plot, height, () => describe()), drawn, plot);
  if (zoom && raw[0].length) chart.setScale("x", { min: zoom[0], max: zoom[1] });
  describe();
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", traces.length ? `${panel.title} over ${AXES[state.x].label}: ${now.textContent}. Arrow keys read the values.` : `${panel.title}: nothing to show`);
  plot.addEventListener("keydown", (event) => moveCursor(event, chart, raw));
  plot.addEventListener("dblclick", () => (zoom = null)); // uPlot shows the whole run
  plot.addEventListener("focus", () => now.setAttribute("aria-live", "polite"));
  plot.addEventListener("blur", () => now.removeAttribute("aria-live"));
  charts.push({ panel, traces, chart, plot, height, raw });
}

const resized = new ResizeObserver(() => charts.forEach(({ chart, plot, height }) => {
  if (plot.clientWidth && plot.clientWidth !== chart.width) chart.setSize({ width: plot.clientWidth, height });
}));

const otherPanel = (name) => ({ title: name, unit: "", lines: [{ label: "", metrics: [name], role: "" }], stacked: false, hint: "", share: false });

// All charts anew: data, axis, or the runs that are shown have changed.
function drawCurves() {
  charts.forEach(({ chart }) => chart.destroy());
  charts = [];
  const [first, ...rest] = DATA.panels;
  const places = [["hero", first ? [first] : [], 250], ["panels", rest], ["other-panels", $("others").open ? DATA.other_metrics.map(otherPanel) : []]];
  for (const [id, panels, height] of places) {
    $(id).replaceChildren();
    panels.forEach((panel) => drawPanel(panel, $(id), height));
  }
  if (!first) $("hero").append(el("p", { class: "hint" }, "Nothing was logged yet."));
  $("others-count").textContent = DATA.other_metrics.length;
  $("others").hidden = !DATA.other_metrics.length;
  $("curves").hidden = $("nav-curves").hidden = !rest.length && !DATA.other_metrics.length;
  drawLegend();
}
