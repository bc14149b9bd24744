// Difficulty over time as a heat map, the gradient weight by difficulty with both weightings, and what the curriculum keeps.
const HEAT = { width: 560, left: 84, row: 22 };
const bucketName = (bucket) => ({ 0: "none correct", 100: "all correct" })[bucket] || bucket.replace("-", "–") + "%";

function heatMap(difficulty, most, read) {
  const buckets = [...DATA.buckets].reverse();
  const columns = difficulty.steps.length, wide = (HEAT.width - HEAT.left) / columns, high = HEAT.row * buckets.length;
  const cells = buckets.flatMap((bucket, row) => difficulty.groups[bucket].map((share, column) => share === null ? null :
    svg("rect", { class: "heat", x: HEAT.left + column * wide, y: row * HEAT.row, width: wide + 0.3, height: HEAT.row - 1, "fill-opacity": share / most, "data-at": bucket + "/" + column })));
  const chart = svg("svg", { viewBox: `0 0 ${HEAT.width} ${high + 20}`, role: "img", tabindex: 0, "aria-label": "Share of groups per difficulty over the steps. Arrow keys read the cells." },
    svg("rect", { class: "frame", x: HEAT.left, y: 0, width: HEAT.width - HEAT.left, height: high }), cells,
    buckets.map((bucket, row) => svg("text", { x: HEAT.left - 6, y: row * HEAT.row + 15, "text-anchor": "end" }, bucketName(bucket))),
    svg("text", { x: HEAT.left, y: high + 15 }, "step " + difficulty.steps[0]),
    svg("text", { x: HEAT.width, y: high + 15, "text-anchor": "end" }, String(difficulty.steps[columns - 1])));
  const at = { row: 0, column: columns - 1 };
  const say = (row, column) => {
    const bucket = buckets[row];
    Object.assign(at, { row, column });
    read.textContent = `step ${difficulty.steps[column]}: ${number(difficulty.groups[bucket][column], true)} of the groups had ${bucketName(bucket)}${bucket === "0" || bucket === "100" ? "" : " correct"}`;
  };
  chart.addEventListener("pointermove", (event) => {
    const found = event.target.dataset?.at?.split("/");
    if (found) say(buckets.indexOf(found[0]), Number(found[1]));
  });
  chart.addEventListener("keydown", (event) => {
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] || [];
    if (down === undefined) return;
    event.preventDefault();
    say(Math.min(buckets.length - 1, Math.max(0, at.row + down)), Math.min(columns - 1, Math.max(0, at.column + right)));
  });
  return chart;
}

// A bar per bucket and kind; values: kind -> bucket -> share, null = nothing to show.
function bucketBars(label, values, kinds, buckets) {
  const left = HEAT.left, room = HEAT.width - left - 60;
  const most = Math.max(...kinds.flatMap(([kind]) => buckets.map((bucket) => values[kind][bucket] || 0)), 0.01);
  const row = 18 * kinds.length + 10;
  const parts = buckets.flatMap((bucket, i) => [
    svg("text", { x: left - 6, y: i * row + row / 2, "text-anchor": "end" }, bucketName(bucket)),
    ...kinds.flatMap(([kind, look], k) => {
      const share = values[kind][bucket], wide = ((share || 0) / most) * room;
      return share === null ? [] : [svg("rect", { class: look, x: left, y: i * row + k * 17, width: Math.max(wide, 0.5), height: 15, rx: 2 }),
        svg("text", { class: "ink", x: left + wide + 6, y: i * row + k * 17 + 12 }, number(share, true))];
    })]);
  return svg("svg", { viewBox: `0 0 ${HEAT.width} ${row * buckets.length}`, role: "img", "aria-label": label }, parts);
}

function gradientWeightBars(weight) {
  const kinds = [["gradient_weight_frac", "bar-dr", "Dr. GRPO's weights"], ["gradient_weight_frac_grpo", "bar-grpo", "GRPO's weights"]].filter(([kind]) => weight[kind]);
  // Groups that are all correct or all incorrect have weight through step rewards, or through another reward.
  const buckets = DATA.buckets.filter((bucket, i) => (i > 0 && i < DATA.buckets.length - 1) || kinds.some(([kind]) => weight[kind][bucket] > 0));
  const chart = bucketBars("Share of the gradient weight per difficulty", weight, kinds, buckets);
  const legend = el("p", { class: "legend" }, kinds.map(([, look, name]) =>
    el("span", { "--k": look === "bar-dr" ? "var(--pos)" : "var(--gray)" }, el("i", { class: "key" }), name)));
  return el("div", {}, el("h3", {}, "Gradient weight by difficulty"), el("p", { class: "hint" }, "Sum of |weight| over the tokens, as a share; mean over the run."), legend, chart);
}

function keepProbabilityBars(kept) {
  const buckets = DATA.buckets.filter((bucket) => kept[bucket] !== null);
  const chart = bucketBars("Probability to keep a prompt per estimated pass rate", { kept }, [["kept", "bar-dr", ""]], buckets);
  return el("div", {}, el("h3", {}, "Curriculum: prompts kept"), el("p", { class: "hint" }, "Probability to keep a prompt, by its estimated pass rate; mean over the run. The group's weight is the inverse."), chart);
}

function drawDifficulty() {
  const withIt = RUNS.map((run, i) => [run, i]).filter(([run, i]) => run.difficulty && !isHidden(i));
  $("difficulty").hidden = $("nav-difficulty").hidden = !withIt.length;
  const most = Math.max(0.01, ...withIt.flatMap(([run]) => Object.values(run.difficulty.groups).flat()));
  $("difficulty-body").replaceChildren(el("div", { class: "heat-runs" }, withIt.map(([run, i]) => {
    const read = el("p", { class: "heat-read", role: "status" }, `From none to ${number(most, true)} of the groups of a step. Point at a cell for its value.`);
    return el("div", { class: "heat-run" },
      el("div", {}, el("h3", {}, MANY ? el("span", { class: "dot r" + (i % 6) }) : null, MANY ? el("bdi", {}, plain(run.name)) : "Share of groups over the steps"),
        read, heatMap(run.difficulty, most, read)), Object.keys(run.difficulty.gradient_weight).length ? gradientWeightBars(run.difficulty.gradient_weight) : null,
      Object.keys(run.difficulty.keep_probability).length ? keepProbabilityBars(run.difficulty.keep_probability) : null);
  })));
}
