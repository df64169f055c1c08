import { runs } from "../state";
import { Text } from "./text";

/** The runs, and the keys of their configurations that differ. */
export function RunTables() {
  const { runs: all, differing } = runs.value;
  return (
    <>
      <section>
        <h2>Runs</h2>
        <table>
          <thead>
            <tr>
              {["run", "project", "step", "state", "folder"].map((name) => (
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
                  <Text value={run.name} />
                </th>
                <td>
                  <Text value={run.project} />
                </td>
                <td>
                  {run.step}
                  {run.total_steps !== null && ` of ${run.total_steps}`}
                </td>
                <td>{run.state}</td>
                <td>
                  <Text value={run.folder} />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </section>
      {all.length > 1 && (
        <section>
          <h2>Keys that differ</h2>
          {differing.length === 0 && <p>Their configurations are the same.</p>}
          {differing.length > 0 && (
            <table class="differing">
              <thead>
                <tr>
                  <th scope="col">key</th>
                  {all.map((run) => (
                    <th key={run.id} scope="col">
                      <Text value={run.name} />
                    </th>
                  ))}
                </tr>
              </thead>
              <tbody>
                {differing.map(({ key, values }) => (
                  <tr key={key}>
                    <th scope="row">
                      <Text value={key} />
                    </th>
                    {values.map((value, index) => (
                      <td key={index}>
                        <Text value={String(value)} />
                      </td>
                    ))}
                  </tr>
                ))}
              </tbody>
            </table>
          )}
        </section>
      )}
    </>
  );
}
