package wire

// Hello is the first frame on every connection: the agent's version and features. Hello and Welcome
// are in tagged form in every version. A shim of version 0 ignores the content and responds with
// its Snapshot.
type Hello struct {
	Version  int64  // highest version that the agent supports
	Features uint64 // bits: Feature...
}

// Welcome is the response to Hello. All later frames of the connection, in both directions, are in
// the form of Version.
type Welcome struct {
	Version  int64 // highest version that both sides support
	Features uint64
	Snapshot Snapshot
}

// Pause requests to start the pod's pause process.
type Pause struct {
	Root     string   // directory that becomes its root; contains the program
	Program  string   // path of the program in Root: "/keelson-pause"
	NetNS    string   // path of the network namespace to join; "" = the shim's
	NewIPC   bool     // create an IPC namespace
	NewUTS   bool     // create a UTS namespace
	NewPID   bool     // create a PID namespace with pause as first process, for all containers
	Hostname string   // with NewUTS
	Sysctls  []string // "net.core.somaxconn=1024"
}

// Create requests to create a container, which then waits for Start.
type Create struct {
	Container string
	OCI       string // path of keelson-oci
	Bundle    string // path of the request file for keelson-oci
	Log       string // path of the log; "" = output is dropped
	LogSize   int64  // size at which the log is rotated
	LogFiles  int64
	ExitFile  string // file for the record of its end
	OOMFile   string // memory.oom_control or memory.events of its cgroup; "" = none
	TTY       bool
	Stdin     bool
	StdinOnce bool

	// EndFile is the durable file for the end of the container; "" = none. EndNote is written to it
	// after the end. Since version 1.
	EndFile, EndNote string
}

// Start requests to start a created container.
type Start struct {
	Container string
	Fifo      string
}

// Signal requests to send a signal to the first process of a container, or to pause if Container is
// empty. If Exec is set, the target is the process of the Exec request with that ID on this
// connection.
type Signal struct {
	Container string
	Exec      uint32
	Signal    int64
}

// Exec requests to run another process in a container. Its files are sent with the frame: stdin,
// stdout and stderr, or with TTY the socket that receives the terminal.
type Exec struct {
	Container string
	OCI       string
	Bundle    string
	TTY       bool
}

// Attach requests to connect to the streams of a container. The wanted files are sent with the
// frame in the order stdin (to read from), stdout, stderr (to write to).
type Attach struct {
	Container             string
	Stdin, Stdout, Stderr bool
}

// Resize requests to set the size of a container's terminal.
type Resize struct {
	Container     string
	Width, Height int64
}

// Target identifies a container.
type Target struct{ Container string }

// Done is the response to requests without a specific response. Error is empty on success.
type Done struct {
	Error string
	Time  int64 // ns since 1970: when the request was done
}

// Started is the response to Pause, Create and Exec.
type Started struct {
	Error  string
	PID    int64
	Result string // JSON response of keelson-oci
}

// Exited reports how a process ended.
type Exited struct {
	Container string // "" = pause, or a process of Exec
	Code      int64  // exit code, or 128 + signal
	Time      int64  // ns since 1970
	OOM       bool
}

// The states of a container in a Snapshot.
const (
	StateCreated int64 = 1 + iota
	StateRunning
	StateExited
)

// Status is the state of one container.
type Status struct {
	Container string
	State     int64
	PID       int64
	Started   int64 // ns since 1970
	Exit      Exited
}

// Snapshot is the state of a shim: its pause process and its containers.
type Snapshot struct {
	PausePID   int64 // 0 = never started
	PauseEnded bool
	Containers []Status
}

// Files returns the number of files that are sent with the frame.
func (m *Exec) Files() int {
	if m.TTY {
		return 1
	}
	return 3
}

// Files returns the number of files that are sent with the frame.
func (m *Attach) Files() int {
	n := 0
	for _, want := range [...]bool{m.Stdin, m.Stdout, m.Stderr} {
		if want {
			n++
		}
	}
	return n
}

// The fields of each message. A field number is never reused. Fields that version 0 does not have
// are visited only in later versions, because version 0 is the fields in the order of the visit.

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
