// What stands around the charts: the runs to switch on and off, the axes, and downloads.
function drawLegend() {
  $("legend").replaceChildren(...(MANY ? RUNS : []).map((run, position) => {
    const shown = !isHidden(position);
    const missing = shown && !hasAxis(run, state.x) ? ` (no ${AXES[state.x].label} recorded)` : "";
    const toggle = () => undisturbed(() => {
      toggleRun(position);
      drawCurves();
      drawDifficulty();
    });
    return el("button", { type: "button", "data-key": "run-" + position, "aria-pressed": String(shown), title: shown ? "Hide this run" : "Show this run", onclick: toggle },
      el("span", { class: "dot r" + (position % 6) }), el("bdi", {}, plain(run.name)), missing);
  }));
}

function showTools() {
  $("x").value = state.x;
  $("log").checked = state.y === "log";
  $("smoothing").value = state.smooth;
  $("smoothing-value").textContent = state.smooth === "0" ? "off" : state.smooth + "%";
  for (const option of $("x").options) option.disabled = !RUNS.some((run) => hasAxis(run, option.value));
}

function startTools() {
  const change = (changes) => {
    setState(changes);
    showTools();
    undisturbed(drawCurves);
  };
  $("x").addEventListener("input", () => {
    zoom = null;
    change({ x: $("x").value });
  });
  $("log").addEventListener("input", () => change({ y: $("log").checked ? "log" : "linear" }));
  $("smoothing").addEventListener("input", () => change({ smooth: $("smoothing").value }));
  $("unzoom").addEventListener("click", () => {
    zoom = null;
    drawCurves();
  });
  $("others").addEventListener("toggle", () => undisturbed(drawCurves));
  $("warnings").addEventListener("click", (event) => {
    const button = event.target.closest(".at");
    if (!button) return;
    const run = RUNS[button.dataset.run];
    if (!hasAxis(run, state.x)) return;
    $("hero").scrollIntoView({ block: "nearest" });
    charts.forEach(({ chart }) => chart.setCursor({ left: chart.valToPos(onAxis(run, Number(button.dataset.step)), "x"), top: 10 }));
  });
  showTools();
}

function download(name, blob) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const fileName = (panel, ending) => panel.title.toLowerCase().replace(/[^a-z0-9]+/g, "_").replace(/^_|_$/g, "") + ending;
const saveCsv = (panel) => download(fileName(panel, ".csv"), new Blob([csvOf(panel)], { type: "text/csv" }));

// The chart below its title and legend, as it stands on the page.
function pictureOf(panel, traces, chart) {
  const unit = devicePixelRatio, line = 20 * unit, from = chart.ctx.canvas;
  const canvas = el("canvas", { width: from.width, height: from.height + line * (2 + traces.length) });
  const context = canvas.getContext("2d");
  context.fillStyle = css("--card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  const write = (text, row, weight, color, left) => {
    context.fillStyle = css(color);
    context.font = `${weight} ${13 * unit}px system-ui, sans-serif`;
    context.fillText(text, left * unit, line * row - 5 * unit);
  };
  write(`${plain(panel.title)}${panel.unit ? `, ${panel.unit}` : ""}, over ${AXES[state.x].label}`, 1, 600, "--ink", 10);
  traces.forEach(({ name, what, color }, i) => {
    write("●", i + 2, 400, color, 10);
    write([name || plain(RUNS[0].name), what].filter(Boolean).join(", "), i + 2, 400, "--ink", 28);
  });
  context.drawImage(from, 0, line * (1.5 + traces.length));
  return canvas;
}

const savePng = (panel, traces, chart) => pictureOf(panel, traces, chart).toBlob((blob) => download(fileName(panel, ".png"), blob));
