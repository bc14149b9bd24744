// The browser of completions: filters, an order, and a list that draws only what is in view.
const ITEM = 52; // pixels
let entries = [], shownEntries = [], selected = 0;
const fields = {};

const textOf = (row) => (row.joined ??= row.spans.map((span) => span.text).join(""));
const sourceOf = (group) => ({ train: "training", eval: "evaluation" })[group.mode] || plain(group.mode);
const keyOf = ({ r, group, i }) => [r, group.mode, group.step, group.index, i].join(".");

// Whether the update learned something from the group; of a group without advantages: whether its rewards differ.
function isLive(group) {
  const advantages = numbers(group.rows.flatMap((row) => [row.advantage, ...row.spans.map((span) => span.advantage)]));
  return advantages.length ? advantages.some(Boolean) : new Set(numbers(group.rows.map((row) => row.reward))).size > 1;
}

// The newest first; groups of a step, and rows of a group, in their own order.
const newest = (groups) => [...groups].sort((a, b) => b.step - a.step || a.index - b.index);
const allEntries = () => RUNS.flatMap((run, r) => newest(run.groups).flatMap((group) => {
  const live = isLive(group);
  return group.rows.map((row, i) => ({ run, r, group, row, i, live }));
}));

const rowSize = (row) => row.length ?? textOf(row).length + row.cut;
const ORDERS = {
  newest: ["newest", null],
  advantage: ["advantage, highest", (a, b) => (b.row.advantage ?? -Infinity) - (a.row.advantage ?? -Infinity) || 0],
  "-advantage": ["advantage, lowest", (a, b) => (a.row.advantage ?? Infinity) - (b.row.advantage ?? Infinity) || 0],
  length: ["longest", (a, b) => rowSize(b.row) - rowSize(a.row)],
  "-length": ["shortest", (a, b) => rowSize(a.row) - rowSize(b.row)],
};

function matches(entry) {
  const { run, answers, groups, source, from, to, search } = state, { group, row } = entry;
  if (run !== "" && entry.r !== Number(run)) return false;
  if (answers !== "" && String(row.right) !== answers) return false;
  if (groups !== "" && entry.live !== (groups === "live")) return false;
  if (source !== "" && group.mode !== source) return false;
  if (from !== "" && group.step < Number(from)) return false;
  if (to !== "" && group.step > Number(to)) return false;
  const wanted = search.toLowerCase();
  return !wanted || textOf(row).toLowerCase().includes(wanted) || group.prompt.toLowerCase().includes(wanted);
}

// What the link names, else the newest completion of a live group, else the first one.
function refilter() {
  shownEntries = entries.filter(matches);
  const order = (ORDERS[state.sort] || ORDERS.newest)[1];
  if (order) shownEntries.sort(order);
  $("shown-count").textContent = `${shownEntries.length} of ${entries.length} completions`;
  const wanted = state.shown === "" ? -1 : shownEntries.findIndex((entry) => keyOf(entry) === state.shown);
  show(wanted >= 0 ? wanted : order ? 0 : Math.max(0, shownEntries.findIndex((entry) => entry.live)));
}

function drawList() {
  const list = $("list"), first = Math.max(0, Math.floor(list.scrollTop / ITEM) - 4);
  const last = Math.min(shownEntries.length, first + Math.ceil(list.clientHeight / ITEM) + 8);
  const items = [];
  for (let at = first; at < last; at += 1) {
    const { run, r, group, row, i } = shownEntries[at];
    const item = el("div", { class: "item", role: "option", id: "item-" + at, "aria-selected": String(at === selected), "aria-posinset": at + 1, "aria-setsize": shownEntries.length, onclick: () => select(at) },
      el("div", { class: "top" }, MANY ? el("span", { class: "dot r" + (r % 6), title: plain(run.name) }) : null,
        el("span", { class: "place" }, `Step ${group.step} · group ${group.index + 1} · ${i + 1} of ${group.rows.length}${group.mode === "train" ? "" : " · " + sourceOf(group)}`), verdict(row)),
      el("div", { class: "top" }, el("div", { class: "text" }, el("bdi", {}, plain(textOf(row).slice(0, 120)).replace(/\s+/g, " "))), el("b", { title: "advantage" }, row.advantage === null ? "" : signed(row.advantage))));
    item.style.top = at * ITEM + "px";
    items.push(item);
  }
  const space = el("div", { role: "presentation" });
  space.style.height = shownEntries.length * ITEM + "px";
  list.replaceChildren(space, ...items);
  list.setAttribute("aria-activedescendant", "item-" + selected);
}

