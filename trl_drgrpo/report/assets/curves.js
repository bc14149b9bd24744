// The curves: one uPlot per panel, raw values faint and their exponential mean strong, cursors and zoom in step.
const charts = [];
let smoothing = 0.8;

// Gaps stay gaps; the mean goes on behind them. Without bias towards the first value.
function smoothed(values) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = smoothing * sum + (1 - smoothing) * value;
    weight = smoothing * weight + (1 - smoothing);
    return sum / weight;
  });
}

const found = (curves, line) => line.metrics.map((name) => curves[name]).find((curve) => curve !== undefined);

// One run: a color per line, those of correct and incorrect answers fixed. Several runs: a color per run, a dash per line.
function lookOf(panel, line, run) {
  const position = panel.lines.indexOf(line);
  if (MANY) return { color: runColor(run), dash: [[], [6, 4], [2, 3]][position % 3] };
  return { color: line.role ? "--" + line.role : "--l" + (position % 3), dash: [] };
}

function tracesOf(panel) {
  const traces = [];
  panel.lines.forEach((line) =>
    RUNS.forEach((run, position) => {
      const curve = found(run.curves, line);
      const label = [MANY ? plain(run.name) : "", line.label].filter(Boolean).join(", ");
      if (curve) traces.push({ curve, label, ...lookOf(panel, line, position) });
      const tested = found(run.eval_curves, line);
      if (tested) traces.push({ curve: tested, label: (label + " evaluation").trim(), points: true, ...lookOf(panel, line, position) });
    }),
  );
  return traces;
}

function dataOf(traces, stacked) {
  const tables = traces.map(({ curve, points }) => [curve[0], curve[1], points ? curve[1] : smoothed(curve[1])]);
  const joined = uPlot.join(tables);
  if (!stacked) return { data: joined, values: joined };
  const data = [joined[0]];
  const below = new Array(joined[0].length).fill(0);
  for (let series = 1; series < joined.length; series += 2) {
    const top = joined[series + 1].map((value, i) => (value === null || value === undefined ? value : (below[i] += value)));
    data.push(new Array(top.length).fill(null), top);
  }
  return { data, values: joined };
}

function seriesOf(traces, stacked) {
  const series = [{}];
  for (const { color, dash, points } of traces) {
    series.push({ stroke: () => alpha(color, 0.28), width: 1, dash, points: { show: false }, show: !points && !stacked });
    series.push({
      stroke: () => css(color),
      width: points ? 0 : 2,
      dash,
      points: points ? { show: true, size: 8, width: 2, fill: () => css("--card"), stroke: () => css(color) } : {},
    });
  }
  return series;
}

// Between neighbors of a stack; the lowest one reaches down to zero.
function bandsOf(traces) {
  return traces.slice(1).map(({ color }, i) => ({ series: [2 * (i + 2), 2 * (i + 1)], fill: () => alpha(color, 0.3) }));
}

function upright(chart, step, color, dash, flag) {
  const x = chart.valToPos(step, "x", true);
  const { left, top, width, height } = chart.bbox;
  if (!(x >= left && x <= left + width)) return;
  const context = chart.ctx, unit = devicePixelRatio;
  context.save();
  context.strokeStyle = context.fillStyle = css(color);
  context.lineWidth = unit;
  context.setLineDash(dash.map((part) => part * unit));
  context.beginPath();
  context.moveTo(x, top);
  context.lineTo(x, top + height);
  context.stroke();
  if (flag) {
    context.beginPath();
    context.moveTo(x - 4 * unit, top);
    context.lineTo(x + 4 * unit, top);
    context.lineTo(x, top + 7 * unit);
    context.fill();
  }
  context.restore();
}

function drawMarks(chart) {
  RUNS.forEach((run, position) => {
    const color = MANY ? runColor(position) : "--warn";
    run.resumed_at.forEach((step) => upright(chart, step, MANY ? color : "--gray", [1, 3], false));
    run.warnings.forEach((warning) => upright(chart, warning.step, color, [4, 3], true));
  });
}

function readout(panel, traces, chart, shown) {
  const index = chart.cursor.idx;
  const hovering = index !== null && index !== undefined;
  const parts = traces.map(({ label, color, dash }, i) => {
    const values = shown()[2 * i + 2];
    let at = hovering ? index : values.length - 1;
    while (at >= 0 && (values[at] === undefined || (!hovering && values[at] === null))) at -= 1;
    return el("span", { "--k": css(color) }, el("i", { class: "key" + (dash.length ? " dash" : "") }), label ? label + " " : "",
      el("b", {}, number(at < 0 ? null : values[at], panel.share)));
  });
  return [...parts, el("span", {}, hovering ? "step " + chart.data[0][index] : "")];
}

