package wire

// Hello is the first frame on every connection: the agent's version and features. Hello and Welcome
// are encoded as in version 1 in every version. A shim of version 0 ignores the content and
// responds with its Snapshot.
type Hello struct {
	Version  int64  // highest version that the agent supports
	Features uint64 // bit set of Feature constants
}

// Welcome is the response to Hello. All later frames of the connection, in both directions, are
// encoded as in the protocol version Version.
type Welcome struct {
	Version  int64 // highest version that both sides support
	Features uint64
	Snapshot Snapshot
}

// Pause is the request to start the pod's pause process.
type Pause struct {
	Root     string   // directory that becomes the root of pause; contains the program
	Program  string   // path of the program in Root: "/keelson-pause"
	NetNS    string   // path of the network namespace to join; "" = the shim's
	NewIPC   bool     // create an IPC namespace
	NewUTS   bool     // create a UTS namespace
	NewPID   bool     // create a PID namespace with pause as first process, for all containers
	Hostname string   // host name in the UTS namespace; only with NewUTS
	Sysctls  []string // "net.core.somaxconn=1024"
}

// Create is the request to create a container, which then waits for Start.
type Create struct {
	Container string
	OCI       string // path of keelson-oci
	Bundle    string // path of the request file for keelson-oci
	Log       string // path of the log; "" = output is dropped
	LogSize   int64  // size at which the log is rotated
	LogFiles  int64
	ExitFile  string // file for the exit record of the container
	OOMFile   string // memory.oom_control or memory.events of the container's cgroup; "" = none
	TTY       bool
	Stdin     bool
	StdinOnce bool

	// EndFile is the durable file to which the shim writes the container's exit record and then
	// EndNote; "" = none. Since version 1.
	EndFile, EndNote string
}

// Start is the request to start a created container.
type Start struct {
	Container string
	Fifo      string
}

// Signal is the request to send a signal to the first process of a container, or to pause if
// Container is empty. If Exec is set, the target is the process of the Exec request with that ID on
// this connection.
type Signal struct {
	Container string
	Exec      uint32
	Signal    int64
}

// Exec is the request to run another process in a container. Its files are sent with the frame:
// stdin, stdout and stderr, or with TTY the socket that receives the terminal.
type Exec struct {
	Container string
	OCI       string
	Bundle    string
	TTY       bool
}

// Attach is the request to connect to the streams of a container. One file is sent with the frame
// for each stream that is set to true, in the order stdin (to read from), stdout, stderr (to write
// to).
type Attach struct {
	Container             string
	Stdin, Stdout, Stderr bool
}

// Resize is the request to set the size of a container's terminal.
type Resize struct {
	Container     string
	Width, Height int64
}

// Target identifies the container of a request that has no other fields.
type Target struct{ Container string }

// Done is the response to requests without a specific response. Error is empty on success.
type Done struct {
	Error string
	Time  int64 // nanoseconds since 1970: when the request was completed
}

// Started is the response to Pause, Create and Exec.
type Started struct {
	Error  string
	PID    int64
	Result string // JSON response of keelson-oci
}

// Exited reports how a process exited.
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

// Status is the state of one container in a Snapshot.
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
	for _, wanted := range [...]bool{m.Stdin, m.Stdout, m.Stderr} {
		if wanted {
			n++
		}
	}
	return n
}

// The encoded fields of each message. A field number is never reused. In version 0, the fields are
// encoded in the order in which they are visited. Fields that version 0 does not have are visited
// only in later versions.

func (m *Hello) visitFields(c *coder) {
	c.numberField(1, &m.Version)
	c.bitsField(2, &m.Features)
}

func (m *Welcome) visitFields(c *coder) {
	c.numberField(1, &m.Version)
	c.bitsField(2, &m.Features)
	c.messageField(3, &m.Snapshot)
}

func (m *Pause) visitFields(c *coder) {
	c.stringField(1, &m.Root)
	c.stringField(2, &m.Program)
	c.stringField(3, &m.NetNS)
	c.flagField(4, &m.NewIPC)
	c.flagField(5, &m.NewUTS)
	c.flagField(6, &m.NewPID)
	c.stringField(7, &m.Hostname)
	c.stringsField(8, &m.Sysctls)
}

func (m *Create) visitFields(c *coder) {
	c.stringField(1, &m.Container)
	c.stringField(2, &m.OCI)
	c.stringField(3, &m.Bundle)
	c.stringField(4, &m.Log)
	c.stringField(5, &m.ExitFile)
	c.stringField(6, &m.OOMFile)
	c.numberField(7, &m.LogSize)
	c.numberField(8, &m.LogFiles)
	c.flagField(9, &m.TTY)
	c.flagField(10, &m.Stdin)
	c.flagField(11, &m.StdinOnce)
	if c.version > 0 {
		c.stringField(12, &m.EndFile)
		c.stringField(13, &m.EndNote)
	}
}

func (m *Start) visitFields(c *coder) {
	c.stringField(1, &m.Container)
	c.stringField(2, &m.Fifo)
}

func (m *Signal) visitFields(c *coder) {
	exec := int64(m.Exec)
	c.stringField(1, &m.Container)
	c.numberField(2, &exec)
	c.numberField(3, &m.Signal)
	if exec < 0 || exec > 1<<32-1 {
		c.malformed, exec = true, 0
	}
	m.Exec = uint32(exec)
}

func (m *Exec) visitFields(c *coder) {
	c.stringField(1, &m.Container)
	c.stringField(2, &m.OCI)
	c.stringField(3, &m.Bundle)
	c.flagField(4, &m.TTY)
}

func (m *Attach) visitFields(c *coder) {
	c.stringField(1, &m.Container)
	c.flagField(2, &m.Stdin)
	c.flagField(3, &m.Stdout)
	c.flagField(4, &m.Stderr)
}

func (m *Resize) visitFields(c *coder) {
	c.stringField(1, &m.Container)
	c.numberField(2, &m.Width)
	c.numberField(3, &m.Height)
}

func (m *Target) visitFields(c *coder) { c.stringField(1, &m.Container) }

func (m *Done) visitFields(c *coder) {
	c.stringField(1, &m.Error)
	c.numberField(2, &m.Time)
}

func (m *Started) visitFields(c *coder) {
	c.stringField(1, &m.Error)
	c.numberField(2, &m.PID)
	c.stringField(3, &m.Result)
}

func (m *Exited) visitFields(c *coder) {
	c.stringField(1, &m.Container)
	c.numberField(2, &m.Code)
	c.numberField(3, &m.Time)
	c.flagField(4, &m.OOM)
}

func (m *Status) visitFields(c *coder) {
	c.stringField(1, &m.Container)
	c.numberField(2, &m.State)
	c.numberField(3, &m.PID)
	c.numberField(4, &m.Started)
	c.messageField(5, &m.Exit)
}

func (m *Snapshot) visitFields(c *coder) {
	c.numberField(1, &m.PausePID)
	c.flagField(2, &m.PauseEnded)
	n := c.countElements(3, len(m.Containers))
	if c.decoding {
		for range n {
			var s Status
			if c.messageField(3, &s); c.malformed {
				return
			}
			m.Containers = append(m.Containers, s)
		}
		return
	}
	for i := range m.Containers {
		c.messageField(3, &m.Containers[i])
	}
}
