package wire

// Hello is the first frame on every connection: who asks and what it can do. It and Welcome are in tagged form in
// every version. A shim of version 0 does not read it and answers with its Snapshot.
type Hello struct {
	Version  int64  // the highest that the agent speaks
	Features uint64 // bits, of both sides: Feature...
}

// Welcome answers Hello. What follows on the connection, in both directions, is in the form of Version.
type Welcome struct {
	Version  int64 // the highest that both sides speak
	Features uint64
	Snapshot Snapshot
}

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

	// Where the end is kept beyond a power cut, and what is written there with it; "" = nowhere. Since version 1.
	EndFile, EndNote string
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

// Files is the number of files that travel with the frame.
func (m *Exec) Files() int {
	if m.TTY {
		return 1
	}
	return 3
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

// The fields of each message. A number is never used again for something else, and what version 0 does not have
// is visited only in later versions: version 0 is the fields in the order of the visit.

func (m *Hello) fields(c *coder) {
	c.num(1, &m.Version)
	c.bits(2, &m.Features)
}

func (m *Welcome) fields(c *coder) {
	c.num(1, &m.Version)
	c.bits(2, &m.Features)
	c.message(3, &m.Snapshot)
}

func (m *Pause) fields(c *coder) {
	c.str(1, &m.Root)
	c.str(2, &m.Program)
	c.str(3, &m.NetNS)
	c.flag(4, &m.NewIPC)
	c.flag(5, &m.NewUTS)
	c.flag(6, &m.NewPID)
	c.str(7, &m.Hostname)
	c.strs(8, &m.Sysctls)
}

func (m *Create) fields(c *coder) {
	c.str(1, &m.Container)
	c.str(2, &m.OCI)
	c.str(3, &m.Bundle)
	c.str(4, &m.Log)
	c.str(5, &m.ExitFile)
	c.str(6, &m.OOMFile)
	c.num(7, &m.LogSize)
	c.num(8, &m.LogFiles)
	c.flag(9, &m.TTY)
	c.flag(10, &m.Stdin)
	c.flag(11, &m.StdinOnce)
	if c.version > 0 {
		c.str(12, &m.EndFile)
		c.str(13, &m.EndNote)
	}
}

func (m *Start) fields(c *coder) {
	c.str(1, &m.Container)
	c.str(2, &m.Fifo)
}

func (m *Signal) fields(c *coder) {
	exec := int64(m.Exec)
	c.str(1, &m.Container)
	c.num(2, &exec)
	c.num(3, &m.Signal)
	if exec < 0 || exec > 1<<32-1 {
		c.bad, exec = true, 0
	}
	m.Exec = uint32(exec)
}

func (m *Exec) fields(c *coder) {
	c.str(1, &m.Container)
	c.str(2, &m.OCI)
	c.str(3, &m.Bundle)
	c.flag(4, &m.TTY)
}

func (m *Attach) fields(c *coder) {
	c.str(1, &m.Container)
	c.flag(2, &m.Stdin)
	c.flag(3, &m.Stdout)
	c.flag(4, &m.Stderr)
}

func (m *Resize) fields(c *coder) {
	c.str(1, &m.Container)
	c.num(2, &m.Width)
	c.num(3, &m.Height)
}

func (m *Target) fields(c *coder) { c.str(1, &m.Container) }

func (m *Done) fields(c *coder) {
	c.str(1, &m.Error)
	c.num(2, &m.Time)
}

func (m *Started) fields(c *coder) {
	c.str(1, &m.Error)
	c.num(2, &m.PID)
	c.str(3, &m.Result)
}

func (m *Exited) fields(c *coder) {
	c.str(1, &m.Container)
	c.num(2, &m.Code)
	c.num(3, &m.Time)
	c.flag(4, &m.OOM)
}

func (m *Status) fields(c *coder) {
	c.str(1, &m.Container)
	c.num(2, &m.State)
	c.num(3, &m.PID)
	c.num(4, &m.Started)
	c.message(5, &m.Exit)
}

func (m *Snapshot) fields(c *coder) {
	c.num(1, &m.PausePID)
	c.flag(2, &m.PauseEnded)
	n := c.count(3, len(m.Containers))
	if c.decoding {
		for range n {
			var s Status
			if c.message(3, &s); c.bad {
				return
			}
			m.Containers = append(m.Containers, s)
		}
		return
	}
	for i := range m.Containers {
		c.message(3, &m.Containers[i])
	}
}