function drawPanel(panel, grid) {
  const traces = tracesOf(panel);
  if (!traces.length) return;
  const stacked = panel.stacked && !MANY;
  const now = el("div", { class: "now" });
  const plot = el("div", { class: "plot", role: "img" });
  grid.append(el("figure", { class: "panel" },
    el("figcaption", {}, el("h3", {}, plain(panel.title)), el("span", { class: "unit" }, panel.unit)),
    now, plot, panel.hint ? el("p", { class: "hint" }, panel.hint) : null));
  let { data, values } = dataOf(traces, stacked);
  const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, font: "11.5px system-ui, sans-serif" };
  const series = seriesOf(traces, stacked);
  if (stacked) series[2].fill = () => alpha(traces[0].color, 0.3);
  const chart = new uPlot({
    width: Math.max(200, plot.clientWidth), height: 190,
    scales: { x: { time: false }, y: { range: (u, low, high) => rangeOf(panel, stacked, low, high) } },
    axes: [{ ...axis, size: 26 }, { ...axis, size: 50, values: (u, ticks) => ticks.map((tick) => (panel.share ? Math.round(100 * tick) + "%" : number(tick))) }],
    series,
    bands: stacked ? bandsOf(traces) : [],
    legend: { show: false },
    cursor: { y: false, sync: { key: "curves" }, points: { show: false } },
    hooks: {
      draw: [drawMarks],
      setCursor: [(u) => now.replaceChildren(...readout(panel, traces, u, () => values))],
    },
  }, data, plot);
  const tell = () => {
    now.replaceChildren(...readout(panel, traces, chart, () => values));
    plot.setAttribute("aria-label", panel.title + " over the steps: " + now.textContent);
  };
  const again = () => {
    ({ data, values } = dataOf(traces, stacked));
    const { min, max } = chart.scales.x;
    chart.setData(data, false);
    chart.setScale("x", { min, max }); // the zoom stays, the other axis follows
    tell();
  };
  tell();
  charts.push({ chart, again, recolor: () => { chart.redraw(false); tell(); } });
  new ResizeObserver(() => {
    if (plot.clientWidth && plot.clientWidth !== chart.width) chart.setSize({ width: plot.clientWidth, height: 190 });
  }).observe(plot);
}

function rangeOf(panel, stacked, low, high) {
  if (low === null || high === null) return [0, 1];
  if (panel.share || stacked) return [0, panel.share ? Math.min(1, Math.max(high * 1.08, 0.05)) : high * 1.08 || 1];
  const constant = high - low <= 1e-9 * Math.max(Math.abs(high), Math.abs(low)); // but for the rounding of the mean
  const room = constant ? Math.abs(high) * 0.1 || 1 : (high - low) * 0.08;
  return [!constant && low >= 0 && low < (high - low) ? 0 : low - room, high + room];
}

function startCurves() {
  if (MANY) $("legend").append(...RUNS.map((run, i) => el("span", {}, el("span", { class: "dot r" + (i % 6) }), el("bdi", {}, plain(run.name)))));
  DATA.panels.forEach((panel) => drawPanel(panel, $("panels")));
  if (!charts.length) $("panels").append(el("p", { class: "hint" }, "Nothing was logged yet."));
  const others = DATA.other_metrics;
  $("others-count").textContent = others.length;
  $("others").hidden = !others.length;
  $("others").addEventListener("toggle", () => {
    if ($("other-panels").childElementCount) return;
    others.forEach((name) => drawPanel({ title: name, unit: "", lines: [{ label: "", metrics: [name], role: "" }], stacked: false, hint: "", share: false }, $("other-panels")));
  });
  $("smoothing").addEventListener("input", () => {
    smoothing = Number($("smoothing").value);
    $("smoothing-value").textContent = smoothing.toFixed(2);
    charts.forEach(({ again }) => again());
  });
  $("unzoom").addEventListener("click", () => charts.forEach(({ chart }) => chart.setData(chart.data, true)));
  document.querySelectorAll(".warned .at").forEach((button) => button.addEventListener("click", () => {
    $("curves").scrollIntoView();
    const step = Number(button.dataset.step);
    charts.forEach(({ chart }) => chart.setCursor({ left: chart.valToPos(step, "x"), top: 10 }));
  }));
}
