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
      `Step ${group.step}, group ${group.index + 1}`, el("span", { class: "unit" }, [sourceOf(group), hasSignal(group) ? null : "no signal: every completion earned the same"].filter(Boolean).join(" · "))),
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
