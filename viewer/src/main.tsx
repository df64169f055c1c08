import "uplot/dist/uPlot.min.css";
import "./style.css";
import { render } from "preact";
import { App } from "./components/app";
import { onKeyDown } from "./keyboard";
import { pollRuns } from "./state";

document.addEventListener("keydown", onKeyDown);
render(<App />, document.getElementById("page") as HTMLElement);
void pollRuns();