function show(at) {
  selected = Math.min(Math.max(at, 0), Math.max(shownEntries.length - 1, 0));
  const list = $("list"), top = selected * ITEM;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ITEM > list.scrollTop + list.clientHeight) list.scrollTop = top + ITEM - list.clientHeight;
  drawList();
  drawDetail(shownEntries[selected]);
}

// The reader's own choice, which the link keeps.
function select(at) {
  show(at);
  if (shownEntries[selected]) setState({ shown: keyOf(shownEntries[selected]) });
}

// From one group to the next or the one before.
function selectGroup(direction) {
  const group = shownEntries[selected] && shownEntries[selected].group;
  let at = selected;
  while (shownEntries[at] && shownEntries[at].group === group) at += direction;
  if (shownEntries[at]) select(shownEntries.findIndex((entry) => entry.group === shownEntries[at].group));
}

function filterBar() {
  const field = (name, element) => {
    fields[name] = element;
    element.value = state[name];
    element.addEventListener("input", () => {
      setState({ [name]: element.value, ...(name === "sort" ? { shown: "" } : {}) }); // a new order begins at its top
      refilter();
    });
    return element;
  };
  const chooser = (label, name, pairs) => el("label", {}, label + " ", field(name, el("select", { id: name }, pairs.map(([value, text]) => el("option", { value }, text)))));
  const sources = [...new Set(entries.map((entry) => entry.group.mode))];
  const anyVerdict = entries.some((entry) => entry.row.right !== null);
  return el("div", { class: "filters" },
    MANY ? chooser("Run", "run", [["", "all"], ...RUNS.map((run, i) => [i, plain(run.name)])]) : null,
    chooser("Groups", "groups", [["", "all"], ["live", "live"], ["dead", "dead"]]),
    anyVerdict ? chooser("Completions", "answers", [["", "all"], ["true", "correct"], ["false", "incorrect"]]) : null,
    sources.length > 1 ? chooser("From", "source", [["", "training and evaluation"], ...sources.map((mode) => [mode, sourceOf({ mode })])]) : null,
    el("label", {}, "Steps ", field("from", el("input", { type: "number", min: 0, "aria-label": "from step", placeholder: "from" }))),
    field("to", el("input", { type: "number", min: 0, "aria-label": "to step", placeholder: "to" })),
    chooser("Order", "sort", Object.entries(ORDERS).map(([name, [label]]) => [name, label])),
    field("search", el("input", { type: "search", id: "search", placeholder: "Search the text", "aria-label": "search in prompts and completions" })),
    el("span", { class: "hint", id: "shown-count", role: "status" }));
}

// Where the page does not hold everything that was recorded.
function howMany() {
  const some = RUNS.filter((run) => run.groups.length < run.groups_total).map((run) =>
    `${MANY ? plain(run.name) + ": " : ""}${run.groups.length} of ${run.groups_total} recorded groups`);
  return some.length ? some.join("; ") + ": the newest, some spread over the whole run, and the extremes." : "";
}

// The bar of filters stays while a run is followed; the list and the completion are drawn anew.
function drawCompletions() {
  entries = allEntries();
  $("widget").hidden = false;
  if (!entries.length) {
    $("browser").replaceChildren(el("p", { class: "hint" }, "No completions were recorded. With plain TRL, log_completions=True records them."));
    return;
  }
  if (!$("list")) {
    const key = (name) => el("kbd", {}, name);
    $("browser").replaceChildren(
      el("p", { class: "hint", id: "how-many" }),
      filterBar(),
      el("p", { class: "keys" }, key("j"), " ", key("k"), " next, previous · ", key("n"), " ", key("p"), " group · ", key("/"), " search · ", key("f"), " unfold · ", key("t"), " light or dark"),
      el("div", { class: "panes" },
        el("div", { class: "list", id: "list", role: "listbox", tabindex: 0, "aria-label": "Completions", onscroll: drawList }),
        el("div", { class: "detail", id: "detail" })));
    new ResizeObserver(drawList).observe($("list"));
  }
  $("how-many").textContent = howMany();
  refilter();
}
