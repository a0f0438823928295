// Package plan is what the test and the first process of its guest tell each other: a Plan goes in with the guest's
// files, Reports come out over a serial line, one JSON text a line.
package plan

// File is where the guest finds its plan.
const File = "/guest/plan.json"

// Plan is all that a guest does before it ends.
type Plan struct {
	Modules  []string  `json:"modules,omitempty"` // files, in the order in which they are loaded
	Programs []Program `json:"programs"`          // run one after the other
}

// Program runs in a cgroup of its own, as a service of a host does.
type Program struct {
	Name    string   `json:"name"`
	Args    []string `json:"args"`
	Env     []string `json:"env,omitempty"`
	Seconds int      `json:"seconds"` // after which it is killed, with all that it started
}

// Report is one line of the guest.
type Report struct {
	Clock   float64 `json:"clock"` // the guest's, in seconds
	Program string  `json:"program,omitempty"`
	Line    string  `json:"line,omitempty"`  // of its output
	Exit    *int    `json:"exit,omitempty"`  // it has ended: its exit status, or 128 and its signal
	Fault   string  `json:"fault,omitempty"` // of the guest itself
	Done    bool    `json:"done,omitempty"`  // the last report: all programs have ended
}
