// Package drive has the common parts of the processes of the store's benchmark. A process is a
// member of a store or runs clients. It reads requests as JSON lines from stdin and writes replies
// to stdout. A request can start a load: concurrent clients that call the store. The package
// depends on the standard library alone. The reference, a separate module, uses it through a
// symbolic link.
package drive

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"
)

// RoleEnv is the environment variable with the role of a process of the benchmark.
const RoleEnv = "KEELSON_BENCH_ROLE"

// The values of RoleEnv.
const (
	RoleMember = "member" // a member of a raft cluster, with its Setup on stdin
	RoleLoad   = "load"   // clients in their own process
	RoleBurn   = "burn"   // keeps one processor busy until stdin is closed
)

// Setup is the first line that a process reads: its configuration.
type Setup struct {
	Name          string
	Dir           string
	Peer          string // host:port for the other members
	ClientAddress string `json:"Door"` // host:port for clients

	// Only for a member of Keelson.
	Bootstrap bool
	LogStore  string
	Authority []byte
	// CompareEvery is the interval at which the leader compares the members' states; 0 = default.
	CompareEvery  time.Duration
	SnapshotBytes int64 // size of the log after which a snapshot is taken; 0 = default

	// Only for a member of etcd.
	Cluster  map[string]string // peer address by name, of all members
	CertFile string
	KeyFile  string
	CAFile   string

	// Only for clients.
	Members []Address
	Conns   int // connections to each member
}

// Address is the client address of a member.
type Address struct{ Member, Address string }

// The values of Request.Do. The first group is for members, the second for processes with an
// Engine.
const (
	DoStatus   = "status"   // leader, term and readiness
	DoApplied  = "applied"  // index of the last applied entry
	DoMeters   = "meters"   // counters and memory
	DoCollect  = "collect"  // collect garbage and return the memory
	DoAdd      = "add"      // add Member at Address to the cluster
	DoTransfer = "transfer" // transfer leadership to another member
	DoSnapshot = "snapshot" // write a snapshot of the state
	DoProfile  = "profile"  // write a CPU profile to the file Address until ended

	DoPut     = "put"     // Clients in a closed loop of puts for Duration
	DoGet     = "get"     // the same with linearizable gets of the Count keys that a fill of Prefix wrote
	DoFill    = "fill"    // write Count keys, Ops in a commit
	DoList    = "list"    // list Prefix, Count times
	DoPace    = "pace"    // Count puts, one per interval Every
	DoWatch   = "watch"   // start Clients watchers on Prefix; replied to when they are started
	DoWatched = "watched" // wait until each watcher has received Count puts of DoPace
	DoBackup  = "backup"  // read the whole state through one connection
	DoEnd     = "end"     // stop the load of the request with the ID Of
)

// Request is one line that a process reads from stdin: an operation of a member, or a load.
type Request struct {
	ID      int
	Do      string
	Of      int
	Member  string
	Address string

	Through  []string // members to connect to; empty = all in turn
	Clients  int
	Size     int // bytes per value
	Count    int
	Ops      int
	Prefix   string
	Duration time.Duration
	Every    time.Duration
	Times    bool // return the time of each acknowledgement too
}

// Reply is one line that a process writes to stdout, with the ID of its request.
type Reply struct {
	ID    int
	Error string `json:",omitempty"`

	// Reply to DoStatus.
	Leader string `json:",omitempty"`
	Term   uint64 `json:",omitempty"`
	Ready  bool   `json:",omitempty"`

	Applied uint64             `json:",omitempty"` // index of the last applied entry
	Meters  map[string]float64 `json:",omitempty"` // metrics of a member, by name

	Micros []uint32 `json:",omitempty"` // latency of each successful call
	Acks   []int64  `json:",omitempty"` // times of acknowledgements in Unix microseconds; for DoPace by sequence number
	Failed int      `json:",omitempty"` // failed calls; Error has the first error
	Took   float64  `json:",omitempty"` // seconds
	Keys   int      `json:",omitempty"` // of one list
	Bytes  int64    `json:",omitempty"` // of one list or backup

	Arrivals [][]int64 `json:",omitempty"` // by watcher and sequence number, in Unix microseconds
}

// ErrorReply returns a reply with an error.
func ErrorReply(err error) Reply { return Reply{Error: err.Error()} }

// RequestReader reads the lines that a process receives: its Setup and its requests.
type RequestReader struct{ dec *json.Decoder }

// NewRequestReader returns a RequestReader that reads from in.
func NewRequestReader(in io.Reader) *RequestReader {
	return &RequestReader{json.NewDecoder(bufio.NewReader(in))}
}

// ReadSetup reads the first line, which must be a Setup.
func (l *RequestReader) ReadSetup() (Setup, error) {
	var s Setup
	if err := l.dec.Decode(&s); err != nil {
		return s, fmt.Errorf("reading the setup: %w", err)
	}
	return s, nil
}

// ServeRequests calls execute for each request in a new goroutine and writes the replies to out. It
// returns when in or ctx has ended and all requests are complete.
func (l *RequestReader) ServeRequests(
	ctx context.Context, out io.Writer, execute func(context.Context, Request) Reply,
) {
	ctx, cancel := context.WithCancel(ctx)
	var (
		mu      sync.Mutex
		replies = json.NewEncoder(out)
		wg      sync.WaitGroup
	)
	defer wg.Wait()
	defer cancel()
	for {
		var o Request
		if l.dec.Decode(&o) != nil || ctx.Err() != nil {
			return
		}
		wg.Go(func() {
			r := execute(ctx, o)
			r.ID = o.ID
			mu.Lock()
			defer mu.Unlock()
			// A write error means that the parent process is gone; reading then ends, too.
			_ = replies.Encode(r)
		})
	}
}
