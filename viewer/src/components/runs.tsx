import { runs } from "../state";
import { Status } from "./overview";
import { PathText, SafeText } from "./text";

/** The runs, and the configuration keys in which they differ. */
export function RunTables() {
  const { runs: all, differing } = runs.value;
  return (
    <>
      <section>
        <h2>Runs</h2>
        <div class="scroll">
          <table class="all-runs">
            <thead>
              <tr>
                {["Run", "Project", "Step", "State", "Folder"].map((name) => (
                  <th key={name} scope="col">
                    {name}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {all.map((run) => (
                <tr key={run.id}>
                  <th scope="row">
                    <SafeText value={run.name} />
                  </th>
                  <td>
                    <SafeText value={run.project} />
                  </td>
                  <td>
                    {run.step}
                    {run.total_steps !== null && ` of ${run.total_steps}`}
                  </td>
                  <td>
                    <Status run={run} />
                  </td>
                  <td>
                    <SafeText value={run.folder} />
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </section>
      {all.length > 1 && (
        <section>
          <h2>Configuration differences</h2>
          {differing.length === 0 && <p>All configurations are equal.</p>}
          {differing.length > 0 && (
            <div class="scroll">
              <table class="differing">
                <thead>
                  <tr>
                    <th scope="col">Key</th>
                    {all.map((run) => (
                      <th key={run.id} scope="col">
                        <SafeText value={run.name} />
                      </th>
                    ))}
                  </tr>
                </thead>
                <tbody>
                  {differing.map(({ key, values }) => (
                    <tr key={key}>
                      <th scope="row">
                        <PathText value={key} />
                      </th>
                      {values.map((value, index) => (
                        <td key={index}>
                          <PathText value={String(value)} />
                        </td>
                      ))}
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          )}
        </section>
      )}
    </>
  );
}
