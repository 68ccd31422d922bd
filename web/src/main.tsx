// The shell: navigation, theme, the runs that all views share, and the view that the address names.
import { render } from "preact";
import { useEffect, useReducer, useRef, useState } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import "../../src/rl_lab/metrics/style.css";
import "./app.css";
import { get, type Row } from "./api";
import { DARK } from "./chart";
import { Compare } from "./compare";
import { DreamView } from "./dream/view";
import { link, useRoute } from "./route";
import { Run } from "./run";
import { Runs } from "./runs";
import { Notice, useKeys, usePolling } from "./widgets";

type Changes = { version: number; rows: Row[]; gone: string[]; root: string };
const THEMES = ["system", "light", "dark"] as const;

function useRuns() {
  const [rows, setRows] = useState<Map<string, Row>>(new Map());
  const [state, setState] = useState({ root: "", loaded: false, trouble: null as string | null });
  const version = useRef(0);
  usePolling(async () => {
    try {
      const changes = await get<Changes>("/api/runs", { since: version.current });
      if (changes.version < version.current) version.current = 0; // the server was started anew: ask for everything
      else if (changes.version > version.current || !state.loaded) {
        version.current = changes.version;
        setRows((old) => {
          const next = new Map(old);
          changes.rows.forEach((row) => next.set(row.id, row));
          changes.gone.forEach((id) => next.delete(id));
          return next;
        });
      }
      setState({ root: changes.root, loaded: true, trouble: null });
    } catch (error) {
      const lost = error instanceof TypeError;
      setState((old) => ({ ...old, trouble: lost ? "The connection to the server is lost; trying again…" : (error as Error).message }));
    }
  }, 2, []);
  return { rows, ...state };
}

function useTheme(): [string, () => void] {
  const [theme, setTheme] = useState(localStorage.getItem("theme") ?? "system");
  document.documentElement.dataset.theme = theme === "system" ? "" : theme;
  const [, redraw] = useReducer((count: number) => count + 1, 0);
  useEffect(() => {
    const change = () => redraw(0); // the system turned dark or light: charts take their colours anew
    DARK.addEventListener("change", change);
    return () => DARK.removeEventListener("change", change);
  }, []);
  const next = () => {
    const after = THEMES[(THEMES.indexOf(theme as (typeof THEMES)[number]) + 1) % THEMES.length];
    localStorage.setItem("theme", after);
    setTheme(after);
  };
  return [theme, next];
}

function App() {
  const route = useRoute();
  const { rows, root, loaded, trouble } = useRuns();
  const [theme, nextTheme] = useTheme();
  useKeys({ Escape: () => route.view !== "runs" && history.back(), t: nextTheme });
  return (
    <>
      <a class="skip" href="#content">Skip to the content</a>
      <nav aria-label="Main">
        <a class="brand" href={link("runs")}>RL Lab</a>
        <a href={link("runs")} aria-current={route.view === "runs" ? "page" : undefined}>Runs</a>
        <a href={link("compare")} aria-current={route.view === "compare" ? "page" : undefined}>Compare</a>
        <button class="plain theme" onClick={nextTheme} title="Light, dark, or as the system has it (t)">theme: {theme}</button>
      </nav>
      <Notice text={trouble} />
      <div id="content" tabIndex={-1}>
        {route.view === "run" ? <Run key={route.query.get("id") ?? ""} route={route} />
          : route.view === "dream" ? <DreamView key={route.query.get("id") ?? ""} route={route} />
          : route.view === "compare" ? <Compare route={route} rows={rows} />
          : <Runs route={route} rows={rows} root={root} loaded={loaded} />}
      </div>
    </>
  );
}

const place = document.getElementById("app")!;
place.textContent = "";
render(<App />, place);
