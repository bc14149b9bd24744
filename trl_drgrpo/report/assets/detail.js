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

// The tree of a forked group: each stretch of tokens once, what goes on from it below, rewards at the completions.
const spreadOf = ([low, high]) => (low === undefined ? "–" : low === high ? signed(low) : `${signed(low)} to ${signed(high)}`);
const chip = (name, value) => el("span", {}, name + " ", el("b", {}, value));

function treeView(group, current, choose, reach) {
  const item = (node, name) => {
    const [first, end] = node.rows, rows = group.rows.slice(first, end), row = rows[0];
    const isEnd = !node.branches.length, isCurrent = current >= first && current < end;
    const spans = group.rows[node.shown].spans.filter((span) => (span.level || 0) === node.level);
    const rest = isEnd ? [
      ...(rows.length === 1 && Object.keys(row.rewards).length > 1 ? Object.entries(row.rewards).map(([of, value]) => chip(plain(of), number(value))) : []),
      chip("length", lengthOf(row) + (row.truncated ? ", truncated" : ""))] : [];
    const head = el("div", { class: "chips" },
      isEnd ? el("button", { type: "button", "data-key": "row-" + first, "aria-current": String(isCurrent), "aria-label": `completion ${first + 1} of ${group.rows.length}`, onclick: () => choose(first) }, `Completion ${first + 1}`)
        : el("b", {}, (node.level ? "Branch " : "Parent ") + name),
      isEnd ? verdict(row) : null,
      rows.length > 1 && isEnd ? el("b", { class: "uncut" }, `not cut (× ${rows.length})`) : null,
      chip(rows.every((other) => other.reward === row.reward) ? "reward" : "mean reward", number(node.reward)),
      chip("advantage", spreadOf(node.advantages)), rest);
    const box = el("div", { class: "text-box", dir: "ltr" }, spans.length ? colored(spans, reach) : el("span", { class: "unit" }, row.cut ? "left out here" : "nothing"));
    const length = spans.reduce((sum, span) => sum + span.text.length, 0);
    return el("li", { class: isCurrent ? "current" : "" }, head, ...folding(box, length, "stretch"), isEnd ? null : list(node.branches, name + "."));
  };
  const list = (nodes, prefix) => el("ul", {}, nodes.map((node, i) => item(node, prefix + (i + 1))));
  const tree = list(group.tree, "");
  tree.className = "tree";
  tree.setAttribute("aria-label", "Completions as a tree");
  return tree;
}

// "2 parents, 2 levels of 3 branches"
function treeTitle(group) {
  const [levels, branches] = [group.forks.length, group.forks[0]];
  return `${group.tree.length} parents, ` + (levels === 1 ? `${branches} branches each` : `${levels} levels of ${branches} branches`);
}

// One completion, colored by advantage, under its group; a group that forks as a tree.
const FOLD = 2400; // pixels of text, about
let asTree = true;

function folding(box, length, label) {
  if (length <= FOLD) return [box];
  box.classList.add("folded");
  const button = el("button", { type: "button", "aria-expanded": "false" }, `Show all of the ${label}`);
  button.addEventListener("click", () => {
    const open = !box.classList.toggle("folded");
    button.setAttribute("aria-expanded", String(open));
    button.textContent = (open ? "Fold the " : "Show all of the ") + label;
  });
  return [box, button];
}

function colored(spans, reach) {
  const nodes = [];
  let step = null;
  for (const span of spans) {
    if (span.step !== undefined && span.step !== step) {
      const score = span.step_reward === undefined ? "" : " · " + number(span.step_reward);
      nodes.push(el("span", { class: "stepmark", title: "step and its reward" }, `${span.step + 1}${score}`));
      step = span.step;
    }
    const side = span.masked ? "masked" : span.advantage > 0 ? "pos" : span.advantage < 0 ? "neg" : "";
    const title = span.masked ? "not trained on" : span.advantage === undefined ? "" : "advantage " + signed(span.advantage);
    nodes.push(el("span", { class: "tok " + side, title, "--a": Math.abs(span.advantage || 0) / reach }, ...visibleNodes(span.text)));
  }
  return nodes;
}

