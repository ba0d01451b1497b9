// Keeps a page of the dashboard up to date: it asks the server for what is new, and asks nothing while the tab is hidden.
(() => {
  "use strict";
  const root = document.querySelector("main.replicas");
  const settings = JSON.parse(root.querySelector("script.settings").textContent);
  const connection = root.querySelector(".connection");
  const rows = root.querySelector("tbody.rows");
  const isReport = root.querySelector("script.data") !== null;
  const MAX_PAUSE_S = 30;
  let { version } = settings;
  let failures = 0;
  let timer = null;

  const ages = [[86400, "d"], [3600, "h"], [60, "min"]];
  const age = (s) => {
    const [size, unit] = ages.find(([each]) => s >= each) ?? [1, "s"];
    return `${Math.max(0, Math.floor(s / size))} ${unit}`;
  };
  const showAges = () => {
    for (const each of root.querySelectorAll("time[data-at]")) each.textContent = age(Date.now() / 1000 - Number(each.dataset.at));
  };

  // A row of a table can only be parsed in a template.
  const rowOf = (html) => {
    const made = document.createElement("template");
    made.innerHTML = html;
    return made.content.firstElementChild;
  };
  function showRows({ parts, order, charts }) {
    const known = new Map([...rows.children].map((row) => [row.dataset.key, row]));
    for (const [key, html] of Object.entries(parts)) {
      const made = rowOf(html);
      const old = known.get(key);
      if (old) {
        const isFocused = old.contains(document.activeElement);
        old.replaceWith(made);
        if (isFocused) made.querySelector("a")?.focus();
      }
      known.set(key, made);
    }
    if (order) {
      rows.replaceChildren(...order.map((key) => known.get(key)).filter(Boolean));
      root.querySelector(".none").hidden = order.length > 0;
    }
    const head = { ...charts?.["="] };
    for (const [name, patch] of Object.entries(charts?.["."] ?? {})) head[name] = patch["="];
    for (const [name, text] of Object.entries(head)) {
      const shown = root.querySelector(`.${CSS.escape(name)}`);
      shown.textContent = text;
      shown.hidden = text === "";
    }
    showAges();
  }
  function showControls(controls) {
    for (const [name, html] of Object.entries(controls ?? {})) {
      const part = root.querySelector(`.live-part[data-part="${CSS.escape(name)}"]`);
      if (part && part.dataset.shown !== html) {
        part.dataset.shown = html;
        part.innerHTML = html;
      }
    }
  }

  async function look() {
    clearTimeout(timer);
    timer = null;
    if (document.hidden || !settings.changes) return;
    try {
      const answer = await fetch(`${settings.changes}?since=${version}`, { credentials: "same-origin" });
      if (!answer.ok) throw new Error(answer.status === 403 ? "The dashboard was started again. Open the address that it prints." : `The dashboard answered ${answer.status}.`);
      const changes = await answer.json();
      failures = 0;
      connection.hidden = true;
      if (changes.parts && !rows && !isReport) { location.reload(); return; }
      if (changes.parts && rows) showRows(changes);
      if (changes.parts && isReport) root.dispatchEvent(new CustomEvent("changes", { detail: changes }));
      if (changes.controls) showControls(changes.controls);
      version = changes.version;
    } catch (error) {
      failures += 1;
      connection.hidden = false;
      connection.textContent = error instanceof TypeError ? "The dashboard does not answer, so this page shows what it knew last." : error.message;
    }
    if (timer === null) timer = setTimeout(look, 1000 * Math.min(MAX_PAUSE_S, settings.poll_s * 2 ** Math.min(failures, 5)));
  }

  // Buttons: the first press asks, and the second one sends.
  const confirm = root.querySelector(".confirm");
  if (confirm) {
    const yes = confirm.querySelector(".yes");
    let verb = "";
    let pressed = null;
    const close = () => { confirm.hidden = true; verb = ""; pressed?.focus(); };
    root.addEventListener("click", (event) => {
      const button = event.target.closest?.("button[data-verb]");
      if (!button) return;
      pressed = button;
      verb = button.dataset.verb;
      confirm.querySelector(".question").textContent = button.dataset.question;
      yes.textContent = `Yes, ${verb}`;
      confirm.hidden = false;
      confirm.querySelector(".no").focus();
    });
    confirm.querySelector(".no").addEventListener("click", close);
    confirm.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
    yes.addEventListener("click", async () => {
      const path = settings.changes.replace(/changes$/, verb);
      close();
      try {
        const answer = await fetch(path, { method: "POST", credentials: "same-origin", headers: { [settings.header]: settings.proof } });
        if (!answer.ok && answer.status !== 409) throw new Error(`The dashboard answered ${answer.status}.`);
        showControls((await answer.json()).controls);
        if (answer.status === 409) throw new Error("Another action takes place.");
      } catch (error) {
        connection.hidden = false;
        connection.textContent = error.message;
      }
    });
  }

  // The log of a rank. Its lines are texts, never HTML.
  const logs = root.querySelector("details.logs");
  if (logs) {
    const MAX_LINES = 2000;
    const [rank, follow, search, stacks, note, log] = [".rank", ".follow", ".search", ".stacks", ".note", ".log"].map((each) => logs.querySelector(each));
    const path = (name, query) => settings.changes.replace(/changes$/, name) + "?" + new URLSearchParams({ rank: rank.value, ...query });
    let last = 0;
    let shown = "log";
    let asked = 0;
    let next = null;
    const write = (lines, isNew) => {
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 30;
      if (isNew) log.replaceChildren();
      if (lines.length) log.append(document.createTextNode(lines.map((line) => `${line}\n`).join("")));
      let n = 0;
      for (const each of [...log.childNodes].reverse()) {
        if (n >= MAX_LINES) each.remove();
        n += each.data.split("\n").length - 1;
      }
      if (isNew || (isAtEnd && follow.checked)) log.scrollTop = log.scrollHeight;
    };
    const read = async (name, query, isNew) => {
      const mine = ++asked;
      try {
        const answer = await fetch(path(name, query), { credentials: "same-origin" });
        const found = await answer.json();
        if (mine !== asked) return;
        note.textContent = found.note || (isNew && !found.lines.length ? { log: "The rank has printed nothing.", search: "No line has this text.", stacks: "No stacks exist. Replicas write stacks when they hang." }[shown] : "");
        write(found.lines, isNew);
        last = found.last ?? last;
      } catch {
        if (mine === asked) note.textContent = "The log cannot be read now.";
      }
    };
    const tail = async () => {
      clearTimeout(next);
      if (logs.open && shown === "log" && !document.hidden && (follow.checked || last === 0)) await read("log", { after: last }, last === 0);
      next = setTimeout(tail, 1000 * settings.poll_s);
    };
    const restart = () => {
      last = 0;
      shown = search.value ? "search" : "log";
      if (shown === "search") read("log", { search: search.value }, true);
      else tail();
    };
    logs.addEventListener("toggle", () => { if (logs.open) restart(); });
    rank.addEventListener("change", restart);
    follow.addEventListener("change", () => { if (follow.checked && shown === "log") tail(); });
    search.addEventListener("change", restart);
    stacks.addEventListener("click", () => { shown = "stacks"; search.value = ""; read("stacks", {}, true); });
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  showAges();
  setInterval(showAges, 1000);
  look();
})();
