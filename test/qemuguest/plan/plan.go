// Package plan has the messages between the test and the guest's first process. A Plan is a file in
// the guest's root. The guest sends Reports over a serial line, as one JSON text a line.
package plan

// File is the path of the plan in the guest.
const File = "/guest/plan.json"

// Plan lists everything that a guest does before it shuts down.
type Plan struct {
	Modules  []string  `json:"modules,omitempty"` // files in the guest, in loading order
	Programs []Program `json:"programs"`          // run one after the other
}

// Program is a program that runs in its own cgroup, like a systemd service.
type Program struct {
	Name    string   `json:"name"`
	Args    []string `json:"args"`
	Env     []string `json:"env,omitempty"`
	Seconds int      `json:"seconds"` // after which it is killed
}

// Report is one line on the serial line.
type Report struct {
	Clock   float64 `json:"clock"` // seconds since init started
	Program string  `json:"program,omitempty"`
	Line    string  `json:"line,omitempty"`  // of the program's output
	Exit    *int    `json:"exit,omitempty"`  // exit status of the program, or 128 + signal number
	Fault   string  `json:"fault,omitempty"` // error of the guest's first process
	Done    bool    `json:"done,omitempty"`  // in the last report: all programs have exited
}
