// Package drive is what the processes of the store's benchmark have in common:
// the orders they take as JSON lines on stdin, and the load they make when told
// to. It knows neither Keelson nor etcd, and nothing outside the standard
// library, since the reference, a module of its own, sees it through a link.
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

// RoleEnv names the environment variable that makes a program one of the
// benchmark's processes.
const RoleEnv = "KEELSON_BENCH_ROLE"

// The roles.
const (
	RoleMember = "member" // one member of a group, with its Setup on stdin
	RoleLoad   = "load"   // clients in a process of their own
	RoleBurn   = "burn"   // one processor kept busy until stdin ends
)

// Setup is the first line that a process reads.
type Setup struct {
	Name string
	Dir  string
	Peer string // host:port for the other members
	Door string // host:port for clients

	// Of a member of Keelson.
	Bootstrap bool
	LogStore  string
	Authority []byte
	// CompareEvery is how often the leader compares the members' states; 0 = its default.
	CompareEvery  time.Duration
	SnapshotBytes int64 // of the log, after which it takes a snapshot; 0 = its default

	// Of a member of etcd.
	Cluster  map[string]string // peer address by name, of all members
	CertFile string
	KeyFile  string
	CAFile   string

	// Of clients.
	Members []Address
	Conns   int // connections to each member
}

// Address is where clients reach a member.
type Address struct{ Member, Address string }

// The orders. Members know the first ones, what has targets knows the others.
const (
	DoStatus   = "status"   // who leads, which term, ready?
	DoApplied  = "applied"  // how far has the member come?
	DoMeters   = "meters"   // what the member counts, and its memory
	DoCollect  = "collect"  // collect garbage and give the memory back
	DoAdd      = "add"      // make Member at Address one of the group
	DoTransfer = "transfer" // the leader gives its leadership to another
	DoSnapshot = "snapshot" // write a snapshot of the state
	DoProfile  = "profile"  // write a CPU profile to the file Address until ended

	DoPut     = "put"     // Clients in a closed loop of puts for Duration
	DoGet     = "get"     // the same with linearizable gets, of the Count keys that a fill of Prefix put
	DoFill    = "fill"    // put Count keys, Ops in a commit
	DoList    = "list"    // list Prefix, Count times
	DoPace    = "pace"    // Count puts, one Every
	DoWatch   = "watch"   // set Clients watchers on Prefix; answered when they are set
	DoWatched = "watched" // wait until each of them has seen Count puts of pace
	DoBackup  = "backup"  // read all of the state through one target
	DoEnd     = "end"     // end the load whose order has the ID Of
)

// Order is one line to a process.
type Order struct {
	ID      int
	Do      string
	Of      int
	Member  string
	Address string

	Through  []string // the members to go through; none = all, in turn
	Clients  int
	Size     int // bytes per value
	Count    int
	Ops      int
	Prefix   string
	Duration time.Duration
	Every    time.Duration
	Times    bool // also tell when each call was acknowledged
}

// Reply is one line back, with the ID of its order.
type Reply struct {
	ID    int
	Error string `json:",omitempty"`

	// Of status.
	Leader string `json:",omitempty"`
	Term   uint64 `json:",omitempty"`
	Ready  bool   `json:",omitempty"`

	Applied uint64             `json:",omitempty"` // index of the last entry applied
	Meters  map[string]float64 `json:",omitempty"` // of meters, by name

	Micros []uint32 `json:",omitempty"` // latency of each call that succeeded
	Acks   []int64  `json:",omitempty"` // when, in unix microseconds; of pace by sequence
	Failed int      `json:",omitempty"` // calls that ended with an error; Error tells the first
	Took   float64  `json:",omitempty"` // seconds
	Keys   int      `json:",omitempty"` // of one list
	Bytes  int64    `json:",omitempty"` // of one list or backup

	Arrivals [][]int64 `json:",omitempty"` // by watcher and sequence, in unix microseconds
}

// Fail is a reply that tells an error.
func Fail(err error) Reply { return Reply{Error: err.Error()} }

// Lines reads the lines of a process.
type Lines struct{ dec *json.Decoder }

// NewLines reads from in.
func NewLines(in io.Reader) *Lines { return &Lines{json.NewDecoder(bufio.NewReader(in))} }

// Setup reads the first line.
func (l *Lines) Setup() (Setup, error) {
	var s Setup
	if err := l.dec.Decode(&s); err != nil {
		return s, fmt.Errorf("reading the setup: %w", err)
	}
	return s, nil
}

// Serve obeys orders, each at once and in a goroutine of its own, until the
// lines or ctx end. It returns when the last of them is obeyed.
func (l *Lines) Serve(ctx context.Context, out io.Writer, obey func(context.Context, Order) Reply) {
	ctx, cancel := context.WithCancel(ctx)
	var (
		mu      sync.Mutex
		replies = json.NewEncoder(out)
		wg      sync.WaitGroup
	)
	defer wg.Wait()
	defer cancel()
	for {
		var o Order
		if l.dec.Decode(&o) != nil || ctx.Err() != nil {
			return
		}
		wg.Go(func() {
			r := obey(ctx, o)
			r.ID = o.ID
			mu.Lock()
			defer mu.Unlock()
			// Who gave the order may be gone; the end of the lines tells so.
			_ = replies.Encode(r)
		})
	}
}
