package wire

// Pause asks for the pod's pause process.
type Pause struct {
	Root     string   // folder that becomes its root; holds the program
	Program  string   // path of the program below Root: "/keelson-pause"
	NetNS    string   // path of the network namespace to join; "" = the shim's
	NewIPC   bool     // an IPC namespace of its own
	NewUTS   bool     // a host name of its own
	NewPID   bool     // the pod's containers share a process namespace with pause as first process
	Hostname string   // with NewUTS
	Sysctls  []string // "net.core.somaxconn=1024"
}

// Create asks for a container, which then waits for Start.
type Create struct {
	Container string
	OCI       string // path of keelson-oci
	Bundle    string // path of the request file that keelson-oci reads
	Log       string // path of the log; "" = output is dropped
	LogSize   int64  // rotate at that size
	LogFiles  int64
	ExitFile  string // where the end is recorded
	OOMFile   string // memory.oom_control or memory.events of its cgroup; "" = none
	TTY       bool
	Stdin     bool
	StdinOnce bool
}

// Start releases a created container.
type Start struct {
	Container string
	Fifo      string
}

// Signal goes to the first process of a container, to pause when Container is
// empty, or to the process of the Exec with that request id on this connection.
type Signal struct {
	Container string
	Exec      uint32
	Signal    int64
}

// Exec runs one more process in a container. Its files travel with the frame:
// stdin, stdout and stderr, or with TTY the socket that receives the terminal.
type Exec struct {
	Container string
	OCI       string
	Bundle    string
	TTY       bool
}

// Attach joins the streams of a container. The files travel with the frame in the
// order stdin (to read from), stdout, stderr (to write to), those that are wanted.
type Attach struct {
	Container             string
	Stdin, Stdout, Stderr bool
}

// Resize sets the size of a container's terminal.
type Resize struct {
	Container     string
	Width, Height int64
}

// Target names a container.
type Target struct{ Container string }

// Done answers what has no other answer. Error is empty on success.
type Done struct {
	Error string
	Time  int64 // ns since 1970: when it was done
}

// Started answers Pause, Create and Exec.
type Started struct {
	Error  string
	PID    int64
	Result string // what keelson-oci had to say, JSON
}

// Exited says how a process ended.
type Exited struct {
	Container string // "" = pause, or an exec
	Code      int64  // exit code, or 128 + signal
	Time      int64  // ns since 1970
	OOM       bool
}

// State of a container in a Snapshot.
const (
	StateCreated int64 = 1 + iota
	StateRunning
	StateExited
)

// Status of one container.
type Status struct {
	Container string
	State     int64
	PID       int64
	Started   int64 // ns since 1970
	Exit      Exited
}

// Snapshot is all that a shim knows.
type Snapshot struct {
	PausePID   int64 // 0 = never started
	PauseEnded bool
	Containers []Status
}

// Marshal and Unmarshal of each message; Unmarshal returns ErrMalformed for
// anything that Marshal cannot have written.

func (m *Pause) Marshal() []byte {
	var e enc
	e.str(m.Root)
	e.str(m.Program)
	e.str(m.NetNS)
	e.flag(m.NewIPC)
	e.flag(m.NewUTS)
	e.flag(m.NewPID)
	e.str(m.Hostname)
	e.strs(m.Sysctls)
	return e.b
}

func (m *Pause) Unmarshal(b []byte) error {
	d := dec{b: b}
	*m = Pause{Root: d.str(), Program: d.str(), NetNS: d.str(), NewIPC: d.flag(), NewUTS: d.flag(), NewPID: d.flag(),
		Hostname: d.str(), Sysctls: d.strs()}
	return d.end()
}

func (m *Create) Marshal() []byte {
	var e enc
	for _, s := range []string{m.Container, m.OCI, m.Bundle, m.Log, m.ExitFile, m.OOMFile} {
		e.str(s)
	}
	e.num(m.LogSize)
	e.num(m.LogFiles)
	e.flag(m.TTY)
	e.flag(m.Stdin)
	e.flag(m.StdinOnce)
	return e.b
}

func (m *Create) Unmarshal(b []byte) error {
	d := dec{b: b}
	*m = Create{Container: d.str(), OCI: d.str(), Bundle: d.str(), Log: d.str(), ExitFile: d.str(), OOMFile: d.str(),
		LogSize: d.num(), LogFiles: d.num(), TTY: d.flag(), Stdin: d.flag(), StdinOnce: d.flag()}
	return d.end()
}

func (m *Start) Marshal() []byte {
	var e enc
	e.str(m.Container)
	e.str(m.Fifo)
	return e.b
}

