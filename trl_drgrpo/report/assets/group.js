// The group view: rewards, their mean, advantages of one prompt's completions, and GRPO's z-scores beside them.
const BAR = { width: 200, height: 16 };

function bars(low, high, value, look, extra) {
  const at = (x) => ((x - low) / (high - low || 1)) * (BAR.width - 4) + 2;
  const parts = [svg("line", { class: "b-axis", x1: at(0), x2: at(0), y1: 0, y2: BAR.height })];
  if (value !== null && value !== undefined) {
    const [from, to] = [Math.min(at(0), at(value)), Math.max(at(0), at(value))];
    parts.push(svg("rect", { class: look, x: from, y: 3, width: Math.max(to - from, 1), height: 10, rx: 1.5 }));
  }
  if (extra !== null && extra !== undefined) parts.push(svg("line", { class: "b-base", x1: at(extra), x2: at(extra), y1: 0, y2: BAR.height }));
  return svg("svg", { viewBox: `0 0 ${BAR.width} ${BAR.height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, parts);
}

const verdict = (row) => row.right === null ? null : el("span", { class: "verdict " + (row.right ? "correct" : "incorrect") }, row.right ? "✓ correct" : "✗ incorrect");
const numbers = (values) => values.filter((value) => value !== null && value !== undefined);
const lengthOf = (row) => row.length !== null ? row.length + " tokens" : row.spans.reduce((sum, span) => sum + span.text.length, row.cut) + " characters";

function groupView(group, current, choose) {
  const rewards = numbers(group.rows.map((row) => row.reward)), base = numbers([group.baseline]);
  const low = Math.min(0, ...rewards, ...base), high = Math.max(0, ...rewards, ...base);
  // One scale for both advantages: that they differ in size is what the division by the std does.
  const reach = Math.max(1e-9, ...numbers(group.rows.flatMap((row) => [row.advantage, row.zscore])).map(Math.abs));
  const side = (value) => (value < 0 ? "b-neg" : "b-pos");
  const rows = group.rows.map((row, i) => el("tr", { "aria-current": String(i === current), onclick: () => choose(i) },
    el("td", { class: "n" }, el("button", { type: "button", "data-key": "row-" + i, "aria-label": `completion ${i + 1} of ${group.rows.length}` }, String(i + 1))),
    el("td", {}, verdict(row)),
    el("td", { class: "bars" }, bars(low, high, row.reward, "b-reward", group.baseline)), el("td", { class: "n", "data-is": "reward" }, number(row.reward)),
    el("td", { class: "bars" }, bars(-reach, reach, row.advantage, side(row.advantage))), el("td", { class: "n", "data-is": "advantage" }, row.advantage === null ? "–" : signed(row.advantage)),
    el("td", { class: "bars" }, bars(-reach, reach, row.zscore, side(row.zscore) + " b-z")), el("td", { class: "n", "data-is": "zscore" }, row.zscore === null ? "–" : signed(row.zscore)),
    el("td", { class: "n" }, lengthOf(row))));
  const head = ["", "", `reward, group mean ${number(group.baseline)}`, "", "advantage", "", "GRPO's advantage", "", "length"];
  return el("div", { class: "group-box", role: "region", tabindex: 0, "aria-label": "The group's completions" }, el("table", { class: "group" },
    el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col", title: text.startsWith("GRPO") ? "(reward − group mean) / std" : null }, text)))), el("tbody", {}, rows)));
}