function highlight(box) {
  if (!window.Highlight || !CSS.highlights) return;
  const wanted = fields.search.value.toLowerCase(), ranges = [];
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); wanted && node && ranges.length < 500; node = walker.nextNode()) {
    const text = node.data.toLowerCase();
    for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
      if (at + wanted.length > node.data.length) break;
      const range = new Range();
      range.setStart(node, at);
      range.setEnd(node, at + wanted.length);
      ranges.push(range);
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}

function drawDetail(entry) {
  const pane = $("detail");
  if (!entry) {
    pane.replaceChildren(el("p", { class: "hint" }, "No completion matches."));
    return;
  }
  const { run, r, group, i } = entry;
  const reach = Math.max(1e-9, ...group.rows.flatMap((other) => other.spans.map((span) => Math.abs(span.advantage || 0))));
  const choose = (other) => {
    const at = shownEntries.findIndex((found) => found.group === group && found.i === other);
    if (at >= 0) select(at);
    else drawDetail({ ...entry, row: group.rows[other], i: other }); // filtered out of the list, shown all the same
  };
  const scale = reach === 1e-9 ? null : el("span", { class: "scale" }, "token advantage", el("i", { class: "neg" }), "−" + number(reach), el("i", { class: "pos" }), "+" + number(reach));
  const held = pane.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const prompt = el("div", { class: "prompt", dir: "ltr" }, ...visibleNodes(group.prompt));
  pane.replaceChildren(
    el("h2", {}, MANY ? el("bdi", {}, el("span", { class: "dot r" + (r % 6) }), plain(run.name)) : null,
      `Step ${group.step}, group ${group.index + 1}`, el("span", { class: "unit" }, [sourceOf(group), isLive(group) ? null : "dead: every completion earned the same"].filter(Boolean).join(" · "))),
    ...folding(prompt, group.prompt.length * 3, "prompt"),
    Object.keys(group.columns).length ? el("div", { class: "cols" }, Object.entries(group.columns).map(([name, value]) =>
      el("span", {}, plain(name) + " ", el("bdi", {}, plain(value))))) : "",
    group.tree ? viewSwitch(entry) : "",
    ...(group.tree && asTree ? treeParts(group, i, choose, reach, scale) : rowParts(group, i, choose, reach, scale)));
  fillWidget(group);
  if (held) pane.querySelector(`[data-key="${held}"]`)?.focus({ preventScroll: true });
  highlight(pane.querySelector(".tree, #completion-text"));
}

function viewSwitch(entry) {
  const button = (tree, label) => el("button", { type: "button", "data-key": "view-" + label, "aria-pressed": String(asTree === tree), onclick: () => { asTree = tree; drawDetail(entry); } }, label);
  return el("div", { class: "views", role: "group", "aria-label": "Show the group as" }, button(true, "Tree"), button(false, "Table"));
}

const leftOut = (cut) => (cut ? el("p", { class: "note" }, `${cut} characters of the middle are left out here; the run's files have them.`) : "");

function rowParts(group, i, choose, reach, scale) {
  const row = group.rows[i];
  const chips = [
    ...Object.entries(row.rewards).map(([name, value]) => [plain(name), number(value)]),
    ["advantage", row.advantage === null ? "–" : signed(row.advantage)],
    ["length", lengthOf(row) + (row.truncated ? ", cut off" : "")],
  ];
  const box = el("div", { class: "text-box", id: "completion-text", dir: "ltr" }, colored(row.spans, reach));
  return [
    groupView(group, i, choose),
    el("h2", { id: "completion-title" }, `Completion ${i + 1} of ${group.rows.length}`, verdict(row), scale),
    el("div", { class: "chips" }, chips.map(([name, value]) => chip(name, value))),
    leftOut(row.cut),
    ...folding(box, textOf(row).length, "completion"),
  ];
}

function treeParts(group, i, choose, reach, scale) {
  return [el("h2", {}, treeTitle(group), scale), leftOut(Math.max(...group.rows.map((row) => row.cut))), treeView(group, i, choose, reach)];
}
