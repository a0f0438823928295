// Command slowest reads the events of `go test -json` from standard input and prints what `go test`
// prints without -v: the line of each package, and the output of tests and packages that failed. At
// the end it prints the tests that took longest. The time of a test that runs in parallel with
// others includes the time in which it was paused.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// testEvent is one line of `go test -json`; see `go doc test2json`.
type testEvent struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

// testResult is a test with the seconds that it took.
type testResult struct {
	pkg, test string
	seconds   float64
}

func main() {
	most := flag.Int("n", 20, "number of slowest tests to print; 0 = none")
	flag.Parse()
	if err := filterEvents(os.Stdin, os.Stdout, *most); err != nil {
		fmt.Fprintln(os.Stderr, "slowest:", err)
		os.Exit(1)
	}
}

// filterEvents copies the relevant output from in to out and prints the slowest tests, at most most
// of them. A line that is not an event is copied unchanged.
func filterEvents(in io.Reader, out io.Writer, most int) error {
	lines := bufio.NewReaderSize(in, 1<<20)
	kept := map[string][]string{} // output of running tests, by package and test
	var results []testResult
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e testEvent
			if json.Unmarshal(line, &e) != nil {
				_, _ = out.Write(line)
			} else {
				results = handleEvent(out, e, kept, results)
			}
		}
		if err == io.EOF {
			printSlowest(out, results, most)
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// handleEvent processes one event. Output of a test is printed when the test, or its package, has
// failed.
func handleEvent(out io.Writer, e testEvent, kept map[string][]string, results []testResult) []testResult {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "output", "build-output":
		if e.Test == "" && !strings.HasPrefix(e.Output, "=== ") && e.Output != "PASS\n" {
			fmt.Fprint(out, e.Output)
		} else if e.Test != "" {
			kept[key] = append(kept[key], e.Output)
		}
	case "pass", "skip", "fail":
		if e.Action == "fail" {
			for name, texts := range kept {
				// If a package fails while tests run, for example by a panic, kept has the output
				// of these tests.
				if name == key || e.Test == "" && strings.HasPrefix(name, e.Package+" ") {
					fmt.Fprint(out, strings.Join(texts, ""))
					delete(kept, name)
				}
			}
		}
		delete(kept, key)
		if e.Test != "" && !strings.Contains(e.Test, "/") {
			results = append(results, testResult{e.Package, e.Test, e.Elapsed})
		}
	}
	return results
}

func printSlowest(out io.Writer, results []testResult, most int) {
	slices.SortStableFunc(results, func(a, b testResult) int { return cmp.Compare(b.seconds, a.seconds) })
	results = results[:min(most, len(results))]
	if len(results) == 0 {
		return
	}
	fmt.Fprintf(out, "== the %d slowest tests\n", len(results))
	for _, r := range results {
		fmt.Fprintf(out, "%8.1f s  %s %s\n", r.seconds, strings.TrimPrefix(r.pkg, "keelson.dev/keelson/"), r.test)
	}
}