func (m *Start) Unmarshal(b []byte) error {
	d := dec{b: b}
	*m = Start{Container: d.str(), Fifo: d.str()}
	return d.end()
}

func (m *Signal) Marshal() []byte {
	var e enc
	e.str(m.Container)
	e.num(int64(m.Exec))
	e.num(m.Signal)
	return e.b
}

func (m *Signal) Unmarshal(b []byte) error {
	d := dec{b: b}
	name, exec := d.str(), d.num()
	if exec < 0 || exec > 1<<32-1 {
		return ErrMalformed
	}
	*m = Signal{Container: name, Exec: uint32(exec), Signal: d.num()}
	return d.end()
}

func (m *Exec) Marshal() []byte {
	var e enc
	e.str(m.Container)
	e.str(m.OCI)
	e.str(m.Bundle)
	e.flag(m.TTY)
	return e.b
}

func (m *Exec) Unmarshal(b []byte) error {
	d := dec{b: b}
	*m = Exec{Container: d.str(), OCI: d.str(), Bundle: d.str(), TTY: d.flag()}
	return d.end()
}

// Files is the number of files that travel with the frame.
func (m *Exec) Files() int {
	if m.TTY {
		return 1
	}
	return 3
}

func (m *Attach) Marshal() []byte {
	var e enc
	e.str(m.Container)
	e.flag(m.Stdin)
	e.flag(m.Stdout)
	e.flag(m.Stderr)
	return e.b
}

func (m *Attach) Unmarshal(b []byte) error {
	d := dec{b: b}
	*m = Attach{Container: d.str(), Stdin: d.flag(), Stdout: d.flag(), Stderr: d.flag()}
	return d.end()
}

// Files is the number of files that travel with the frame.
func (m *Attach) Files() int {
	n := 0
	for _, want := range [...]bool{m.Stdin, m.Stdout, m.Stderr} {
		if want {
			n++
		}
	}
	return n
}

func (m *Resize) Marshal() []byte {
	var e enc
	e.str(m.Container)
	e.num(m.Width)
	e.num(m.Height)
	return e.b
}

func (m *Resize) Unmarshal(b []byte) error {
	d := dec{b: b}
	*m = Resize{Container: d.str(), Width: d.num(), Height: d.num()}
	return d.end()
}

func (m *Target) Marshal() []byte {
	var e enc
	e.str(m.Container)
	return e.b
}

func (m *Target) Unmarshal(b []byte) error {
	d := dec{b: b}
	*m = Target{Container: d.str()}
	return d.end()
}

func (m *Done) Marshal() []byte {
	var e enc
	e.str(m.Error)
	e.num(m.Time)
	return e.b
}

func (m *Done) Unmarshal(b []byte) error {
	d := dec{b: b}
	*m = Done{Error: d.str(), Time: d.num()}
	return d.end()
}

func (m *Started) Marshal() []byte {
	var e enc
	e.str(m.Error)
	e.num(m.PID)
	e.str(m.Result)
	return e.b
}

func (m *Started) Unmarshal(b []byte) error {
	d := dec{b: b}
	*m = Started{Error: d.str(), PID: d.num(), Result: d.str()}
	return d.end()
}

func (m *Exited) Marshal() []byte {
	var e enc
	m.put(&e)
	return e.b
}

func (m *Exited) put(e *enc) {
	e.str(m.Container)
	e.num(m.Code)
	e.num(m.Time)
	e.flag(m.OOM)
}

func (m *Exited) take(d *dec) {
	*m = Exited{Container: d.str(), Code: d.num(), Time: d.num(), OOM: d.flag()}
}

func (m *Exited) Unmarshal(b []byte) error {
	d := dec{b: b}
	m.take(&d)
	return d.end()
}

func (m *Snapshot) Marshal() []byte {
	var e enc
	e.num(m.PausePID)
	e.flag(m.PauseEnded)
	e.num(int64(len(m.Containers)))
	for i := range m.Containers {
		s := &m.Containers[i]
		e.str(s.Container)
		e.num(s.State)
		e.num(s.PID)
		e.num(s.Started)
		s.Exit.put(&e)
	}
	return e.b
}

func (m *Snapshot) Unmarshal(b []byte) error {
	d := dec{b: b}
	*m = Snapshot{PausePID: d.num(), PauseEnded: d.flag()}
	n := d.num()
	if n < 0 || n > int64(len(d.b)) {
		return ErrMalformed
	}
	for range n {
		s := Status{Container: d.str(), State: d.num(), PID: d.num(), Started: d.num()}
		s.Exit.take(&d)
		if d.bad {
			return ErrMalformed
		}
		m.Containers = append(m.Containers, s)
	}
	return d.end()
}
